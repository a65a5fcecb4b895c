"""Which vLLM is installed, and whether it fits.

`SIGNATURES` and `NAMES` list all that every engine uses of vLLM, `PARTS` what an engine can do
without. They are compared with what is imported here, and with wheels by
``python -m integration.vllm.signatures``.
Further parameters may follow: :mod:`mtp_plugin.speculative.host.signatures`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mtp_plugin.errors import HostError
from mtp_plugin.speculative.host import signatures
from mtp_plugin.speculative.host.signatures import INSTALLED, Names, Reader, Signatures

TESTED = {"0.32": "CPU", "0.33": "GPU and CPU"}
"""Versions that start without a warning, and where they were tested."""
OLDEST = (0, 32)
"""What the refusal of an older version says to install."""

_GPU = "vllm.v1.worker.gpu"


def _read(text: str) -> dict[str, tuple[str, ...]]:
    """Read a table; ``GPU`` is the package of the V2 model runner."""
    return signatures.read_table(text, {"GPU": _GPU})


# a method that ends with ``...`` is only wrapped
_TABLE = _read("""
vllm.v1.worker.worker_base:WorkerBase.__init__(vllm_config, local_rank, rank, ...)
vllm.v1.engine.input_processor:InputProcessor.__init__(vllm_config, ...)
vllm.v1.engine.input_processor:InputProcessor._validate_params(params, ...)
vllm.sampling_params:SamplingParams._validate_spec_decode(speculative_config, ...)
vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats(
    spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id,
    ...)
vllm.v1.core.sched.scheduler:Scheduler.add_request(request, ...)
vllm.v1.core.sched.scheduler:Scheduler.update_from_output(
    scheduler_output, model_runner_output, ...)
vllm.v1.engine.core:EngineCore.preprocess_add_request(request, ...)
vllm.v1.engine.core:EngineCoreProc._handle_request_preproc_error(request, ...)
vllm.v1.engine.core:EngineCoreProc._send_error_outputs_to_client(req_ids, client_index)
GPU.model_states.interface:ModelState.custom_sampler(sampler, ...)
GPU.model_runner:GPUModelRunner.load_model(...)
GPU.sample.sampler:Sampler.apply_staged_writes(...)
GPU.sample.sampler:Sampler.__call__(logits, input_batch, ...)
GPU.sample.states:SamplingStates.max_num_logprobs(idx_mapping_np)
GPU.metrics.logits:get_num_nans(logits)
GPU.sample.output:SamplerOutput(
    sampled_token_ids, logprobs_tensors, num_nans, num_sampled, num_rejected)
GPU.spec_decode.rejection_sampler:RejectionSampler.__init__(sampler, spec_config, device)
GPU.sample.states:SamplingStates.apply_temperature(logits, expanded_idx_mapping, idx_mapping_np)
GPU.sample.states:SamplingStates.apply_min_p(logits, expanded_idx_mapping, idx_mapping_np)
GPU.sample.states:SamplingStates.apply_top_k_top_p(logits, expanded_idx_mapping, idx_mapping_np)
GPU.spec_decode.speculator:DraftModelSpeculator.load_model(...)
GPU.states:RequestState.add_request(req_id, prompt_len, all_token_ids, ...)
GPU.input_batch:get_num_sampled_and_rejected(
    num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len)
GPU.sample.sampler:Sampler.add_request(req_idx, sampling_params, ...)
GPU.sample.states:SamplingStates.add_request(...)
GPU.sample.thinking_budget:ThinkingBudgetState.apply(logits, ctx)
GPU.sample.logits_processor.interface:LogitsContext(
    expanded_idx_mapping, idx_mapping, idx_mapping_np, expanded_local_pos, input_ids, pos,
    seq_lens_upper_bound_np)
GPU.sample.sampler:Sampler.sample(
    logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
    seq_lens_upper_bound_np, return_logprobs)
GPU.spec_decode.rejection_sampler:RejectionSampler.__call__(
    logits, input_batch, draft_logits, invalid_drafts)
GPU.spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors(
    sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs)
GPU.spec_decode.rejection_sampler:gather_draft_sampled(
    input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos, prefill_len)
GPU.spec_decode.speculator:DraftModelSpeculator.sample_draft(
    hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits,
    spec_step_idx)
GPU.spec_decode.speculator:DraftModelSpeculator.compute_draft_logits(hidden_states, spec_step_idx)
""")
SIGNATURES: Signatures = {
    target: tuple(name for name in names if name != "...") for target, names in _TABLE.items()
}
WRAPPED = frozenset(target for target, names in _TABLE.items() if "..." in names)
"""Methods whose calls are handed on to the original."""
SAMPLE_DRAFT = f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.sample_draft"
VERIFY = f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__"
SAMPLE = f"{_GPU}.sample.sampler:Sampler.sample"
SAMPLE_LOGITS = f"{_GPU}.spec_decode.dspark.speculator:DSparkSpeculator._sample_logits"
REPLACED = (SAMPLE_DRAFT, VERIFY, SAMPLE, SAMPLE_LOGITS)
"""Methods whose original is not called: they take further arguments at their defaults alone."""

TAIL = _read("""
GPU.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.propose(
    input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
    num_rejected, last_sampled, next_prefill_tokens, temperature, seeds)
GPU.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.capture()
GPU.async_utils:AsyncOutput.get_output()
""")
"""Methods that are wrapped for a tail of copied text alone."""
_TAIL_NAMES = _read("""
GPU.async_utils:AsyncOutput(sampler_output)
GPU.buffer_utils:StagedWriteTensor(gpu)
GPU.input_batch:InputBatch(num_draft_tokens_per_req)
GPU.states:RequestState(all_token_ids, total_len)
""")
_DRAFT_LEN = _read("""
vllm.config.vllm:VllmConfig.__post_init__()
vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule(scheduler_output)
GPU.cudagraph_utils:CudaGraphManager._init_candidates()
GPU.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager.capture(forward_fn)
""")
_DRAFT_LEN_NAMES = _read("""
vllm.config.speculative:SpeculativeConfig(num_speculative_tokens_per_batch_size)
vllm.v1.core.sched.output:SchedulerOutput(
    num_invalid_spec_tokens, num_spec_tokens_to_schedule, scheduled_spec_decode_tokens)
GPU.cudagraph_utils:BatchExecutionDescriptor(
    cg_mode, num_active_loras, num_reqs, num_tokens, uniform_token_count)
GPU.cudagraph_utils:CudaGraphManager(_candidates, _capture_descs, graphs)
GPU.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator(
    prefill_cudagraph_manager, temperature, seeds)
""")
_NEW_WEIGHTS = _read("""
GPU.model_runner:GPUModelRunner.reload_weights(weights_iterator, weights_path)
vllm.v1.worker.gpu_worker:Worker.update_weights()
vllm.v1.worker.gpu_worker:Worker.finish_weight_update()
vllm.v1.worker.gpu_worker:Worker.wake_up(tags)
""")
_DSPARK = {SAMPLE_LOGITS: ("logits", "idx_map", "sample_pos", "step")}
_DSPARK_NAMES = _read("""
GPU.spec_decode.dspark.speculator:DSparkSpeculator(_step_cols, model, model_state, vocab_size)
""")
_METRICS = _read("vllm.v1.metrics.loggers:PrometheusStatLogger.__init__(vllm_config)")
PARTS: Mapping[str, tuple[Signatures, Names]] = {
    "tail": (TAIL, _TAIL_NAMES),
    "draft_len": (_DRAFT_LEN, _DRAFT_LEN_NAMES),
    "new weights": (_NEW_WEIGHTS, {}),
    "dspark": (_DSPARK, _DSPARK_NAMES),
    "metrics": (_METRICS, {}),
}
"""What an engine can do without -> the methods that are wrapped for it, and attributes."""

NAMES: Names = _read("""
GPU.sample.states(NO_LOGPROBS)
GPU.sample.states:SamplingStates(seeds)
GPU.states:RequestState(prefill_len, prompt_len, req_id_to_index)
GPU.model_runner:GPUModelRunner(is_last_pp_rank, model_state, sampler)
GPU.spec_decode.rejection_sampler:RejectionSampler(sampler)
GPU.spec_decode.speculator:DraftModelSpeculator(model, model_state, vllm_config)
GPU.sample.sampler:Sampler(
    compute_nans, logprobs_mode, req_states, sampling_states, logits_processors,
    needs_logits_processing, thinking_budget_state)
GPU.input_batch:InputBatch(
    cu_num_logits, expanded_idx_mapping, expanded_local_pos, idx_mapping, idx_mapping_np, input_ids,
    logits_indices, num_reqs, positions, seq_lens, cu_num_logits_np, seq_lens_cpu_upper_bound)
""")


def release() -> tuple[int, int]:
    """Return major and minor version of the installed vLLM."""
    import vllm

    numbers = re.match(r"(\d+)\.(\d+)", str(vllm.__version__))
    if numbers is None:
        raise HostError(f"vLLM: expected a version such as 0.32.0, got {vllm.__version__!r}")
    return int(numbers[1]), int(numbers[2])


def where_tested() -> str | None:
    """Return where the installed vLLM was tested; None: nowhere."""
    return TESTED.get("{}.{}".format(*release()))


def untested(version: str) -> str:
    """Return the warning for a version that fits, but was not tested."""
    return f"vLLM {version} was not tested (tested: {versions_tested()}), but its signatures fit"


def versions_tested() -> str:
    """Return the tested versions by where they were tested."""
    places = dict.fromkeys(TESTED.values())
    tested = {place: [name for name in TESTED if TESTED[name] == place] for place in places}
    return "; ".join(f"{', '.join(names)} on {place}" for place, names in tested.items())


def differences(reader: Reader = INSTALLED) -> list[str]:
    """Return one line for everything that an engine needs and that is missing or differs."""
    return signatures.differences(SIGNATURES, NAMES, WRAPPED, reader)


def mismatch(target: str, names: tuple[str, ...], reader: Reader = INSTALLED) -> str | None:
    """Return how a method differs from its recorded parameters; None if it fits."""
    return signatures.mismatch(target, names, WRAPPED, reader)


def part_problems(part: str, reader: Reader = INSTALLED) -> list[str]:
    """Return one line for everything that one of `PARTS` needs and that differs."""
    wrapped, names = PARTS[part]
    return signatures.differences(wrapped, names, wrapped.keys() - set(REPLACED), reader)


def refusal(problems: list[str]) -> str:
    """Return the message for an installed version that does not fit."""
    version, instead = "{}.{}".format(*release()), "leave out additional_config.mtp_plugin"
    if release() < OLDEST:
        oldest = "{}.{}".format(*OLDEST)
        return (
            f"mtp_plugin does not fit vLLM {version}: it needs vLLM {oldest} or newer; type pip "
            f'install "vllm>={oldest}", or {instead}'
        )
    return (
        f"mtp_plugin does not fit vLLM {version}: {'; '.join(problems)}. Install vLLM "
        f"{list(TESTED)[-1]}, or {instead}"
    )


def expect_fitting(drafter: str = "") -> None:
    """Raise `HostError` if the installed vLLM does not fit a drafter; names what differs."""
    problems = differences() + (part_problems(drafter) if drafter in PARTS else [])
    if problems:
        raise HostError(refusal(problems))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def replaces(target: str, *, unused: tuple[str, ...] = ()) -> Callable[[_Method], _Method]:
    """Decorate what takes the place of a method of vLLM, with the recorded parameters.

    Further arguments are left out at their defaults, and those of ``unused`` at any value.

    Raises:
        HostError: when called with another value; names the argument.
    """
    names = {**SIGNATURES, **_DSPARK}[target]
    known = frozenset(names)

    def decorate(function: _Method) -> _Method:
        @functools.wraps(function)
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names) or not kwargs.keys() <= known:
                _check_further(target, names, args, kwargs, unused)
                args = args[: len(names)]
                kwargs = {name: value for name, value in kwargs.items() if name in known}
            return function(owner, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _check_further(
    target: str,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unused: tuple[str, ...],
) -> None:
    changed = signatures.changed_arguments(
        signatures.find(target), ("self", *names), (None, *args), kwargs
    )
    for name, (default, value) in changed.items():
        if name not in unused:
            raise HostError(
                f"{target.replace(':', '.')}: mtp_plugin knows {name}={default!r} alone, got "
                f"{value!r}; install vLLM {list(TESTED)[-1]}, or leave out "
                "additional_config.mtp_plugin"
            )

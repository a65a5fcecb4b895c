"""Requests of a front end that does not check our options, as vLLM's Rust front end; and what a
front end gets to know about a request's drafts."""

from __future__ import annotations

import pytest

from integration.vllm.engine_process import EngineProcess, engine_settings, prepare
from integration.vllm.load import run_batch
from integration.vllm.requests import prompt_of, sampling_params

pytest.importorskip("vllm")

from mtp_plugin.hosts.vllm.versions import release

PROMPT = [5, 300, 7, 80, 41]
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
NUM_DRAFTS = 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    prepare(folder, on_gpu=False)
    more = {"max_num_seqs": 4, "block_size": 32}
    if release() >= (0, 32):
        more["per_request_spec_decode_metrics"] = "detailed"
    made = EngineProcess("drafting", engine_settings(NUM_DRAFTS, False, {}, **more), folder)
    made.wait_until_ready()
    yield made
    made.close()


def run_unchecked(llm, *, requests):
    """Run requests whose options the front end passes on as they are."""
    llm.llm_engine.input_processor._mtp_plugin_admission = None
    return run_batch(llm, requests=requests)["tokens"]


def drafted_per_step(llm, *, requests):
    """Return the number of drafts in each step of each request, as vLLM counts them."""
    params = [sampling_params(request["params"]) for request in requests]
    outputs = llm.generate([prompt_of(each) for each in requests], params, use_tqdm=False)
    return [output.outputs[0].spec_decode_metrics.per_step_drafted for output in outputs]


def test_a_wrong_option_ends_its_request_and_not_the_engine(engine):
    wrong = {**GREEDY, "extra_args": {"mtp_max_draft_len": 9}}
    requests = [{"prompt": PROMPT, "params": params} for params in (GREEDY, wrong, GREEDY)]
    first = engine.call(run_unchecked, 200, requests=requests)
    again = engine.call(run_unchecked, 200, requests=requests[:1])
    assert [len(tokens) for tokens in first] == [4, 0, 4]
    assert first[0] == first[2] == again[0]
    log = engine.log.read_text()
    assert "extra_args: mtp_max_draft_len: expected at most" in log
    assert "Traceback" not in log


@pytest.mark.skipif(release() < (0, 32), reason="older versions have no metrics of a request")
def test_metrics_of_a_request_leave_out_withheld_drafts(engine):
    limits = ({}, {"mtp_max_draft_len": 1}, {"mtp_speculate": False})
    requests = [{"prompt": PROMPT, "params": {**GREEDY, "extra_args": extra}} for extra in limits]
    for most, drafted in zip(
        (2, 1, 0), engine.call(drafted_per_step, 200, requests=requests), strict=True
    ):
        assert max(drafted) == most

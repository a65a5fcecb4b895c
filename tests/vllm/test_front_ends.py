"""Requests of a front end that does not check our options, as vLLM's Rust front end."""

from __future__ import annotations

import pytest

from integration.vllm.engine_process import EngineProcess, engine_settings, prepare
from integration.vllm.load import run_batch

pytest.importorskip("vllm")

PROMPT = [5, 300, 7, 80, 41]
GREEDY = {"temperature": 0.0, "max_tokens": 4}


def run_unchecked(llm, *, requests):
    """Run requests whose options the front end passes on as they are."""
    llm.llm_engine.input_processor._mtp_plugin_admission = None
    return run_batch(llm, requests=requests)["tokens"]


def test_a_wrong_option_ends_its_request_and_not_the_engine(tmp_path):
    prepare(tmp_path, on_gpu=False)
    engine = EngineProcess(
        "drafting", engine_settings(2, False, {}, max_num_seqs=4, block_size=32), tmp_path
    )
    try:
        engine.wait_until_ready()
        wrong = {**GREEDY, "extra_args": {"mtp_max_draft_len": 9}}
        requests = [{"prompt": PROMPT, "params": params} for params in (GREEDY, wrong, GREEDY)]
        first = engine.call(run_unchecked, 200, requests=requests)
        again = engine.call(run_unchecked, 200, requests=requests[:1])
    finally:
        engine.close()
    assert [len(tokens) for tokens in first] == [4, 0, 4]
    assert first[0] == first[2] == again[0]
    log = engine.log.read_text()
    assert "is refused: extra_args: mtp_max_draft_len: expected at most" in log
    assert "Traceback" not in log

"""Prompt lookup accepts drafts where a text repeats, and changes no output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.examples.lookup import LookupDrafter, main
from mtp_plugin import LLM, SamplingParams, register_drafter
from mtp_plugin.plugin import unregister_drafter

TINY_MODEL = Path(__file__).parent.parent / "tiny_model"
CHECKPOINT = str(TINY_MODEL / "checkpoint")
PROMPTS = [each["prompt"] for each in json.loads((TINY_MODEL / "prompts.json").read_text())[:6]]
REPEATING = "x = 1\ny = 2\n" * 8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lookup_is_lossless_and_accepted_where_text_repeats(temperature: float) -> None:
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=3)
    prompts = [*PROMPTS, REPEATING]
    with LLM(CHECKPOINT) as llm:
        expected = llm.generate(prompts, params)
    register_drafter("lookup", LookupDrafter())
    try:
        with LLM(CHECKPOINT, speculative_config={"decoding_type": "lookup"}) as llm:
            outputs = llm.generate(prompts, params)
    finally:
        unregister_drafter("lookup")
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert outputs[-1].acceptance.acceptance_length > 2.0 - temperature / 2


def test_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        main(CHECKPOINT)
    finally:
        unregister_drafter("lookup")
    assert "HTTP server class" in capsys.readouterr().out

"""The example accepts more drafts than ``coupled``, whose output in the same batch is unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.examples.top2 import Top2Verification, main
from mtp_plugin import LLM, SamplingParams, register_verification
from mtp_plugin.plugin import unregister_verification

TINY_MODEL = Path(__file__).parent.parent / "tiny_model"
CHECKPOINT = str(TINY_MODEL / "checkpoint")
PROMPTS = [each["prompt"] for each in json.loads((TINY_MODEL / "prompts.json").read_text())[:6]]


@pytest.fixture
def _registered() -> Iterator[None]:
    register_verification("top2", Top2Verification())
    yield
    unregister_verification("top2")


def run(verification: Any, method: str | list[str], temperature: float) -> list[Any]:
    """Outputs of all prompts; ``method``: of each request, or of all."""
    methods = [method] * len(PROMPTS) if isinstance(method, str) else method
    params = [
        SamplingParams(max_tokens=48, temperature=temperature, seed=3, verification=name)
        for name in methods
    ]
    speculative = {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "mtp": {"verification": verification},
    }
    with LLM(CHECKPOINT, speculative_config=speculative) as llm:
        return llm.generate(PROMPTS, params)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.usefixtures("_registered")
def test_top2_accepts_more_and_leaves_coupled_requests_alone(temperature: float) -> None:
    coupled = run("coupled", "coupled", temperature)
    top2 = run("top2", "top2", temperature)

    def rate(outputs: list[Any]) -> float:
        stats = outputs[0].acceptance
        for output in outputs[1:]:
            stats.merge(output.acceptance)
        return float(stats.acceptance_length)

    mixed = run(["coupled", "top2"], ["coupled", "top2"] * 3, temperature)
    assert [o.token_ids for o in mixed[::2]] == [o.token_ids for o in coupled[::2]]
    assert all(output.label is None for output in mixed[::2])
    assert all("top2" in str(output.label) for output in mixed[1::2])
    assert [o.token_ids for o in mixed[1::2]] != [o.token_ids for o in coupled[1::2]]
    assert rate(top2) > rate(coupled) + 0.2


def test_program_compares_both_methods(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        main(CHECKPOINT)
    finally:
        unregister_verification("top2")
    assert "settings='top2'" in capsys.readouterr().out

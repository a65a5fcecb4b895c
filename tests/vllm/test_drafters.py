"""A seed gives the same output whatever drafts: each drafter next to an engine without drafts."""

from __future__ import annotations

import pytest

from tests.vllm.engines import HEADS, MIXED_HEADS, MIXED_METHODS, OF_HEADS, OF_NGRAM
from tests.vllm.test_losslessness import acceptance_length, tokens

pytest.importorskip("vllm")

LEAST = {"draft_model": 1.9, "ngram": 1.1, "dflash2": 0.9} | dict.fromkeys(
    ("eagle", "eagle3", "dflash", "dspark"), 1.3
)
"""Acceptance length of sampled requests. The weights of `HEADS` are random: the noise of another
position or seed gives less than 1.1. A third of their requests has a bias, which drafts do not
see. Drafts of DFlash2 are greedy: none of a random head is accepted."""


def param(name: str, without: str) -> object:
    return pytest.param(name, without, marks=pytest.mark.engines(name, without), id=name)


@pytest.mark.parametrize(
    ("name", "without"),
    [param("ngram", "k0"), *(param(name, "llama_k0") for name in HEADS)],
)
def test_the_output_depends_on_no_drafter(results, report, name, without):
    got, expected = results(name), results(without)
    drafter = name.removesuffix("2")
    assert f"3 drafts per step, torch kernels, drafter {drafter}, draft_len" in got["log"]
    phases = OF_HEADS if name in HEADS else OF_NGRAM
    for phase in phases:
        assert tokens(got, phase) == tokens(expected, phase)
    lengths = {phase: round(acceptance_length(got, phase), 2) for phase in phases}
    report(f"{name}: acceptance length {lengths}")
    assert lengths["sampled" if name in HEADS else "plain"] > LEAST[name]


@pytest.mark.engines("llama_k0", *MIXED_HEADS)
@pytest.mark.parametrize("name", MIXED_HEADS)
def test_coupled_requests_next_to_rejection_and_block(results, report, name):
    mixed, expected = tokens(results(name), "mixed"), tokens(results("llama_k0"), "sampled")
    coupled = [n for n in range(len(mixed)) if not MIXED_METHODS[n % len(MIXED_METHODS)]]
    assert [mixed[n] for n in coupled] == [expected[n] for n in coupled]
    assert mixed != expected
    length = acceptance_length(results(name), "mixed")
    report(f"{name}: acceptance length with rejection and block {length:.2f}")

"""Which modes a config enables, and what they say of themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.verification import (
    BUILT,
    MODES,
    changes_text,
    check_modes,
    label_of,
    make_modes,
)

RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 4,
    "relaxed_delta": 0.5,
    "begin_thinking_phase_token": 3,
    "end_thinking_phase_token": 4,
}
SYNTHETIC = {"mtp": {"verification": "synthetic", "synthetic_acceptance": [0.5, 0.25]}}


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "names", "label"),
    [
        pytest.param(MTPDecodingConfig(max_draft_len=2), ["strict"], None, id="strict"),
        pytest.param(
            MTPDecodingConfig(max_draft_len=2, **RELAXED),
            ["strict", "relaxed"],
            "relaxed acceptance (top 4, delta 0.5): drafts close to the argmax are accepted while "
            "a request thinks; not lossless",
            id="relaxed",
        ),
        pytest.param(
            MTPDecodingConfig(max_draft_len=2, **SYNTHETIC),
            ["synthetic"],
            "synthetic acceptance (50% / 25%): for benchmarks: drafts are accepted at random, "
            "the output is not the model's",
            id="synthetic",
        ),
        pytest.param(
            MTPDecodingConfig(max_draft_len=2, mtp={"verification": "rejection"}),
            ["strict", "rejection"],
            None,
            id="rejection",
        ),
        pytest.param(
            MTPDecodingConfig(max_draft_len=2, mtp={"verification": ["coupled", "block"]}),
            ["strict", "rejection"],
            None,
            id="block-too",
        ),
        pytest.param(SimpleNamespace(max_draft_len=2), ["strict"], None, id="a-host's"),
        pytest.param(
            SimpleNamespace(max_draft_len=2, mtp=SimpleNamespace()),
            ["strict"],
            None,
            id="few-options",
        ),
    ],
)
def test_enabled_modes(config: Any, names: list[str], label: str | None) -> None:
    options = DecodingOptions.read(config)
    check_modes(options)
    assert [mode.name for mode in make_modes(options, CPU)] == names
    reported = label_of(options)
    assert (None if reported is None else str(reported)) == label


def test_names_of_modes_are_unique() -> None:
    assert len({mode.name for mode in MODES}) == len(MODES)
    assert len(set(BUILT)) == len(BUILT)


STRICT_REQUESTS = [
    {"speculate": False},
    {"max_draft_len": 0},
    {"relaxed_acceptance": False},
    {"relaxed_topk": 1},
    {"temperature": 0.7},
    {"ignore_eos": True, "min_tokens": 3},
]


@pytest.mark.parametrize("requested", [{}, {"max_draft_len": 1}, {"ignore_eos": True}], ids=str)
def test_output_that_drafts_may_change(requested: dict[str, Any]) -> None:
    for more in (RELAXED, SYNTHETIC):
        options = DecodingOptions.read(MTPDecodingConfig(max_draft_len=2, **more))
        assert label_of(options, requested) == label_of(options)
        assert changes_text(make_modes(options, CPU), options, requested)
    assert not changes_text(make_modes(DecodingOptions(2), CPU), DecodingOptions(2), requested)


@pytest.mark.parametrize("requested", STRICT_REQUESTS, ids=str)
def test_output_that_drafts_cannot_change_in_relaxed_mode(requested: dict[str, Any]) -> None:
    options = DecodingOptions.read(MTPDecodingConfig(max_draft_len=2, **RELAXED))
    assert label_of(options, requested) is None
    assert not changes_text(make_modes(options, CPU), options, requested)

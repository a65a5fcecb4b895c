"""Verification method and kind of drafts of a request, and its slot columns."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import DraftedBy, RejectionResult, VerifiedBy
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from mtp_plugin.speculative.verification import (
    RejectionVerification,
    StrictVerification,
    make_modes,
    refusals,
    rejection,
)

CPU = torch.device("cpu")


def modes_of(**mtp: Any) -> tuple[Any, ...]:
    return make_modes(DecodingOptions.read(MTPDecodingConfig(max_draft_len=3, mtp=mtp)), CPU)


def facts(prompt_len: int = 4, **options: Any) -> RequestFacts:
    stop = StopRule(max_length=100, prompt_len=prompt_len, end_ids=(), words=())
    return RequestFacts(1, stop, options=options)


@pytest.mark.parametrize(
    ("mtp", "requested", "verified_by", "drafted_by"),
    [
        ({}, {}, VerifiedBy.COUPLED, DraftedBy.COUPLED),
        ({}, {"draft_sampling": "greedy"}, VerifiedBy.COUPLED, DraftedBy.GREEDY),
        ({"verification": "block"}, {}, VerifiedBy.BLOCK, DraftedBy.PLAIN),
        (
            {"verification": ["rejection", "coupled"]},
            {"verification": "coupled"},
            VerifiedBy.COUPLED,
            DraftedBy.COUPLED,
        ),
        (
            {"verification": ["coupled", "rejection"], "draft_sampling": "greedy"},
            {"verification": "rejection"},
            VerifiedBy.REJECTION,
            DraftedBy.GREEDY,
        ),
        (
            {"verification": ["coupled", "block"]},
            {"verification": "block"},
            VerifiedBy.BLOCK,
            DraftedBy.PLAIN,
        ),
        (
            {"verification": ["coupled", "block"], "draft_sampling": "coupled"},
            {"verification": "block"},
            VerifiedBy.BLOCK,
            DraftedBy.PLAIN,
        ),
        (
            {"verification": ["coupled", "rejection"], "draft_sampling": "plain"},
            {},
            VerifiedBy.COUPLED,
            DraftedBy.COUPLED,
        ),
    ],
)
def test_slot_columns(
    mtp: dict[str, Any], requested: dict[str, Any], verified_by: VerifiedBy, drafted_by: DraftedBy
) -> None:
    modes = modes_of(**mtp)
    assert list(refusals(modes, requested)) == []
    assert type(modes[0]) is StrictVerification
    values = modes[0].slot_values(facts(**requested), ())
    assert values == {"verification": verified_by, "draft_sampling": drafted_by}


@pytest.mark.parametrize(
    ("listed", "by_block"),
    [("rejection", False), (["coupled", "rejection"], False), (["rejection", "block"], True)],
)
def test_block_verification_is_computed_only_if_enabled(
    listed: str | list[str], by_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def rejection_sample(*_: Any, by_block: bool, **__: Any) -> RejectionResult:
        calls.append(by_block)
        return RejectionResult(torch.zeros(1), torch.zeros(1))

    monkeypatch.setattr(rejection, "rejection_sample", rejection_sample)
    mode = next(one for one in modes_of(verification=listed) if type(one) is RejectionVerification)
    rules = AcceptanceRules(choices=torch.zeros(1))
    mode.verify(MagicMock(), rules, backend=Backend.TORCH)
    assert calls == [by_block]


def test_steps_of_a_preempted_request_are_not_counted_again() -> None:
    """It took one per token at most, so noise of its block verification is never met twice."""
    _, mode = modes_of(verification="block")
    assert type(mode) is RejectionVerification
    assert mode.slot_values(facts(4), [1, 2, 3, 4]) == {"draft_step": 0}
    assert mode.slot_values(facts(4), [1, 2, 3, 4, 5, 6]) == {"draft_step": 2}


@pytest.mark.parametrize(
    ("mtp", "shape"),
    [
        ({}, None),
        ({"verification": "block", "draft_sampling": "greedy"}, None),
        ({"verification": ["coupled", "block"]}, (3, 50)),
    ],
)
def test_manager_keeps_draft_probs_of_plain_drafts(
    mtp: dict[str, Any], shape: tuple[int, int] | None
) -> None:
    config = MTPDecodingConfig(max_draft_len=3, mtp=mtp)
    manager = MTPHiddenStatesManager(config, torch.float32, 4, 2, device="cpu", vocab_size=50)
    if shape is None:
        assert manager.draft_probs is None
        assert "draft probabilities" not in manager.memory_report()
        return
    assert manager.draft_probs.shape == (manager.num_rows, *shape)
    assert not manager.draft_probs.any()
    line = f"draft probabilities {manager.draft_probs.nbytes / 2**20:.1f} MiB"
    assert line in manager.memory_report()

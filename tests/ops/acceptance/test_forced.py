"""Acceptance with a forced number of matches; scenario R45."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_plugin.ops.acceptance import STRICT, AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT
from tests.ops.acceptance.cases import Case, layout_of
from tests.ops.acceptance.random_cases import make_case
from tests.ops.on_device import DEVICE, vector
from tests.ops.top_k.rows import DTYPES


def forced(counts: list[int]) -> AcceptanceRules:
    return AcceptanceRules(forced_matches=vector(counts, torch.int32))


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("vocab", [127, 1025])
def test_r45_forced_matches_beyond_what_was_accepted_emit_tokens(
    vocab: int, backend: Backend
) -> None:
    """R45: K = 3, every match forced over drafts that are wrong, absent or no tokens at all."""
    k, seen = 3, 0
    for seed in range(4):
        case = make_case(seed, num_generations=5, k=k, vocab=vocab, dtype=DTYPES[seed % 3])
        case.drafts[::2, 1] = (-1, vocab, vocab + 7, 2**31 - 1)[seed % 4]
        lens = torch.tensor([3, 2, 1, 0, 3], dtype=torch.int32, device=DEVICE)
        case.options["draft_lens"] = lens
        outcome = case.accept(forced([k] * 5), backend)
        accepted, following = outcome.accepted, outcome.following
        honest = case.accept(STRICT, backend).accepted
        num, tokens = accepted.num_accepted, accepted.tokens
        emitted = torch.arange(k + 1, device=DEVICE) < num.unsqueeze(1)
        assert ((tokens >= 0) & (tokens < vocab))[emitted].all()
        assert (tokens[~emitted] == PAD_TOKEN).all()
        assert ((following[:, 0] >= 0) & (following[:, 0] < vocab)).all()
        assert (num <= lens + 1).all()
        assert (num[::2] <= 2).all()  # no run reaches past the draft that is no token
        seen += int((num > honest.num_accepted).sum())
    assert seen > 3


@pytest.mark.parametrize("backend", Backend)
def test_a_run_ends_before_a_row_without_values(backend: Backend) -> None:
    dead, row = [-math.inf] * 4, [0.0, 1.0, math.nan, -math.inf]
    logits = [row, dead, row, row, row, dead, row, row, row]
    rule = make_case(0, num_generations=3, k=2, vocab=4).relaxed
    case = Case(
        layout_of(0, 3, 2),
        torch.tensor(logits, device=DEVICE),
        vector([[0, 0], [0, 0], [2, 3]], torch.int32),
        rule,
        vector([2, 2, 2], torch.int32),
    )
    accepted = case.accept("forced", backend).accepted
    # the masked draft of the last request and the one whose logit is NaN are rejected
    assert accepted.tokens.tolist() == [[0, -1, -1], [0, 0, -1], [1, -1, -1]]
    assert accepted.num_accepted.tolist() == [1, 2, 1]
    assert accepted.status.tolist() == [STATUS_NO_FINITE_LOGIT, STATUS_NO_FINITE_LOGIT, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize("backend", Backend)
def test_a_negative_number_leaves_it_to_the_target(backend: Backend, dtype: torch.dtype) -> None:
    """Whatever its size; its neighbours stay forced."""
    case = make_case(3, num_contexts=1, num_generations=4, k=3, vocab=127)
    lowest = torch.iinfo(dtype).min
    rules = AcceptanceRules(forced_matches=vector([lowest, 0, -1, 3], dtype))
    mixed, strict = case.accept(rules, backend), case.accept(STRICT, backend)
    for name in ("tokens", "num_accepted", "status"):
        mine, target = (getattr(outcome.accepted, name) for outcome in (mixed, strict))
        assert torch.equal(mine[[0, 1, 3]], target[[0, 1, 3]])
    assert (mixed.accepted.num_accepted[2] <= 1).all()


@pytest.mark.parametrize("backend", Backend)
def test_forced_ids_are_the_only_accepted_drafts_in_every_rule(backend: Backend) -> None:
    """A forced draft is accepted where its row masks it, and no other is."""
    layout = layout_of(0, 3, 1)
    only = vector([4, -1] * 3, torch.int32)
    rules = AcceptanceRules(
        choices=only.clamp_min(0), forced_ids=only, forced_matches=vector([1, 1, -1], torch.int32)
    )
    logits = torch.zeros(6, 7, device=DEVICE)
    logits[::2, 4] = -torch.inf
    drafts = vector([4, 0, 4], torch.int32)
    accepted = accept(layout, logits, drafts, rules, backend=backend)
    assert accepted.tokens.tolist() == [[4, 0], [4, -1], [4, 0]]

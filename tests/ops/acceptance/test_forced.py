"""Acceptance with a forced number of matches; scenario R45."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.ops.acceptance import STRICT, AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import PAD_TOKEN
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

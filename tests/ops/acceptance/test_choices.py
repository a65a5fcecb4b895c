"""Acceptance with target tokens that were sampled before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from tests.ops.acceptance.cases import layout_of
from tests.ops.on_device import DEVICE, vector

VOCAB = 7
both = pytest.mark.parametrize("backend", Backend)


@settings(max_examples=12)
@given(
    contexts=st.integers(0, 3),
    generations=st.integers(0, 4),
    k=st.integers(0, 5),
    forces=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_target_tokens_act_as_rows_with_one_value(
    contexts: int, generations: int, k: int, forces: bool, seed: int
) -> None:
    """A row of one value has that as its argmax; a row without any has no output."""
    layout, rng = layout_of(contexts, generations, k), torch.Generator().manual_seed(seed)
    rows = layout.num_logit_rows
    choices = torch.randint(-1, VOCAB, (rows,), generator=rng, dtype=torch.int32)
    alone = torch.full((rows, VOCAB), -torch.inf)
    for row, choice in enumerate(choices.tolist()):
        if choice >= 0:
            alone[row, choice] = 1.0
    guess = choices[contexts:].view(generations, k + 1)[:, :k]
    wild = torch.randint(-1, VOCAB + 2, guess.shape, generator=rng, dtype=torch.int32)
    right = torch.rand(guess.shape, generator=rng) < 0.7
    drafts = torch.where(right, guess, wild).to(DEVICE)
    lens = torch.randint(0, k + 1, (generations,), generator=rng, dtype=torch.int32).to(DEVICE)
    other = torch.randn(rows, VOCAB, generator=rng).to(DEVICE)
    rules = AcceptanceRules(choices=choices.to(DEVICE))
    options = {"draft_lens": lens}
    expected = accept(layout, alone.to(DEVICE), drafts, backend=Backend.TORCH, **options)
    for backend in Backend:
        mine = accept(layout, other, drafts, rules, backend=backend, **options)
        assert torch.equal(mine.tokens, expected.tokens)
        assert torch.equal(mine.num_accepted, expected.num_accepted)
        assert torch.equal(mine.status, expected.status)
    if forces and generations:
        forced = torch.randint(-1, k + 1, (generations,), generator=rng, dtype=torch.int32)
        rules = AcceptanceRules(choices=choices.to(DEVICE), forced_matches=forced.to(DEVICE))
        first, second = (
            accept(layout, other, drafts, rules, backend=backend, **options) for backend in Backend
        )
        assert torch.equal(first.tokens, second.tokens)


@both
def test_forced_ids_are_the_only_accepted_drafts_in_every_rule(backend: Backend) -> None:
    """A forced draft is accepted where its row masks it, and no other is."""
    layout = layout_of(0, 3, 1)
    only = vector([4, -1] * 3, torch.int32)
    rules = AcceptanceRules(
        choices=only.clamp_min(0), forced_ids=only, forced_matches=vector([1, 1, -1], torch.int32)
    )
    logits = torch.zeros(6, VOCAB, device=DEVICE)
    logits[::2, 4] = -torch.inf
    drafts = vector([4, 0, 4], torch.int32)
    accepted = accept(layout, logits, drafts, rules, backend=backend)
    assert accepted.tokens.tolist() == [[4, 0], [4, -1], [4, 0]]

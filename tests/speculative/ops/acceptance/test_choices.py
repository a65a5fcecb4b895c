"""Where the target's tokens were chosen already, they stand for the argmax of every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.speculative.step import StepLayout
from tests.doors import check_strided_arguments
from tests.speculative.ops.on_device import DEVICE, vector

VOCAB = 7
both = pytest.mark.parametrize("backend", Backend)


def layout_of(contexts: int, generations: int, k: int) -> StepLayout:
    lens = torch.ones(contexts, dtype=torch.int32, device=DEVICE)
    return StepLayout((1,) * contexts, generations, k, lens)


@settings(max_examples=60)
@given(
    contexts=st.integers(0, 3),
    generations=st.integers(0, 4),
    k=st.integers(0, 5),
    forces=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_choices_are_as_good_as_rows_that_hold_nothing_else(
    contexts: int, generations: int, k: int, forces: bool, seed: int
) -> None:
    """A row that holds one value has that as its argmax; one without any emits nothing."""
    layout, dice = layout_of(contexts, generations, k), torch.Generator().manual_seed(seed)
    rows = layout.num_logit_rows
    choices = torch.randint(-1, VOCAB, (rows,), generator=dice, dtype=torch.int32)
    alone = torch.full((rows, VOCAB), -torch.inf)
    for row, choice in enumerate(choices.tolist()):
        if choice >= 0:
            alone[row, choice] = 1.0
    guess = choices[contexts:].view(generations, k + 1)[:, :k]
    wild = torch.randint(-1, VOCAB + 2, guess.shape, generator=dice, dtype=torch.int32)
    right = torch.rand(guess.shape, generator=dice) < 0.7
    drafts = torch.where(right, guess, wild).to(DEVICE)
    lens = torch.randint(0, k + 1, (generations,), generator=dice, dtype=torch.int32).to(DEVICE)
    other = torch.randn(rows, VOCAB, generator=dice).to(DEVICE)
    rules = AcceptanceRules(choices=choices.to(DEVICE))
    options = {"draft_lens": lens}
    told = accept(layout, alone.to(DEVICE), drafts, backend=Backend.TORCH, **options)
    for backend in Backend:
        mine = accept(layout, other, drafts, rules, backend=backend, **options)
        assert torch.equal(mine.tokens, told.tokens)
        assert torch.equal(mine.num_accepted, told.num_accepted)
        assert torch.equal(mine.status, told.status)
    if forces and generations:
        forced = torch.randint(-1, k + 1, (generations,), generator=dice, dtype=torch.int32)
        rules = AcceptanceRules(choices=choices.to(DEVICE), forced_matches=forced.to(DEVICE))
        first, second = (
            accept(layout, other, drafts, rules, backend=backend, **options) for backend in Backend
        )
        assert torch.equal(first.tokens, second.tokens)


@both
def test_strided_choices(backend: Backend) -> None:
    layout = layout_of(1, 2, 2)

    def emitted(choices: torch.Tensor, forced_ids: torch.Tensor) -> list[torch.Tensor]:
        matches = vector([2, -1], torch.int32)  # one generation needs what is forced, one does not
        rules = AcceptanceRules(choices=choices, forced_ids=forced_ids, forced_matches=matches)
        drafts = vector([1, 2, 3, 4], torch.int32)
        logits = torch.zeros(7, VOCAB, device=DEVICE)
        accepted = accept(layout, logits, drafts, rules, backend=backend)
        return [accepted.tokens, accepted.num_accepted]

    given = {
        "choices": vector([5, 1, 6, 6, 3, 4, -1], torch.int32),
        "forced_ids": vector([-1, 1, 6, -1, -1, 4, -1], torch.int32),
    }
    check_strided_arguments(emitted, given)
    assert [each.tolist() for each in emitted(**given)] == [
        [[5, -1, -1], [1, 6, -1], [3, 4, -1]],
        [1, 2, 2],
    ]


@both
def test_forced_ids_stand_alone_whatever_rule_judges(backend: Backend) -> None:
    """A draft that is forced stands where its row rules it out, any other does not stand."""
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


@both
def test_forced_ids_without_choices(backend: Backend) -> None:
    rules = AcceptanceRules(forced_ids=vector([1], torch.int32))
    with pytest.raises(TensorContractError, match="forced_ids: expected choices beside it"):
        accept(
            layout_of(1, 0, 1),
            torch.zeros(1, VOCAB, device=DEVICE),
            vector([], torch.int32),
            rules,
            backend=backend,
        )


@both
def test_choices_of_other_rows_or_types(backend: Backend) -> None:
    layout, logits = layout_of(0, 1, 1), torch.zeros(2, VOCAB, device=DEVICE)
    for choices in (vector([1], torch.int32), vector([1, 2], torch.int64)):
        with pytest.raises(TensorContractError, match="choices: expected"):
            accept(
                layout,
                logits,
                vector([1], torch.int32),
                AcceptanceRules(choices=choices),
                backend=backend,
            )

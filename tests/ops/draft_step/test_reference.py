"""The reference against the story."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.batch import DraftColumn
from mtp_plugin.ops.draft_step import draft_argmax, propose, shift_ids, shift_states
from tests.ops.bits import same_bits
from tests.ops.draft_step import story
from tests.ops.letters import ids

VALUES = [-math.inf, math.nan, math.inf, -1.0, 0.0, 0.0, 1.0, 1.0, 2.0]


def flat(sequences: list[list[Any]]) -> list[Any]:
    return [item for items in sequences for item in items]


@given(vocab=st.integers(1, 9), rows=st.integers(0, 6), seed=st.integers(0, 2**32))
def test_proposals(vocab: int, rows: int, seed: int) -> None:
    dice = random.Random(seed)
    table = [[dice.choice(VALUES) for _ in range(vocab)] for _ in range(rows)]
    logits = torch.tensor(table).reshape(rows, vocab)
    before = logits.clone()
    drafts = draft_argmax(logits)
    assert drafts.dtype == torch.int32
    assert drafts.tolist() == [story.proposal(row) for row in table]
    assert same_bits(logits, before)


@pytest.mark.parametrize(
    ("row", "draft"),
    [([1.0, 3.0, 3.0], 1), ([math.nan, -math.inf, -1.0], 2), ([math.nan, math.nan], 0)],
    ids=["tie", "nan", "nothing"],
)
def test_odd_rows(row: list[float], draft: int) -> None:
    assert story.proposal(row) == draft
    assert draft_argmax(torch.tensor([row])).tolist() == [draft]


POISON = -777


@given(
    k=st.integers(1, 5),
    lens=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_proposals_go_to_every_reader(k: int, lens: list[int], seed: int) -> None:
    """The result, the next inputs, and the tokens that the next depth reads one place on."""
    dice = random.Random(seed)
    vocab, count = 9, len(lens)
    sequences = [[dice.randrange(vocab) for _ in range(n)] for n in lens]
    # behind the rows there is room for one token per further depth
    ids_read = torch.tensor(flat(sequences) + [POISON] * (k - 1), dtype=torch.int32)
    num_rows = sum(lens)
    last_rows = torch.tensor(lens).cumsum(0) - 1
    drafts = torch.full((count, k), POISON, dtype=torch.int32)
    following = torch.full((count, k + 1), POISON, dtype=torch.int32)
    told: list[list[int]] = []
    for column in range(k):
        read = ids_read[column : column + num_rows].tolist()
        assert read == flat(sequences)
        table = [[dice.choice(VALUES) for _ in range(vocab)] for _ in lens]
        told.append([story.proposal(row) for row in table])
        goes_on = column + 1 < k
        propose(
            torch.tensor(table),
            DraftColumn(
                drafts,
                following,
                column,
                ids_read if goes_on else None,
                last_rows if goes_on else None,
            ),
        )
        sequences = story.move_on(sequences, told[-1])
        written = [list(row) for row in zip(*told, strict=True)]
        unwritten = [POISON] * (k - 1 - column)
        assert drafts.tolist() == [row + unwritten for row in written]
        assert following.tolist() == [[POISON, *row, *unwritten] for row in written]


def test_letters() -> None:
    """`q r s t` with draft `u`, beside `k` with draft `l`."""
    flat = torch.tensor(ids("qrst" + "k"), dtype=torch.int32)
    moved = shift_ids(flat, torch.tensor([3, 4]), torch.tensor(ids("ul"), dtype=torch.int32))
    assert moved.tolist() == ids("rstu" + "l")
    assert flat.tolist() == ids("qrst" + "k")


@given(lens=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_shifts(lens: list[int], seed: int) -> None:
    """Sequences of any length; a layer that returns its input gives the same as one that copies."""
    dice = random.Random(seed)
    tokens = [[dice.randrange(99) for _ in range(n)] for n in lens]
    names = [[float(dice.randrange(256)) for _ in range(n)] for n in lens]
    outputs = [[float(dice.randrange(256)) for _ in range(n)] for n in lens]
    drafts = [dice.randrange(99) for _ in lens]
    last_rows = torch.tensor(lens).cumsum(0) - 1

    moved = shift_ids(
        torch.tensor(flat(tokens), dtype=torch.int32),
        last_rows,
        torch.tensor(drafts, dtype=torch.int32),
    )
    assert moved.tolist() == flat(story.move_on(tokens, drafts))

    states = torch.tensor(flat(names)).unsqueeze(1).expand(-1, 3).contiguous()
    returned = torch.tensor(flat(outputs)).unsqueeze(1).expand(-1, 3).to(torch.bfloat16)
    for given_back, last in (
        (returned, [o[-1] for o in outputs]),
        (states, [n[-1] for n in names]),
    ):
        before = states.clone()
        shifted = shift_states(states, given_back, last_rows)
        assert shifted.dtype == states.dtype
        assert shifted[:, 2].tolist() == flat(story.move_on(names, last))
        assert same_bits(states, before)

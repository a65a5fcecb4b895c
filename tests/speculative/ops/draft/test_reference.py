"""The reference against the story."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.speculative.ops.backend import REFERENCE_OPS, triton_ops
from mtp_plugin.speculative.ops.draft import draft_argmax, place_last_states, propose
from mtp_plugin.speculative.step import DraftColumn
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft import story

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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@given(lens=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("returns_input", [False, True])
def test_states_move_by_an_offset(returns_input: bool, lens: list[int], seed: int) -> None:
    """Every depth reads one row on; a layer may return the very rows that it read."""
    dice = random.Random(seed)
    depths, num_rows = 4, sum(lens)
    sequences = [[float(dice.randrange(256)) for _ in range(n)] for n in lens]
    last_rows = torch.tensor(lens).cumsum(0) - 1
    buffer = torch.full((num_rows + depths - 1, 3), math.nan)
    buffer[:num_rows] = torch.tensor(flat(sequences)).unsqueeze(1)
    for depth in range(depths - 1):
        read = buffer[depth : depth + num_rows]
        given_back = [[float(dice.randrange(256)) for _ in range(n)] for n in lens]
        if returns_input:
            outputs, given_back = read, sequences
        else:
            outputs = torch.tensor(flat(given_back)).unsqueeze(1).expand(-1, 3).to(torch.bfloat16)
        place_last_states(buffer, outputs, last_rows, depth + 1)
        sequences = story.move_on(sequences, [items[-1] for items in given_back])
        told = torch.tensor(flat(sequences)).unsqueeze(1).expand(-1, 3)
        assert torch.equal(buffer[depth + 1 : depth + 1 + num_rows], told)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(vocab=st.integers(1, 12), rows=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_r37_a_split_vocabulary_drafts_as_a_whole_one(
    ranks: int, vocab: int, rows: int, seed: int
) -> None:
    """R37: equal maxima on two ranks go to the lowest global id, padding columns to nobody."""
    dice = random.Random(seed)
    table = [[dice.choice(VALUES) for _ in range(vocab)] for _ in range(rows)]
    share = -(-vocab // ranks)
    whole = torch.tensor(table)
    for ops in (REFERENCE_OPS, triton_ops()):
        pairs = []
        for rank in range(ranks):
            first = min(rank * share, vocab)
            real = min(share, vocab - first)
            columns = torch.full((rows, share), 1e9)  # padding that would win if it counted
            columns[:, :real] = whole[:, first : first + real]
            pairs.append(ops.local_top1(columns.to(DEVICE), first, real))
        values = torch.stack([value for value, _ in pairs])
        ids = torch.stack([token for _, token in pairs])
        drafts = ops.merge_top1(values, ids)
        assert drafts.dtype == torch.int32
        assert drafts.tolist() == [story.proposal(row) for row in table]

"""Greedy drafts of edited logits: the story equals torch equals Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.draft import propose, propose_edited
from mtp_plugin.speculative.step import DraftOutput
from tests.doors import check_strided_arguments
from tests.speculative.ops.on_device import DEVICE
from tests.speculative.ops.sampling.edited import EditedBatch


def place_of(case: EditedBatch) -> DraftOutput:
    """Where the drafts of a batch go, those in front of them its own."""
    rows = case.batch.rows
    width = rows.column + 2
    drafts = torch.full((rows.num_requests, width), -7, dtype=torch.int32, device=DEVICE)
    following = torch.full((rows.num_requests, width + 1), -7, dtype=torch.int32, device=DEVICE)
    return DraftOutput(drafts, following, rows.column, vocab_ids=case.batch.vocab_ids)


def proposed(case: EditedBatch, backend: Backend) -> list[int]:
    place = place_of(case)
    propose_edited(case.logits, place, case.batch.rows, case.batch.slots, backend=backend)
    column = place.column
    assert (place.drafts[:, column + 1 :] == -7).all()
    assert place.next_tokens[:, column + 1].tolist() == place.drafts[:, column].tolist()
    return place.drafts[:, column].tolist()


def test_story_torch_and_triton_agree() -> None:
    changed = 0

    @settings(max_examples=80)
    @given(
        seed=st.integers(0, 2**31),
        vocab=st.sampled_from((1, 7, 33, 100)),
        generations=st.integers(1, 4),
        cut=st.booleans(),
        drafts=st.booleans(),
        pools=st.booleans(),
    )
    def agree(seed: int, vocab: int, **shape: object) -> None:
        nonlocal changed
        case = EditedBatch.of(seed, vocab, greedy=True, contexts=0, width=1, **shape)
        ids = case.batch.vocab_ids
        first = 0 if ids is None else int(ids[0])
        told = [first if token < 0 else token for token in case.story()]
        for backend in Backend:
            assert proposed(case, backend) == told
        plain = place_of(case)
        propose(case.logits, plain, backend=Backend.TORCH)
        changed += plain.drafts[:, plain.column].tolist() != told

    agree()
    assert changed > 10


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_another_column_are_refused(backend: Backend) -> None:
    case = EditedBatch.of(1, 7, greedy=True, contexts=0, width=1, generations=3)
    column = case.batch.rows.column
    rows = replace(case.batch.rows, column=column + 1, drafts=None)
    message = f"rows: expected 3 of width 1 and column {column}, got 3 of width 1 and column"
    with pytest.raises(TensorContractError, match=message):
        propose_edited(case.logits, place_of(case), rows, case.batch.slots, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    case = EditedBatch.of(5, 33, greedy=True, contexts=0, width=1, generations=4)
    slots, place = case.batch.slots, place_of(case)

    def placed(
        logits: torch.Tensor, rows: DrawnRows, table: torch.Tensor, slot_ids: torch.Tensor
    ) -> torch.Tensor:
        own = replace(place, drafts=place.drafts.clone(), next_tokens=place.next_tokens.clone())
        mine = replace(slots, table=table, slot_ids=slot_ids)
        propose_edited(logits, own, rows, mine, backend=backend)
        return own.drafts

    arguments = {
        "logits": case.logits,
        "rows": case.batch.rows,
        "table": slots.table,
        "slot_ids": slots.slot_ids,
    }
    refused = {
        "logits": "row-contiguous",
        "rows.drafts": "row-contiguous",
        "table": "rows without gaps",
    }
    check_strided_arguments(placed, arguments, refused=refused)

"""Greedy drafts after logits processing: example, torch reference and Triton agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose, propose_processed
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.step import DraftOutput
from tests.op_arguments import check_arguments
from tests.ops.on_device import DEVICE
from tests.ops.sampling.processed_rows import EditedBatch


def output_of(case: EditedBatch) -> DraftOutput:
    """The output of a batch's drafts."""
    rows = case.batch.rows
    width = rows.column + 2
    drafts = torch.full((rows.num_requests, width), -7, dtype=torch.int32, device=DEVICE)
    following = torch.full((rows.num_requests, width + 1), -7, dtype=torch.int32, device=DEVICE)
    return DraftOutput(drafts, following, rows.column, vocab_ids=case.batch.vocab_ids)


def proposed(case: EditedBatch, backend: Backend) -> list[int]:
    output = output_of(case)
    propose_processed(case.logits, output, case.batch.rows, case.batch.slots, backend=backend)
    column = output.column
    assert (output.drafts[:, column + 1 :] == -7).all()
    assert output.next_tokens[:, column + 1].tolist() == output.drafts[:, column].tolist()
    return output.drafts[:, column].tolist()


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
        expected = [first if token < 0 else token for token in case.example()]
        for backend in Backend:
            assert proposed(case, backend) == expected
        plain = output_of(case)
        propose(case.logits, plain, backend=Backend.TORCH)
        changed += plain.drafts[:, plain.column].tolist() != expected

    agree()
    assert changed > 10


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_another_column_are_refused(backend: Backend) -> None:
    case = EditedBatch.of(1, 7, greedy=True, contexts=0, width=1, generations=3)
    column = case.batch.rows.column
    rows = replace(case.batch.rows, column=column + 1, drafts=None)
    message = f"rows: expected 3 of width 1 and column {column}, got 3 of width 1 and column"
    with pytest.raises(TensorContractError, match=message):
        propose_processed(case.logits, output_of(case), rows, case.batch.slots, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    case = EditedBatch.of(15, 33, greedy=True, contexts=0, width=1, generations=4)
    slots, output = case.batch.slots, output_of(case)

    def placed(
        logits: torch.Tensor, rows: LogitRows, table: torch.Tensor, slot_ids: torch.Tensor
    ) -> torch.Tensor:
        own = replace(output, drafts=output.drafts.clone(), next_tokens=output.next_tokens.clone())
        mine = replace(slots, table=table, slot_ids=slot_ids)
        propose_processed(logits, own, rows, mine, backend=backend)
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
        "table": "row-contiguous",
    }
    free = {"table: shorter", "slot_ids: shorter", "rows.drafts: list"}
    check_arguments(placed, arguments, refused=refused, free=free)

"""Arguments of `sample_tokens`: checks, strides, and what a row depends on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling import Role, sample_tokens
from mtp_plugin.ops.sampling import sample_triton as launch
from mtp_plugin.ops.step import SlotRows, StepLayout
from tests.op_arguments import check_arguments, poisoned_memory
from tests.ops.logits_processing.example import LogitsOptions
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE, forbid_launches, vector
from tests.ops.sampling.cases import COLUMNS, Batch, slots_of
from tests.ops.sampling.example import Options
from tests.ops.slots import column
from tests.ops.top_k.launches import captured

OPTIONS = [
    Options(0.0),
    Options(1.0, seed=5),
    Options(0.8, top_k=3, top_p=0.9, seed=6),
    Options(1.2, top_p=0.7, seed=7),
    Options(2.0, min_p=0.2, seed=2**63 + 8),
]


def arguments() -> dict[str, Any]:
    """One context and four generations of two rows; every argument changes some token."""
    rng = torch.Generator().manual_seed(3)
    return {
        "logits": (torch.randn(9, 70, generator=rng) * 2).to(DEVICE),
        "rows": LogitRows(1, 2, vector([4, 9, 0, 77, 2**31 - 9]), vector([0, 1, 2, 1, 3]), 1),
        "slots": slots_of(OPTIONS, random.Random(4)),
        "vocab_ids": vector(range(5, 75), torch.int32),
    }


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("with_sums", [False, True])
def test_arguments(with_sums: bool, backend: Backend) -> None:
    def sample(table: torch.Tensor, slot_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return sample_tokens(slots=SlotRows(table, slot_ids, COLUMNS), **others)

    given = arguments()
    slots = given.pop("slots")
    refused = {"logits": "row-contiguous", "table": "row-contiguous"}
    if with_sums:
        del given["vocab_ids"]
        column(slots, "logprobs")[:] = 0
        given["sums"] = RowSums.unwritten(given["logits"])
        refused |= {"sums.tops": "expected contiguous", "sums.masses": "expected contiguous"}
    else:
        refused["vocab_ids"] = "contiguous torch.int32"
    given |= {"table": slots.table, "slot_ids": slots.slot_ids}
    free = {"table: shorter", "slot_ids: shorter"}
    check_arguments(sample, given, refused=refused, free=free, backend=backend)


SLOTS = arguments()["slots"]
SUMS = RowSums.unwritten(arguments()["logits"])
RAW = {"vocab_ids": None, "sums": SUMS}
EDITED = replace(SLOTS, pools=pools_of([LogitsOptions()], 70, random.Random(1))[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sums": SUMS}, "sums: expected rows of the target, got role TARGET.* some vocab_ids"),
        ({**RAW, "role": Role.RECOVERED}, "sums: .* got role RECOVERED, as_drafts False and no"),
        ({**RAW, "slots": EDITED}, "sums: expected slots without pools"),
        (
            {**RAW, "sums": RowSums.unwritten(arguments()["logits"].half())},
            "sums: expected chunks as .*each=4.* got .*each=8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_sums_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        sample_tokens(**(arguments() | change), backend=Backend.TORCH)


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
    slots = SlotRows(SLOTS.table, SLOTS.slot_ids[:0], COLUMNS)
    rows = LogitRows(0, 3, vector([]))
    tokens = sample_tokens(torch.zeros(0, 70, device=DEVICE), rows, slots, backend=backend)
    assert tokens.shape == (0,)
    assert tokens.dtype == torch.int32


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_without_a_finite_value_are_filled(backend: Backend, dtype: torch.dtype) -> None:
    batch = Batch.of(3, 300, contexts=1, generations=4, width=3)
    batch.logits[::4] = float("nan")
    tokens = batch.tokens(backend)
    assert -1 in tokens.tolist()
    filled = batch.tokens(backend, fills=dtype)
    assert filled.dtype == dtype
    assert filled.tolist() == tokens.clamp_min(0).tolist()


def test_rows_of_a_step_have_the_next_token_index() -> None:
    """Chunks of 3 and 1 tokens, two generations of K + 1 = 3 rows: the token index of each row."""
    positions = vector([5, 6, 7, 0, 20, 21, 22, 9, 9, 9])
    layout = StepLayout((3, 1), 2, 2, vector([3, 1], torch.int32), positions)
    rows = LogitRows.of_target(layout)
    assert (rows.num_contexts, rows.width, rows.num_rows) == (2, 3, 8)
    assert rows.positions.tolist() == [7, 0, 20, 9]
    drafts = LogitRows.of_drafts(layout, vector([1, 1, 2, 3]), 1)
    assert (drafts.num_contexts, drafts.width, drafts.num_rows, drafts.column) == (0, 1, 4, 1)
    assert drafts.ahead is not None
    assert (drafts.positions + drafts.ahead).tolist() == [8, 1, 22, 12]


@pytest.mark.gpu
def test_captured_graph_follows_its_inputs() -> None:
    batch = Batch.of(8, 129280, contexts=0, generations=8, width=4)

    def step() -> torch.Tensor:
        return sample_tokens(batch.logits, batch.rows, batch.slots, backend=Backend.TRITON)

    graph, tokens = captured(step)
    for seed in range(3):
        other = Batch.of(seed, 129280, contexts=0, generations=8, width=4)
        batch.logits.copy_(other.logits)
        batch.slots.table.copy_(other.slots.table)
        batch.slots.slot_ids.copy_(other.slots.slot_ids)
        batch.rows.positions.copy_(other.rows.positions)
        rows = replace(batch.rows, column=batch.rows.column)
        graph.replay()
        with poisoned_memory():
            expected = sample_tokens(batch.logits, rows, batch.slots, backend=Backend.TORCH)
        hangs = replace(other, rows=rows).undecided()
        assert bool(((tokens == expected) | hangs).all())

"""Arguments that `logprobs` refuses, strided arguments, and no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_plugin.ops import logprobs_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logprobs import compute_logprobs
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.step import SlotRows
from tests.op_arguments import check_arguments
from tests.ops.chunks import reference_sums
from tests.ops.logprobs.cases import Case, layout_of
from tests.ops.on_device import DEVICE, forbid_launches, vector
from tests.ops.slots import slot_rows


def arguments() -> dict[str, Any]:
    """One context request and two generation requests of three rows, all with entries."""
    rng = torch.Generator().manual_seed(3)
    return {
        "layout": layout_of(1, 2, 2),
        "logits": (torch.randn(7, 70, generator=rng) * 2).to(DEVICE),
        "tokens": torch.tensor([[4, 0, 0], [9, 11, 60], [7, 7, 7]], device=DEVICE),
        "counts": vector([1, 3, 2]),
        "requested": slot_rows([{"logprobs": 2}, {"logprobs": 0}, {"logprobs": 20}]),
    }


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("with_sums", [False, True])
def test_arguments(with_sums: bool, backend: Backend) -> None:
    given = arguments()
    refused = {"logits": "row-contiguous", "table": "row-contiguous"}
    if with_sums:
        given["sums"] = reference_sums(given["logits"])
        refused |= {"sums.tops": "expected contiguous", "sums.masses": "expected contiguous"}
    layout, slots = given.pop("layout"), given.pop("requested")

    def entries(table: torch.Tensor, slot_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        requested = SlotRows(table, slot_ids, slots.columns)
        return compute_logprobs(layout, requested=requested, **others).entries

    given |= {"table": slots.table, "slot_ids": slots.slot_ids}
    free = {"table: shorter", "slot_ids: shorter"}
    check_arguments(entries, given, refused=refused, free=free, backend=backend)


SUMS = RowSums.unwritten(arguments()["logits"])


@pytest.mark.parametrize("backend", Backend)
def test_no_requests(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, logprobs_triton)
    case = Case.of(0, 70, contexts=0, generations=0, k=3)
    got = case.run(backend)
    assert got.values.shape == (0, 4)
    assert got.top_ids.shape == (0, 4, 20)

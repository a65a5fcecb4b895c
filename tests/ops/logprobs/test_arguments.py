"""Arguments that `logprobs` refuses, strided arguments, and no rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import logprobs_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logprobs import compute_logprobs
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.step import SlotRows
from tests.op_arguments import check_strided_arguments
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
def test_strided_arguments(with_sums: bool, backend: Backend) -> None:
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
    check_strided_arguments(entries, given, refused=refused, backend=backend)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("left_out", ["logits", "tokens", "counts", "requested"])
def test_the_strided_calls_use_every_argument(backend: Backend, left_out: str) -> None:
    """Otherwise a wrong stride would not be noticed."""
    given = arguments()
    before = compute_logprobs(**given, backend=backend).entries
    slots = given["requested"]
    change: dict[str, Any] = {
        "logits": {"logits": given["logits"].flip(0)},
        "tokens": {"tokens": given["tokens"].flip(0)},
        "counts": {"counts": given["counts"].flip(0)},
        "requested": {"requested": replace(slots, slot_ids=slots.slot_ids[:3].flip(0))},
    }[left_out]
    assert not torch.equal(compute_logprobs(**(given | change), backend=backend).entries, before)


META = torch.zeros(3, dtype=torch.int32, device="meta")
SLOTS = arguments()["requested"]
SUMS = RowSums.unwritten(arguments()["logits"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(7)}, r"logits: expected .*floating-point tensor \[7, >= 1\]"),
        ({"logits": torch.zeros(7, 70).int()}, "logits: expected .*floating.*torch.int32"),
        ({"logits": torch.zeros(7, 0)}, r"logits: expected .* \[7, 0\]"),
        ({"logits": torch.zeros(6, 70)}, r"logits: expected .* \[6, 70\]"),
        ({"logits": torch.zeros(70, 7).t()}, "logits: expected row-contiguous"),
        ({"logits": "7 rows"}, "logits: .* got '7 rows'"),
        ({"tokens": torch.zeros(3, 2).int()}, r"tokens: expected integer tensor \[3, 3\]"),
        ({"tokens": torch.zeros(3, 3)}, "tokens: expected integer .* got torch.float32"),
        ({"counts": vector([1, 1])}, r"counts: expected integer tensor \[3\]"),
        ({"counts": META}, "counts: .* on meta"),
        (
            {"requested": replace(SLOTS, table=SLOTS.table.float())},
            "slot table: expected row-contiguous torch.int32",
        ),
        ({"requested": replace(SLOTS, slot_ids=vector([0, 1]))}, r"slot_ids: expected .*\[>= 3\]"),
        ({"requested": 21}, r"requested: expected an integer in -1\.\.20, got 21"),
        ({"requested": -2}, "requested: .* got -2"),
        ({"requested": None}, "requested: .* got None"),
        ({"requested": 3, "sums": SUMS}, "sums: expected the slots .* as requested, got 3"),
        ({"sums": replace(SUMS, tops=SUMS.tops[1:])}, r"sums, tops: expected .* \[7, 8\]"),
        ({"sums": replace(SUMS, masses=SUMS.masses.double())}, "sums, masses: .*torch.float64"),
        ({"sums": RowSums.unwritten(torch.zeros(7, 70).half())}, "sums: expected chunks as "),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("backend", Backend)
def test_wrong_arguments_are_refused(
    backend: Backend, change: dict[str, Any], message: str
) -> None:
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in change.items()
    }
    with pytest.raises(TensorContractError, match=message):
        compute_logprobs(**(arguments() | moved), backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_no_requests(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, logprobs_triton)
    case = Case.of(0, 70, contexts=0, generations=0, k=3)
    got = case.run(backend)
    assert got.values.shape == (0, 4)
    assert got.top_ids.shape == (0, 4, 20)

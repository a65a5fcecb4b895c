"""Arguments that `accept` refuses, and strided ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.columns import REQUEST_COLUMNS, TableColumns
from tests.op_arguments import check_strided_arguments
from tests.ops.acceptance.cases import Thinker, layout_of, relaxed_rule
from tests.ops.on_device import DEVICE, poisoned, vector


def arguments() -> dict[str, Any]:
    """Two prompts and six generations with K = 2, in which every number matters."""
    thinkers = [
        Thinker(True, 1, 0.1),
        Thinker(False, 2, 0.2, [0]),
        Thinker(False, 3, 0.9),
        Thinker(True, 2, 0.9),
        Thinker(True, 2, 0.9),
        Thinker(True, 3, 0.4, written=0.05),
        Thinker(True, 3, 0.4, [1]),
        Thinker(True, 3, 0.9, [6, 2]),
    ]
    rule = relaxed_rule(thinkers, 3, 4, pool="own")
    row = [0.0, -0.3, -0.5, -9.0, -9.0, -9.0, -9.0]
    return {
        "layout": layout_of(2, 6, 2),
        "logits": vector([row] * 20, torch.float32),
        "draft_tokens": vector([[0, 0], [2, 0], [2, 0], [1, 0], [1, 0], [1, 2]]),
        "rules": AcceptanceRules(
            relaxed=rule, forced_matches=vector([-1, -1, -1, -1, 2, -1], torch.int32)
        ),
        "draft_lens": vector([2, 2, 2, 2, 1, 2], torch.int32),
        "final_context": vector([True, False], torch.bool),
        "last_tokens": poisoned(8, dtype=torch.int32),
    }


REFUSED = {"logits": "row-contiguous", "rules.relaxed.slots.table": "row-contiguous"}


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    uniform = arguments()
    flat = {**uniform, "draft_tokens": uniform["draft_tokens"].reshape(-1)}
    ragged = {**uniform, "first_rows": vector([1, 0, 2, 5, 8, 11, 14, 17], torch.int32)}
    for given in (uniform, flat, ragged):
        check_strided_arguments(accept, given, refused=REFUSED, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments_use_every_rule(backend: Backend) -> None:
    """A wrong stride changes the output."""
    given = arguments()
    rules = given.pop("rules")
    accepted = accept(**given, rules=rules, backend=backend)
    # no prompt end; strict; beyond the top-k twice; too far; one draft absent; a stop id second
    assert accepted.num_accepted.tolist() == [1, 0, 3, 1, 1, 1, 2, 2]
    rules = arguments()["rules"]
    for less in (replace(rules, relaxed=None), replace(rules, forced_matches=None)):
        other = accept(**given, rules=less, backend=backend)
        assert not torch.equal(other.tokens, accepted.tokens)


META = torch.zeros(6, dtype=torch.int32, device="meta")
FIRST = torch.zeros(8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(8)}, r"logits: expected .*floating-point tensor \[rows, >= 1\]"),
        ({"logits": torch.zeros(20, 7, dtype=torch.int32)}, "logits: expected .*floating-point"),
        ({"logits": torch.zeros(20, 0)}, r"logits: expected .* \[20, 0\]"),
        ({"logits": torch.zeros(19, 7)}, r"2 context rows and K\+1 = 3 rows .* got 19 rows"),
        ({"logits": torch.zeros(7, 20).t()}, "logits: expected row-contiguous"),
        ({"logits": [[0.0] * 7] * 20}, r"logits: expected .*tensor .*got \["),
        ({"layout": layout_of(9, 1, 2)}, "logits: expected 9 context rows"),
        ({"layout": layout_of(1, 2, 2)}, "logits: expected 1 context rows .* of 2 generations"),
        ({"draft_tokens": vector([1] * 3)}, r"draft_tokens: expected G\*K = 12 .* got 3"),
        ({"draft_tokens": torch.zeros(6, 2)}, "draft_tokens: expected integer .*torch.float32"),
        ({"draft_tokens": torch.zeros(6, 2).bool()}, "draft_tokens: .*torch.bool"),
        ({"draft_tokens": META.expand(2, 6)}, "draft_tokens: .* on meta"),
        ({"draft_tokens": [[1, 2]] * 6}, r"draft_tokens: expected integer tensor .*got \["),
        ({"draft_lens": vector([1] * 2)}, r"draft_lens: expected integer tensor \[6\] .* \[2\]"),
        ({"draft_lens": torch.zeros(6)}, "draft_lens: expected integer"),
        ({"draft_lens": META}, "draft_lens: .* on meta"),
        ({"draft_lens": 2}, r"draft_lens: expected integer tensor \[6\] .*got 2"),
        ({"final_context": vector([1], torch.bool)}, r"final_context: .*torch.bool tensor \[2\]"),
        ({"final_context": vector([1, 1])}, "final_context: expected torch.bool"),
        ({"last_tokens": vector([1] * 3, torch.int32)}, r"last_tokens: .*torch.int32 tensor \[8\]"),
        ({"last_tokens": vector([1] * 8)}, "last_tokens: .*got torch.int64"),
        ({"first_rows": vector([1] * 7)}, r"first_rows: expected integer tensor \[8\] .*\[7\]"),
        ({"first_rows": torch.zeros(8).bool()}, "first_rows: .*got torch.bool"),
        ({"first_rows": META[:1].expand(8)}, "first_rows: .* on meta"),
        ({"first_rows": FIRST, "draft_lens": None}, "first_rows: expected draft_lens .*got None"),
        ({"first_rows": FIRST, "logits": torch.zeros(7, 7)}, "each of 8 requests, got 7 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("backend", Backend)
def test_tensors_of_another_shape_or_type_are_refused(
    backend: Backend, change: dict[str, Any], message: str
) -> None:
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in change.items()
    }
    for rules in (arguments()["rules"], AcceptanceRules()):
        with pytest.raises(TensorContractError, match=message):
            accept(**(arguments() | moved | {"rules": rules}), backend=backend)


def in_slots(change: Callable[[Any], dict[str, Any]]) -> Callable[[RelaxedRule], RelaxedRule]:
    return lambda rule: replace(rule, slots=replace(rule.slots, **change(rule.slots)))


def as_pool(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[RelaxedRule], RelaxedRule]:
    return lambda rule: replace(rule, delta_in_force=change(rule.delta_in_force))


def without(*names: str) -> Callable[[Any], dict[str, Any]]:
    def fewer(slots: Any) -> dict[str, Any]:
        columns = TableColumns([c for c in slots.columns.columns if c.name not in names])
        return {"columns": columns, "table": slots.table[:, : columns.width]}

    return fewer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            in_slots(lambda s: {"table": s.table.long()}),
            r"slot table: expected .*torch.int32 tensor \[S, \d+\] .*got torch.int64",
            id="table-of-int64",
        ),
        pytest.param(
            in_slots(lambda s: {"table": s.table[:, :-1]}),
            r"slot table: expected .*torch.int32 tensor \[S, \d+\] .*got torch.int32 \[11, \d+\]",
            id="table-too-narrow",
        ),
        pytest.param(
            in_slots(lambda s: {"table": s.table[0]}),
            r"slot table: .*got torch.int32 \[\d+\]",
            id="one-row",
        ),
        pytest.param(
            in_slots(lambda s: {"table": s.table.t().contiguous().t()}),
            r"slot table: .*row-contiguous .*strides \[1, 11\]",
            id="table-of-columns",
        ),
        pytest.param(
            in_slots(lambda s: {"table": s.table.to("meta")}),
            "slot table: .* on meta",
            id="table-elsewhere",
        ),
        pytest.param(
            in_slots(without("thinking", "relaxed_limit")),
            "slot table: expected columns thinking, relaxed_limit too, got number, .*stop_ids",
            id="columns-missing",
        ),
        pytest.param(
            in_slots(lambda s: {"slot_ids": s.slot_ids[:7]}),
            r"slot_ids: expected integer tensor \[>= 8\] .*\[7\]",
            id="slots-too-few",
        ),
        pytest.param(
            in_slots(lambda s: {"slot_ids": s.slot_ids.float()}),
            "slot_ids: expected integer tensor .*torch.float32",
            id="slots-as-floats",
        ),
        pytest.param(
            in_slots(lambda s: {"slot_ids": s.slot_ids.bool()}),
            "slot_ids: expected integer tensor .*torch.bool",
            id="slots-as-flags",
        ),
        pytest.param(
            in_slots(lambda s: {"slot_ids": s.slot_ids.unsqueeze(1)}),
            r"slot_ids: expected integer tensor \[>= 8\] .*\[10, 1\]",
            id="slots-as-a-matrix",
        ),
        pytest.param(
            in_slots(lambda s: {"slot_ids": s.slot_ids.to("meta")}),
            "slot_ids: .* on meta",
            id="slots-elsewhere",
        ),
        pytest.param(
            as_pool(lambda pool: pool.double()),
            r"delta_in_force: expected torch.float32 tensor \[S\] .*torch.float64",
            id="pool-of-doubles",
        ),
        pytest.param(
            as_pool(lambda pool: pool.unsqueeze(1)),
            r"delta_in_force: expected torch.float32 tensor \[S\] .*\[16, 1\]",
            id="pool-as-a-matrix",
        ),
        pytest.param(
            as_pool(lambda pool: pool.to("meta")), "delta_in_force: .* on meta", id="pool-elsewhere"
        ),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_slots_of_another_shape_or_type_are_refused(
    backend: Backend, change: Callable[[RelaxedRule], RelaxedRule], message: str
) -> None:
    given = arguments()
    rule = change(given["rules"].relaxed)
    with pytest.raises(TensorContractError, match=message):
        accept(**{**given, "rules": AcceptanceRules(relaxed=rule)}, backend=backend)


def test_relaxed_acceptance_needs_its_columns() -> None:
    given = arguments()
    columns, slots = TableColumns(REQUEST_COLUMNS), given["rules"].relaxed.slots
    bare = replace(slots, columns=columns, table=slots.table[:, : columns.width])
    rule = replace(given["rules"].relaxed, slots=bare)
    with pytest.raises(
        TensorContractError, match="expected columns thinking, relaxed_topk, relaxed_limit too"
    ):
        accept(**{**given, "rules": AcceptanceRules(relaxed=rule)}, backend=Backend.TORCH)


@pytest.mark.parametrize("counts", [[0, 0], [0.0] * 6])
@pytest.mark.parametrize("backend", Backend)
def test_forced_matches_are_an_integer_per_generation(
    backend: Backend, counts: list[float]
) -> None:
    rules = AcceptanceRules(forced_matches=torch.tensor(counts, device=DEVICE))
    with pytest.raises(TensorContractError, match=r"forced_matches: expected integer tensor \[6\]"):
        accept(**{**arguments(), "rules": rules}, backend=backend)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("name", ["forced_ids", "processed_slots"])
def test_forced_ids_and_processing_need_target_tokens(backend: Backend, name: str) -> None:
    given = arguments()
    parts = {
        "forced_ids": vector([1] * 20, torch.int32),
        "processed_slots": given["rules"].relaxed.slots,
    }
    rules = AcceptanceRules(**{name: parts[name]})
    with pytest.raises(TensorContractError, match=f"{name}: expected choices together with it"):
        accept(**{**given, "rules": rules}, backend=backend)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("name", ["choices", "forced_ids"])
def test_target_tokens_are_an_int32_per_row(backend: Backend, name: str) -> None:
    fine = vector([1] * 20, torch.int32)
    for ids in (fine[:19], fine.long(), [1] * 20):
        rules = AcceptanceRules(**{"choices": fine, name: ids})
        with pytest.raises(TensorContractError, match=rf"{name}: expected torch.int32 .*\[20\]"):
            accept(**{**arguments(), "rules": rules}, backend=backend)

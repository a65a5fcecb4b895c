"""Arguments that `accept` refuses, and strided ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.columns import REQUEST_COLUMNS, TableColumns
from tests.op_arguments import check_arguments
from tests.ops.acceptance.cases import Thinker, layout_of, relaxed_rule
from tests.ops.on_device import poisoned, vector


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
# any number of drafts in any shape; S slots in either pool, R of more slot ids
FREE = {
    "draft_tokens: dimensions",
    "layout.context_lens: elsewhere",
    "rules.relaxed.slots.table: shorter",
    "rules.relaxed.slots.slot_ids: shorter",
    "rules.relaxed.delta_in_force: shorter",
}


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    uniform = arguments()
    ragged = {
        **uniform,
        "draft_tokens": uniform["draft_tokens"].reshape(-1),
        "first_rows": vector([1, 0, 2, 5, 8, 11, 14, 17], torch.int32),
    }
    tokens = vector([5, 1, 6, 6, 3, 4, -1] * 3, torch.int32)[:20]
    rules = replace(uniform["rules"], choices=tokens, forced_ids=tokens.flip(0))
    for given in (uniform, {**ragged, "rules": rules}):
        # with `first_rows` there may be rows of no request
        free = FREE | ({"logits: shorter"} if "first_rows" in given else set())
        check_arguments(accept, given, refused=REFUSED, free=free, backend=backend)


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


def test_relaxed_acceptance_needs_its_columns() -> None:
    given = arguments()
    columns, slots = TableColumns(REQUEST_COLUMNS), given["rules"].relaxed.slots
    bare = replace(slots, columns=columns, table=slots.table[:, : columns.width])
    rule = replace(given["rules"].relaxed, slots=bare)
    with pytest.raises(
        TensorContractError, match="expected columns thinking, relaxed_topk, relaxed_limit too"
    ):
        accept(**{**given, "rules": AcceptanceRules(relaxed=rule)}, backend=Backend.TORCH)

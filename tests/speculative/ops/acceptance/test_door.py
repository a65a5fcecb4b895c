"""What the door of acceptance refuses, and tensors that lie apart in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from tests.doors import check_strided_arguments
from tests.speculative.ops.acceptance.cases import layout_of
from tests.speculative.ops.on_device import DEVICE, poisoned, vector


def arguments() -> dict[str, Any]:
    """Two prompts and six generations with K = 2, in which every number decides about something."""
    runs = [
        # thinking, topk, delta, stop ids
        (True, 1, 0.1, [-1, -1]),
        (False, 2, 0.2, [0, -1]),
        (False, 3, 0.9, [-1, -1]),
        (True, 2, 0.9, [-1, -1]),
        (True, 2, 0.9, [-1, -1]),
        (True, 3, 0.05, [-1, -1]),
        (True, 3, 0.4, [-1, 1]),
        (True, 3, 0.9, [6, 2]),
    ]
    rule = RelaxedRule(
        thinking=vector([run[0] for run in runs], torch.bool),
        topk=vector([run[1] for run in runs], torch.int32),
        delta=vector([run[2] for run in runs], torch.float32),
        stop_ids=vector([run[3] for run in runs], torch.int32),
        begin_token=3,
        end_token=4,
    )
    row = [0.0, -0.3, -0.5, -9.0, -9.0, -9.0, -9.0]
    return {
        "layout": layout_of(2, 6, 2),
        "logits": vector([row] * 20, torch.float32),
        "draft_tokens": vector([[0, 0], [2, 0], [2, 0], [1, 0], [1, 0], [1, 2]]),
        "rules": AcceptanceRules(rule, vector([-1, -1, -1, -1, 2, -1], torch.int32)),
        "draft_lens": vector([2, 2, 2, 2, 1, 2], torch.int32),
        "final_context": vector([True, False], torch.bool),
        "last_tokens": poisoned(8, dtype=torch.int32),
    }


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    told = arguments()
    with_rows = {**told, "draft_tokens": told["draft_tokens"].reshape(-1)}
    for given in (told, with_rows):
        refused = {"logits": "contiguous rows"}
        check_strided_arguments(accept, given, refused=refused, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_the_strided_step_uses_every_rule(backend: Backend) -> None:
    """Else a wrong stride would go unseen."""
    given = arguments()
    rules = given.pop("rules")
    verdict = accept(**given, rules=rules, backend=backend)
    # no prompt's end; strict; beyond the top-k twice; too far; one is absent; the second would stop
    assert verdict.accepted.num_accepted.tolist() == [1, 0, 3, 1, 1, 1, 2, 2]
    for less in (replace(rules, relaxed=None), replace(rules, forced_matches=None)):
        other = accept(**given, rules=less, backend=backend)
        assert not torch.equal(other.accepted.tokens, verdict.accepted.tokens)


META = torch.zeros(6, dtype=torch.int32, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(8)}, r"logits: expected a floating \[rows, V\] tensor"),
        ({"logits": torch.zeros(20, 7, dtype=torch.int32)}, "logits: expected a floating"),
        ({"logits": torch.zeros(20, 0)}, r"logits: expected a floating .* \[20, 0\]"),
        ({"logits": torch.zeros(19, 7)}, r"2 context rows and K\+1 = 3 rows .* got 19 rows"),
        ({"logits": torch.zeros(7, 20).t()}, "logits: expected contiguous rows"),
        ({"layout": layout_of(9, 1, 2)}, "logits: expected 9 context rows"),
        ({"layout": layout_of(1, 2, 2)}, "logits: expected 1 context rows .* of 2 generations"),
        ({"draft_tokens": vector([1] * 3)}, r"draft_tokens: expected G\*K = 12 .* got 3"),
        ({"draft_tokens": torch.zeros(6, 2)}, "draft_tokens: .*integer ids .*torch.float32"),
        ({"draft_tokens": torch.zeros(6, 2).bool()}, "draft_tokens: .*torch.bool"),
        ({"draft_tokens": META.expand(2, 6)}, "draft_tokens: .* on meta"),
        ({"draft_lens": vector([1] * 2)}, r"draft_lens: expected integers \[6\] .* \[2\]"),
        ({"draft_lens": torch.zeros(6)}, "draft_lens: expected integers"),
        ({"draft_lens": META}, "draft_lens: .* on meta"),
        ({"final_context": vector([1], torch.bool)}, r"final_context: expected torch.bool \[2"),
        ({"final_context": vector([1, 1])}, "final_context: expected torch.bool"),
        ({"last_tokens": vector([1] * 3, torch.int32)}, r"last_tokens: expected torch.int32 \[8\]"),
        ({"last_tokens": vector([1] * 8)}, "last_tokens: .*got torch.int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("backend", Backend)
def test_tensors_that_do_not_fit(backend: Backend, change: dict[str, Any], message: str) -> None:
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in change.items()
    }
    for rules in (arguments()["rules"], AcceptanceRules()):
        with pytest.raises(TensorContractError, match=message):
            accept(**(arguments() | moved | {"rules": rules}), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thinking": torch.zeros(8).int()}, r"thinking: expected torch.bool \[8\]"),
        ({"thinking": torch.zeros(3).bool()}, r"thinking: .*got torch.bool \[3\]"),
        ({"topk": torch.zeros(8)}, r"topk: expected integers \[8\]"),
        ({"delta": torch.zeros(8).double()}, r"delta: expected torch.float32 \[8\]"),
        ({"delta": torch.zeros(5)}, r"delta: .*\[5\]"),
        ({"stop_ids": torch.zeros(8).int()}, r"stop_ids: expected integers \[>= 8, P\]"),
        ({"stop_ids": torch.zeros(3, 2).int()}, r"stop_ids: .*\[3, 2\]"),
        ({"stop_ids": torch.zeros(8, 2)}, "stop_ids: .*torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("backend", Backend)
def test_relaxed_rules_that_do_not_fit(
    backend: Backend, change: dict[str, torch.Tensor], message: str
) -> None:
    given = arguments()
    rule = replace(given["rules"].relaxed, **{n: t.to(DEVICE) for n, t in change.items()})
    with pytest.raises(TensorContractError, match=message):
        accept(**{**given, "rules": AcceptanceRules(relaxed=rule)}, backend=backend)


@pytest.mark.parametrize("counts", [[0, 0], [0.0] * 6])
@pytest.mark.parametrize("backend", Backend)
def test_a_whole_number_per_generation(backend: Backend, counts: list[float]) -> None:
    rules = AcceptanceRules(forced_matches=torch.tensor(counts, device=DEVICE))
    with pytest.raises(TensorContractError, match=r"forced_matches: expected integers \[6\]"):
        accept(**{**arguments(), "rules": rules}, backend=backend)

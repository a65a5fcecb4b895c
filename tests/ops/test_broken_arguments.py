"""Arguments that public operations refuse, and ids outside their range, by operation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin import ops
from mtp_plugin.errors import TensorContractError
from tests.op_arguments import changed_arguments, run_op, tensor_names
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE

Arguments = dict[str, Any]
S, K, V, H = 3, 1, 8, 4
NO_CONTEXTS = torch.empty(0, dtype=torch.int64)
REQUEST = {
    "temperature": 1.0,
    "seed": 5,
    "logprobs": 2,
    "stop_ids": [6],
    "min_tokens": 9,
    "thinking_token_budget": 2,
    "num_thinking": 1,
    "thinking": 1,
    "relaxed_topk": 2,
    "relaxed_limit": 0.5,
    "verification": ops.VerifiedBy.REJECTION,
    "draft_sampling": ops.DraftedBy.PLAIN,
    "presence_penalty": 0.5,
}


def operations() -> dict[str, Arguments]:
    """Arguments of every operation: two generations in slots 0 and 2 of three, one draft each."""
    generator = torch.Generator().manual_seed(2)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    pools = ops.LogitsProcessorState.empty(2, V, DEVICE)
    requests = [REQUEST | {"count_row": row, "seed": row} for row in (0, -1, 1)]
    slots = ops.build_slot_rows(requests, pools=pools, device=DEVICE)
    slots = replace(slots, slot_ids=ints(0, 2))
    plain = replace(slots, pools=None)
    layout = ops.StepLayout((), 2, K, NO_CONTEXTS.to(DEVICE), positions=ints(4, 5, 7, 8))
    rows = ops.LogitRows.of_target(layout, ints([1], [2]))
    first = ops.LogitRows.flat(ints(4, 7))
    accepted = ops.Accepted(ints([1, 2], [3, -1]), ints(2, 1), ints(0, 0))
    thinking = ops.ThinkingRule.of(ops.ThinkingEnd(begin=1, end=(2, 3)), DEVICE)
    truncation = ints(0, 0, 0, 0).float().repeat(4, 1) + ints(9, 9, 7, 20).float()
    relaxed = ops.RelaxedRule(slots, floats(S).abs(), begin_token=0, end_token=3)
    history = ops.History(ints([1], [2], [3]), floats(S, K, H), ints(0, 2))
    target_rows = ops.TargetRows(ints(1, 2, 3, 4), floats(4, H))
    drafts = ints([1], [2])
    return {
        "accept": {
            "layout": layout,
            "logits": floats(4, V),
            "draft_tokens": drafts,
            "rules": ops.AcceptanceRules(relaxed=relaxed),
        },
        "advance_and_build_inputs": {
            "layout": layout,
            "history": history,
            "rows": target_rows,
            "num_accepted": ints(2, 1),
            "last_tokens": ints(5, 6),
            "windows": ops.DraftWindows(window=2, history_lens=()),
        },
        "build_reused_inputs": {
            "layout": layout,
            "rows": target_rows,
            "accepted_tokens": accepted.tokens,
            "num_accepted": accepted.num_accepted,
            "max_position": None,
        },
        "compute_logprobs": {
            "layout": layout,
            "logits": floats(4, V),
            "tokens": ints([1, 2], [3, 0]),
            "counts": ints(2, 1),
            "requested": plain,
        },
        "force_thinking_end": {
            "layout": layout,
            "draft_tokens": drafts,
            "slots": plain,
            "rule": thinking,
            "target_tokens": ints(4, 5, 6, 7),
        },
        "keep_draft_probs": {
            "logits": floats(2, V),
            "rows": first,
            "slots": slots,
            "truncation": truncation[:2],
            "draft_probs": floats(S, K, V),
        },
        "mamba_state_selective_copy": {
            "intermediate_states": floats(1, S, K + 1, H),
            "current_states": floats(1, S, H),
            "prefill_status": ints(0, 0),
            "state_idx": ints(0, 2),
            "accepted_counts": ints(1, 0),
            "num_layers": 1,
        },
        "mask_disallowed_tokens": {"logits": floats(4, V), "rows": rows, "slots": slots},
        "processed_scores": {
            "logits": floats(4, V),
            "rows": rows,
            "slots": slots,
            "truncation": truncation,
        },
        "rejection_sample": {
            "logits": floats(4, V),
            "rows": rows,
            "slots": slots,
            "drafts": ops.ProposedDrafts(drafts, floats(S, K, V).abs()),
            "target": ops.TargetSamples(ints(4, 5, 6, 7), truncation),
        },
        "sample_tokens": {"logits": floats(4, V), "rows": rows, "slots": slots},
        "update_thinking_state": {"accepted": accepted, "slots": plain, "rule": thinking},
        "update_token_history": {"accepted": accepted, "slots": slots, "positions": ints(4, 7)},
    }


NAMES = sorted(operations())
both = pytest.mark.parametrize("backend", ops.Backend)


def test_every_public_operation_is_here() -> None:
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert {*NAMES} == functions - {"build_slot_rows"}


def empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0]


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.uint8)


def none(_: torch.Tensor) -> None:
    return None


DELTA = "delta_in_force: expected torch.float32 tensor [>= 3]"
PROBS = "draft_probs: expected contiguous torch.float32 tensor [>= 3, >= 1, 8]"
TABLE = "slot table: expected row-contiguous torch.int32 tensor [>= 1, "
POOLS = "pools.bias: expected contiguous torch.float32 tensor [>= 1, >= 1]"
POSITIONS = "logit rows, positions: expected integer tensor [R]"
BROKEN: list[tuple[str, str, Callable[[torch.Tensor], Any], str]] = [
    ("accept", "rules.relaxed.delta_in_force", empty, DELTA),
    ("accept", "rules.relaxed.delta_in_force", lambda t: t[:2], DELTA),
    ("accept", "rules.relaxed.slots.table", empty, TABLE),
    ("accept", "draft_tokens", unsigned, "draft_tokens: expected signed integer tensor"),
    ("advance_and_build_inputs", "history.tokens", empty, "history.tokens: expected"),
    ("advance_and_build_inputs", "history.states", empty, "history.states: expected"),
    ("advance_and_build_inputs", "layout.positions", none, "needs the step's positions, got None"),
    ("build_reused_inputs", "layout.positions", none, "needs the step's positions, got None"),
    ("build_reused_inputs", "accepted_tokens", unsigned, "expected signed integer tensor"),
    ("compute_logprobs", "requested.table", empty, TABLE),
    ("force_thinking_end", "draft_tokens", unsigned, "expected signed integer tensor"),
    ("force_thinking_end", "slots.table", empty, TABLE),
    ("keep_draft_probs", "draft_probs", empty, PROBS),
    ("keep_draft_probs", "slots.pools.bias", empty, POOLS),
    ("keep_draft_probs", "rows.positions", none, POSITIONS),
    ("mask_disallowed_tokens", "rows.positions", none, POSITIONS),
    ("mask_disallowed_tokens", "rows.drafts", unsigned, "expected row-contiguous signed integer"),
    ("mask_disallowed_tokens", "slots.pools.bias", empty, POOLS),
    ("processed_scores", "rows.positions", none, POSITIONS),
    ("rejection_sample", "drafts.probs", empty, PROBS),
    ("rejection_sample", "drafts.tokens", unsigned, "draft_tokens: expected signed integer tensor"),
    ("rejection_sample", "rows.positions", none, POSITIONS),
    ("rejection_sample", "target.tokens", none, "target tokens: expected signed integer tensor"),
    ("sample_tokens", "rows.positions", none, POSITIONS),
    ("sample_tokens", "slots.table", empty, TABLE),
    ("update_thinking_state", "slots.table", empty, TABLE),
    ("update_token_history", "slots.pools.bias", empty, POOLS),
]


@pytest.mark.parametrize(("name", "argument", "change", "message"), BROKEN)
def test_broken_arguments_are_named(
    name: str, argument: str, change: Callable[[torch.Tensor], Any], message: str
) -> None:
    given = changed_arguments(operations()[name], argument, change)
    with pytest.raises(TensorContractError, match=re.escape(message)):
        getattr(ops, name)(**given)


@pytest.mark.parametrize("name", NAMES)
def test_views_with_the_negative_bit_and_arrays_are_refused(name: str) -> None:
    op = getattr(ops, name)
    for argument in tensor_names(operations()[name]):
        if argument == "accepted.status" or argument.startswith("rules.relaxed.slots.pools."):
            continue  # not read
        for change, message in (
            (torch._neg_view, "a view with the negative bit; call resolve_neg()"),
            (lambda t: np.zeros(t.shape), "got numpy.ndarray float64 ["),
        ):
            with pytest.raises(TensorContractError, match=re.escape(message)):
                op(**changed_arguments(operations()[name], argument, change))


@pytest.mark.parametrize("name", ["force_thinking_end", "update_thinking_state"])
@pytest.mark.parametrize("progress", [-9, 99])
def test_progress_outside_the_end_sequence_is_clamped(name: str, progress: int) -> None:
    given = operations()[name]
    given["slots"].table[:, given["slots"].columns.offset("end_progress")] = progress
    torch_results, results = (
        run_op(getattr(ops, name), given, {"backend": b}) for b in ops.Backend
    )
    assert all(map(same_bits, results, torch_results))


@both
@pytest.mark.parametrize("name", NAMES)
def test_slot_ids_outside_the_table_are_the_last_slot(name: str, backend: ops.Backend) -> None:
    op, given = getattr(ops, name), operations()[name]
    names = list(tensor_names(given))
    for argument in (each for each in names if each.endswith("slot_ids")):
        expected = run_op(op, given, {"backend": backend})
        # results, then arguments after the call
        del expected[names.index(argument) - len(names)]
        for outside in (-1, S, -(2**40), 2**40):
            ids = torch.tensor([0, outside], device=DEVICE)
            changed = changed_arguments(given, argument, lambda _, ids=ids: ids)
            got = run_op(op, changed, {"backend": backend})
            del got[names.index(argument) - len(names)]
            assert all(map(same_bits, got, expected)), (argument, outside)

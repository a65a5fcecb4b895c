"""Arguments that operations refuse by name, and ids outside their range, by operation."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin import ops
from mtp_plugin.errors import MTPPluginError, TensorContractError
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.synthetic_acceptance import synthetic_rule
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
        "look_up_drafts": {"tokens": ints([1, 2], [3, 3]), "lengths": ints(2, 2), "k": 2},
        "mamba_state_selective_copy": {
            "intermediate_states": floats(1, S, K + 1, H),
            "current_states": floats(1, S, H),
            "prefill_status": ints(0, 0),
            "state_idx": ints(0, 2),
            "accepted_counts": ints(1, 0),
            "num_layers": 1,
        },
        "mask_disallowed_tokens": {"logits": floats(4, V), "rows": rows, "slots": slots},
        "penalize_logits": {"logits": floats(4, V), "rows": rows, "slots": slots},
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
LAYOUT = "logits: expected 0 context rows and K+1 = 2 rows"


def broken(name: str, argument: str, change: Callable[[torch.Tensor], Any]) -> None:
    """Call an op with one of its tensors changed."""
    getattr(ops, name)(**changed_arguments(operations()[name], argument, change))


def call(name: str, **changed: Any) -> None:
    """Call an op with other arguments, or with other fields of its rows."""
    given = operations()[name]
    rows = given.get("rows")
    of_rows = {n: changed.pop(n) for n in [*changed] if n in vars(rows or object)}
    if of_rows:
        given["rows"] = replace(rows, **of_rows)
    getattr(ops, name)(**{**given, **changed})


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def layout(**changed: Any) -> ops.StepLayout:
    fields = {"chunk_lens": (3, 1), "num_generations": 2, "draft_len": 2}
    return ops.StepLayout(**{**fields, "context_lens": torch.tensor([3, 1]), **changed})


def slot_rows(*options: Any) -> None:
    pools = ops.LogitsProcessorState.empty(1, vocab_size=4, device=DEVICE)
    ops.build_slot_rows([*options], pools=pools, device=DEVICE)


def windows(**changed: Any) -> None:
    """Two prompts, with K = 4 past pairs per slot."""
    given = operations()["advance_and_build_inputs"]
    history = ops.History(zeros(S, 4, dtype=torch.int32), zeros(S, 4, H), zeros(2).int())
    step = ops.StepLayout((2, 2), 0, 4, zeros(2).int(), positions=zeros(4).int())
    rows = ops.TargetRows(zeros(4).int(), zeros(4, H), changed.pop("successors", zeros(2).int()))
    made = ops.DraftWindows(**{"window": 4, "history_lens": (0, 0), **changed})
    given |= {"layout": step, "history": history, "rows": rows, "windows": made}
    ops.advance_and_build_inputs(**given)


# fmt: off
ROWS: list[tuple[Callable[[], object], str]] = [
    (lambda: broken("accept", "rules.relaxed.delta_in_force", empty), DELTA),
    (lambda: broken("accept", "rules.relaxed.delta_in_force", lambda t: t[:2]), DELTA),
    (lambda: broken("accept", "rules.relaxed.slots.table", empty), TABLE),
    (lambda: broken("accept", "draft_tokens", unsigned),
     "draft_tokens: expected signed integer tensor"),
    (lambda: broken("advance_and_build_inputs", "history.tokens", empty),
     "history.tokens: expected"),
    (lambda: broken("advance_and_build_inputs", "history.states", empty),
     "history.states: expected"),
    (lambda: broken("advance_and_build_inputs", "layout.positions", none),
     "needs the step's positions, got None"),
    (lambda: broken("build_reused_inputs", "layout.positions", none),
     "needs the step's positions, got None"),
    (lambda: broken("build_reused_inputs", "accepted_tokens", unsigned),
     "expected signed integer tensor"),
    (lambda: broken("compute_logprobs", "requested.table", empty), TABLE),
    (lambda: broken("force_thinking_end", "draft_tokens", unsigned),
     "expected signed integer tensor"),
    (lambda: broken("force_thinking_end", "slots.table", empty), TABLE),
    (lambda: broken("keep_draft_probs", "draft_probs", empty), PROBS),
    (lambda: broken("keep_draft_probs", "slots.pools.bias", empty), POOLS),
    (lambda: broken("keep_draft_probs", "rows.positions", none), POSITIONS),
    (lambda: broken("mask_disallowed_tokens", "rows.positions", none), POSITIONS),
    (lambda: broken("mask_disallowed_tokens", "rows.drafts", unsigned),
     "expected row-contiguous signed integer"),
    (lambda: broken("mask_disallowed_tokens", "slots.pools.bias", empty), POOLS),
    (lambda: broken("penalize_logits", "rows.positions", none), POSITIONS),
    (lambda: broken("penalize_logits", "slots.pools.bias", empty), POOLS),
    (lambda: broken("processed_scores", "rows.positions", none), POSITIONS),
    (lambda: broken("rejection_sample", "drafts.probs", empty), PROBS),
    (lambda: broken("rejection_sample", "drafts.tokens", unsigned),
     "draft_tokens: expected signed integer tensor"),
    (lambda: broken("rejection_sample", "rows.positions", none), POSITIONS),
    (lambda: broken("rejection_sample", "target.tokens", none),
     "target tokens: expected signed integer tensor"),
    (lambda: broken("sample_tokens", "rows.positions", none), POSITIONS),
    (lambda: broken("sample_tokens", "slots.table", empty), TABLE),
    (lambda: broken("update_thinking_state", "slots.table", empty), TABLE),
    (lambda: broken("update_token_history", "slots.pools.bias", empty), POOLS),
    (lambda: broken("update_thinking_state", "accepted.tokens", lambda t: t[:, :0]),
     "accepted tokens: expected integer tensor [R, >= 1]"),
    (lambda: broken("update_token_history", "accepted.tokens", lambda t: t[:, :0]),
     "accepted tokens: expected row-contiguous torch.int32 tensor [R, >= 1]"),
    (lambda: windows(successors=None), "rows.successors: expected integer tensor [2]"),
    (lambda: call("accept", logits=zeros(3, V)), f"{LAYOUT} for each of 2 generations, got 3 rows"),
    (lambda: call("accept", logits=zeros(4, 0)), "logits: expected "),
    (lambda: call("accept", layout=layout()), "logits: expected 2 context rows"),
    (lambda: call("accept", draft_tokens=zeros(3).int()), "draft_tokens: expected G*K = 2 "),
    (lambda: call("accept", draft_tokens=zeros(2, 1).bool()),
     "draft_tokens: expected signed integer tensor"),
    (lambda: call("accept", first_rows=zeros(2).int()), "first_rows: expected draft_lens"),
    (lambda: call("accept", rules=ops.AcceptanceRules(forced_ids=zeros(4).int())),
     "forced_ids: expected choices together with it"),
    (lambda: call("accept",
        rules=ops.AcceptanceRules(processed_slots=operations()["sample_tokens"]["slots"])),
     "processed_slots: expected choices together with it"),
    (lambda: call("compute_logprobs", logits=zeros(4, 0)), "logits: expected "),
    (lambda: call("compute_logprobs", requested=21),
     "requested: expected an integer in -1..20, got 21"),
    (lambda: call("compute_logprobs", requested=None),
     "requested: expected an integer in -1..20, got None"),
    (lambda: call("compute_logprobs", requested=3, sums=RowSums.unwritten(zeros(4, V))),
     "sums: expected the slots "),
    (lambda: call("compute_logprobs", sums=RowSums.unwritten(zeros(4, V).half())),
     "sums: expected chunks as "),
    (lambda: call("sample_tokens", logits=zeros(4, 0)), "logits: expected "),
    (lambda: call("sample_tokens", logits=zeros(4, V - 1)), "logits: expected 8 columns"),
    (lambda: call("sample_tokens", num_contexts=6), "expected 0 to 2 contexts"),
    (lambda: call("sample_tokens", num_contexts=2, width=0), "a width of 1 or more"),
    (lambda: call("sample_tokens", column=-1), "a column of 0 or more"),
    (lambda: call("mask_disallowed_tokens", logits=zeros(4, V + 1)), "logits: expected 8 columns"),
    (lambda: call("mask_disallowed_tokens", column=1, drafts=None), "expected those of the target"),
    (lambda: call("processed_scores", column=1, drafts=None), "got rows of drafts"),
    (lambda: call("processed_scores", truncation=zeros(4, 3)),
     "truncation: expected contiguous torch.float32 tensor [4, 4]"),
    (lambda: call("mamba_state_selective_copy", num_layers=2),
     "num_layers: expected an integer in 0..1, got 2"),
    (lambda: ops.LogitRows.of_target(ops.StepLayout((), 2, 1, NO_CONTEXTS)),
     "sampling: needs the step's positions"),
    (lambda: ops.LogitRows.of_target(replace(layout(), positions=torch.arange(10)), zeros(3).int()),
     "draft_tokens: expected G*K = 4 integer ids"),
    (lambda: replace(ops.LogitRows.flat(zeros(2).int()), ahead=[1, 2]).check(torch.device(DEVICE)),
     "logit rows, ahead: expected "),
    (lambda: windows(window=6), "window: expected an integer in 1..5, got 6"),
    (lambda: windows(history_lens=[1]), "history_lens: expected one per context (2), got [1]"),
    (lambda: windows(history_lens=[5, 0]), "history_lens: expected an integer in 0..4, got 5"),
    (lambda: windows(spare_rows=-1), "spare_rows: expected an integer >= 0, got -1"),
    (lambda: layout(num_generations=-1), "got G = -1"),
    (lambda: layout(draft_len=-1), "K = -1"),
    (lambda: layout(context_lens=torch.tensor([3])),
     "step, context_lens: expected integer tensor [2]"),
    (lambda: layout(context_lens=torch.tensor([3.0, 1.0])), "got torch.float32"),
    (lambda: layout(positions=torch.arange(9)), "step, positions: expected integer tensor [10]"),
    (lambda: slot_rows({"top_kk": 3}), "there is no column top_kk; expected number, prompt_len, "),
    (lambda: slot_rows({"seed": [1, 2]}), "slot table, seed: expected an integer, got [1, 2]"),
    (lambda: slot_rows({"temperature": math.nan}),
     "slot table, temperature: expected a number, got nan"),
    (lambda: slot_rows({"top_k": 2.5}), "slot table, top_k: expected an integer, got 2.5"),
    (lambda: slot_rows({"stop_ids": ["a"]}),
     "slot table, stop_ids: expected a number or a sequence of numbers"),
    (lambda: slot_rows({"bias_row": 1}),
     "slot table, bias_row: expected an integer in -1..0, got 1"),
    (lambda: slot_rows(3), "expected a mapping of columns to numbers per request, got 3"),
    (lambda: slot_rows({"temperature": [1.0, 2.0]}),
     "temperature: expected at most 1 numbers, got 2"),
    (lambda: synthetic_rule([0.5, 0.6], 0),
     "expected shares from 0 to 1 that do not rise, got [0.5, 0.6]"),
    (lambda: synthetic_rule([1.1], 0), "expected shares from 0 to 1"),
    (lambda: synthetic_rule([math.nan], 0), "expected shares from 0 to 1"),
    (lambda: synthetic_rule([0.5], -1), "expected a seed from 0 to 2**32 - 1, got -1"),
    (lambda: ops.sample_tokens(**operations()["sample_tokens"], backend="cuda"),
     "backend: expected auto, torch, triton or reference, got 'cuda'"),
]
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_call_is_refused(row: tuple[Callable[[], object], str]) -> None:
    wrong_call, message = row
    with pytest.raises(MTPPluginError, match=re.escape(message)):
        wrong_call()


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
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_draft_tokens_are_read(name: str, dtype: torch.dtype, backend: ops.Backend) -> None:
    op, given = getattr(ops, name), operations()[name]
    names = list(tensor_names(given))
    for argument in (each for each in names if re.search(r"draft_tokens|drafts(\.tokens)?$", each)):
        expected = run_op(op, given, {"backend": backend})
        changed = changed_arguments(given, argument, lambda t: t.to(dtype))
        got = run_op(op, changed, {"backend": backend})
        # results, then arguments after the call
        for values in (expected, got):
            del values[names.index(argument) - len(names)]
        assert all(map(same_bits, got, expected)), argument


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

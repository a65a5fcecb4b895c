"""Verify the drafts of a step.

R requests of a step, C contexts first, then G generations; K drafts each, vocabulary size V.
"""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.acceptance.accept_reference import accept_reference
from mtp_plugin.ops.acceptance.types import STRICT, AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, SIGNED, AtLeast, expect_tensor
from mtp_plugin.ops.step import Accepted, StepLayout, check_slots

RELAXED_COLUMNS = ("thinking", "relaxed_topk", "relaxed_limit", "stop_ids")
"""Slot columns that relaxed acceptance reads; it writes the first."""


def accept(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules = STRICT,
    *,
    draft_lens: torch.Tensor | None = None,
    final_context: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    first_rows: torch.Tensor | None = None,
    keeps_rows: bool = False,
    fills: torch.dtype | None = None,
    checked: bool = False,
    backend: Backend | str = "auto",
) -> Accepted:
    """Accept the leading drafts of every generation, and add one bonus token of the target.

    **Strict**: a draft is accepted if it is the target's argmax. With K = 2, drafts ``b c`` and
    rows whose argmax is ``b x y``, the output is ``b x``. Ties go to the lowest id, NaN counts as
    -inf.

    **Relaxed**: in its thinking phase a request accepts a draft among the ``relaxed_topk`` most
    probable tokens of its row with p(draft) >= p_max - delta (fp32 softmax; equality qualifies, the
    argmax always does). Stop ids and the two thinking tokens are accepted only as argmax. The phase
    follows every output token, so later rows of the same run use the new one; outside of it
    acceptance is strict. The phase after the run is written to the request's slot: ``thinking``,
    and the delta in force, 0 outside the phase.

    **Forced**: a number of leading drafts is accepted, whatever the argmax is, up to the first that
    is absent, outside the vocabulary or masked (-inf or NaN) in its row. A negative number leaves
    the generation to the other rules; otherwise no other rule applies, and only the thinking phase
    is updated.

    The bonus is the argmax of the row after the accepted drafts, whatever the rule.

    **Target tokens** (``choices``), where they are sampled already, replace the argmax of every
    row: a draft is accepted if it is the sampled token, and requests with a temperature are never
    relaxed. Rows with a **forced id** accept no other draft.

    **Ragged rows**: by default a context has one row of logits and a generation K+1. With
    ``first_rows`` a generation has as many rows as drafts and one more, anywhere in ``logits``, as
    in vLLM (``cu_num_logits[:-1]``). Rows of no request are ignored.

    Args:
        layout: of the step; its positions are not read.
        logits: [C + G*(K+1), V], or with ``first_rows`` [>= R, V], floating-point with contiguous
            rows, any stride between them.
        draft_tokens: [G*K] or [G, K] signed integer; ids outside the vocabulary, -1 among them,
            are never accepted.
        rules: see `AcceptanceRules`; slots of relaxed acceptance are read and written.
        draft_lens: [G] integer: the number of drafts of each generation; None: K.
        final_context: [C] bool; a context that does not end its prompt has no output. None: all do.
        last_tokens: [R] int32, any stride: set to each request's last output token, 0 without one.
        first_rows: [R] integer, any stride: the row of ``logits`` with which each request begins.
            Needs ``draft_lens``. The rows of every request must be in ``logits``.
        keeps_rows: for an engine whose requests all have an output token and which embeds the
            unused tail: a request without one gets token 0, and 0 fills the tail; the rows of the
            output tokens are returned too.
        fills: for an engine that embeds every id: the dtype of the tokens, 0 in place of -1.
        checked: as in `sample_tokens`.

    Returns:
        Tokens [R, K+1] int32, -1 after the accepted tokens; their number [R] int32; and a status
        [R] int32, 1 for a request with a row without finite value, whose output ends before it.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, another number of
            rows or drafts, or an argument without the one that it needs.

    Source: greedy verification of Stern et al. 2018, Blockwise Parallel Decoding; relaxed
    acceptance and the layout of rows of TensorRT-LLM.
    """
    if not checked:
        _check(
            *(layout, logits, draft_tokens, rules, draft_lens),
            *(final_context, last_tokens, first_rows),
        )
    backend = Backend.of(backend, logits.device, "backend")
    implementation = backend.dispatch(accept_reference)
    return implementation(
        layout,
        logits,
        draft_tokens,
        rules,
        draft_lens=draft_lens,
        final_context=final_context,
        last_tokens=last_tokens,
        first_rows=first_rows,
        keeps_rows=keeps_rows,
        fills=fills,
    )


def _check(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    first_rows: torch.Tensor | None,
) -> None:
    _check_rows(layout, logits, draft_tokens, draft_lens, first_rows)
    device, rows = logits.device, logits.shape[0]
    requests, generations = layout.num_requests, layout.num_generations
    for name, tensor, size, dtype in (
        ("first_rows", first_rows, requests, INTEGERS),
        ("draft_lens", draft_lens, generations, INTEGERS),
        ("final_context", final_context, layout.num_contexts, torch.bool),
        ("last_tokens", last_tokens, requests, torch.int32),
        ("forced_matches", rules.forced_matches, generations, INTEGERS),
        ("choices", rules.choices, rows, torch.int32),
        ("forced_ids", rules.forced_ids, rows, torch.int32),
    ):
        if tensor is not None:
            expect_tensor(name, tensor, dtype=dtype, shape=(size,), device=device)
    optional = {"forced_ids": rules.forced_ids, "processed_slots": rules.processed_slots}
    for name, part in optional.items():
        if part is not None and rules.choices is None:
            raise TensorContractError(f"{name}: expected choices together with it, got None")
    if rules.processed_slots is not None:
        check_slots(rules.processed_slots, requests, device)
        if rules.processed_slots.pools is not None:
            rules.processed_slots.pools.check(device, logits.shape[1])
    if rules.relaxed is not None:
        check_slots(rules.relaxed.slots, requests, device, RELAXED_COLUMNS)
        delta, slots = rules.relaxed.delta_in_force, AtLeast(rules.relaxed.slots.table.shape[0])
        expect_tensor("delta_in_force", delta, dtype=torch.float32, shape=(slots,), device=device)


def _check_rows(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    first_rows: torch.Tensor | None,
) -> None:
    expect_tensor("logits", logits, dtype=FLOATS, shape=("rows", AtLeast(1)), contiguous="rows")
    rows = logits.shape[0]
    if first_rows is not None:
        if draft_lens is None:
            raise TensorContractError("first_rows: expected draft_lens together with it, got None")
        if rows < layout.num_requests:
            raise TensorContractError(
                f"logits: expected a row or more for each of {layout.num_requests} requests, got "
                f"{rows} rows"
            )
    elif rows != layout.num_logit_rows:
        raise TensorContractError(
            f"logits: expected {layout.num_contexts} context rows and K+1 = {layout.step_rows} "
            f"rows for each of {layout.num_generations} generations, got {rows} rows"
        )
    drafts = layout.num_generations * layout.draft_len
    expect_tensor("draft_tokens", draft_tokens, dtype=SIGNED, device=logits.device)
    if draft_tokens.numel() != drafts:
        raise TensorContractError(
            f"draft_tokens: expected G*K = {drafts} integer ids, got {draft_tokens.numel()}: "
            f"{list(draft_tokens.shape)}"
        )

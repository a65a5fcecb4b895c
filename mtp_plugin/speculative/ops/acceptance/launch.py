"""Acceptance on the device: one reduction of the logits, and one launch that judges and emits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from typing_extensions import override

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import Top1Partials, no_partials, split, top1_partials
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.edit_pools import EditPools
from mtp_plugin.speculative.ops.acceptance.contract import AcceptanceRules, RelaxedRule
from mtp_plugin.speculative.ops.acceptance.kernel import emit_kernel, relaxed_kernel
from mtp_plugin.speculative.step import Accepted, StepLayout


@dataclass(frozen=True)
class RelaxedPartials(Top1Partials):
    """And, for drafted rows of requests that may be relaxed, the draft's rank and what softmax
    needs."""

    weights: torch.Tensor  # [rows, pieces] float32: sum of exp(value - piece maximum)
    ahead: torch.Tensor  # [rows, pieces] int32: tokens in front of a draft that is not masked
    near: torch.Tensor | None = None  # [rows] float32: the draft's edited value; None: no edits

    @classmethod
    @override
    def unwritten(cls, rows: int, vocab: int, device: torch.device | str) -> RelaxedPartials:
        _, pieces, _ = split(rows, vocab, heavy=True)
        return cls(
            values=torch.empty(rows, pieces, dtype=torch.float32, device=device),
            ids=torch.empty(rows, pieces, dtype=torch.int32, device=device),
            weights=torch.empty(rows, pieces, dtype=torch.float32, device=device),
            ahead=torch.empty(rows, pieces, dtype=torch.int32, device=device),
        )


def accept(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules,
    *,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
) -> Accepted:
    """As at the door."""
    expect_reachable(emit_kernel, "logits", logits)
    drafts = draft_tokens.reshape(-1).contiguous()
    accepted = Accepted.unwritten(layout.num_requests, layout.draft_len, logits.device)
    rule = rules.relaxed
    if rule is None:
        # of a step whose tokens were chosen no row is read again, but where drafts are forced
        partials = top1_partials(logits) if rules.choices is None else no_partials(logits)
    else:
        has_choices = rules.choices is not None
        partials = relaxed_partials(
            layout, logits, drafts, rule, has_choices=has_choices, pools=_pools(rules)
        )
    if layout.num_requests:
        _emit(
            layout,
            partials,
            logits,
            drafts,
            rules,
            draft_lens,
            final_context,
            last_tokens,
            accepted,
        )
    return accepted


def relaxed_partials(
    layout: StepLayout,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rule: RelaxedRule,
    *,
    has_choices: bool = False,
    pools: EditPools | None = None,
) -> RelaxedPartials:
    """As `top1_partials`, and what relaxed acceptance needs of drafted rows, in the same pass.

    Args:
        drafts: [G*K] contiguous.
        has_choices: the target's tokens are known: rows that cannot be relaxed are not read.
        pools: values are edited by them, and by the rule's slots; None: they stand as they are.
    """
    rows, vocab = logits.shape
    piece, pieces, block = split(rows, vocab, heavy=True)
    partials = RelaxedPartials.unwritten(rows, vocab, logits.device)
    if pools is not None:
        near = torch.empty(rows, dtype=torch.float32, device=logits.device)
        partials = replace(partials, near=near)
    if rows == 0:
        return partials
    slots, columns = rule.slots, rule.slots.columns
    relaxed_kernel[(rows, pieces)](
        # inputs
        logits,
        drafts if drafts.numel() else partials.ids,
        slots.slot_ids,
        slots.table,
        rule.delta_in_force,
        *(
            (partials.ids,) * 4  # what is not there is never read
            if pools is None
            else (pools.bias, pools.allowed, pools.counts, pools.seen)
        ),
        # outputs
        partials.values,
        partials.ids,
        partials.weights,
        partials.ahead,
        partials.weights if partials.near is None else partials.near,
        # sizes
        logits.stride(0),
        vocab,
        0 if pools is None else pools.vocab_size,
        piece,
        pieces,
        layout.num_contexts,
        slots.slot_ids.stride(0),
        slots.table.stride(0),
        rule.delta_in_force.stride(0),
        columns.offset("thinking"),
        columns.offset("relaxed_limit"),
        rule.begin_token,
        # constants
        WIDTH=layout.step_rows,
        COLUMNS=triton.next_power_of_2(max(layout.draft_len, 1)),
        BLOCK=block,
        HAS_CHOICES=has_choices,
        HAS_EDITS=pools is not None,
        num_warps=4,
        **pdl_options(logits.device),
    )
    return partials


def _pools(rules: AcceptanceRules) -> EditPools | None:
    """What values are edited by."""
    return None if rules.edited_by is None else rules.edited_by.pools


def _emit(
    layout: StepLayout,
    partials: Top1Partials,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rules: AcceptanceRules,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    accepted: Accepted,
) -> None:
    """Fill ``accepted``, and move the phases on."""
    k, rule, forced = layout.draft_len, rules.relaxed, rules.forced_matches
    columns = None if rule is None else rule.slots.columns
    relaxed = partials if isinstance(partials, RelaxedPartials) else None
    pools = _pools(rules)
    slots = rules.edited_by if rule is None else rule.slots
    unused = accepted.num_accepted  # a pointer that the kernel never reads
    emit_kernel[(layout.num_requests,)](
        # inputs
        partials.values,
        partials.ids,
        unused if relaxed is None else relaxed.weights,
        unused if relaxed is None else relaxed.ahead,
        logits,
        drafts if drafts.numel() else unused,
        draft_lens.contiguous() if draft_lens is not None else unused,
        final_context.contiguous() if final_context is not None else unused,
        slots.slot_ids if slots is not None else unused,
        forced.contiguous() if forced is not None else unused,
        rules.choices.contiguous() if rules.choices is not None else unused,
        rules.forced_ids.contiguous() if rules.forced_ids is not None else unused,
        unused if relaxed is None or relaxed.near is None else relaxed.near,
        unused if pools is None else pools.allowed,
        # outputs
        accepted.tokens,
        accepted.num_accepted,
        accepted.status,
        last_tokens if last_tokens is not None else unused,
        # read, and moved on
        slots.table if slots is not None else unused,
        rule.delta_in_force if rule is not None else unused,
        # sizes
        layout.num_contexts,
        partials.num_pieces,
        logits.stride(0),
        logits.shape[1],
        0 if pools is None else pools.vocab_size,
        0 if last_tokens is None else last_tokens.stride(0),
        slots.slot_ids.stride(0) if slots is not None else 0,
        slots.table.stride(0) if slots is not None else 0,
        rule.delta_in_force.stride(0) if rule is not None else 0,
        columns.offset("thinking") if columns is not None else 0,
        columns.offset("relaxed_topk") if columns is not None else 0,
        columns.offset("relaxed_limit") if columns is not None else 0,
        rule.begin_token if rule is not None else -1,
        rule.end_token if rule is not None else -1,
        # constants
        K=k,
        COLUMNS=triton.next_power_of_2(k + 1),
        PIECES=triton.next_power_of_2(max(partials.num_pieces, 1)),
        STOPS=MAX_STOP_IDS,
        RELAXED=rule is not None,
        HAS_DRAFT_LENS=draft_lens is not None,
        HAS_FINAL=final_context is not None,
        HAS_LAST=last_tokens is not None,
        HAS_FORCED=forced is not None,
        HAS_CHOICES=rules.choices is not None,
        HAS_FORCED_IDS=rules.forced_ids is not None,
        HAS_EDITS=pools is not None and (rule is not None or forced is not None),
        num_warps=1 if k < 8 else 4,
        **pdl_options(logits.device),
    )

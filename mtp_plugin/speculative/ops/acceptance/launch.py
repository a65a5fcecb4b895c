"""Acceptance on the device: one reduction of the logits, and one launch that judges and emits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from typing_extensions import override

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import Top1Partials, no_partials, split, top1_partials
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.ops.acceptance.contract import AcceptanceRules, RelaxedRule
from mtp_plugin.speculative.ops.acceptance.kernel import emit_kernel, relaxed_kernel
from mtp_plugin.speculative.step import Accepted, StepLayout


@dataclass(frozen=True)
class RelaxedPartials(Top1Partials):
    """And, for drafted rows of requests that think, the draft's rank and the softmax weights."""

    weights: torch.Tensor  # [rows, pieces] float32: sum of exp(value - piece maximum)
    ahead: torch.Tensor  # [rows, pieces] int32: tokens in front of a draft that is not masked

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
        partials = relaxed_partials(layout, logits, drafts, rule)
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
    layout: StepLayout, logits: torch.Tensor, drafts: torch.Tensor, rule: RelaxedRule
) -> RelaxedPartials:
    """As `top1_partials`, and what relaxed acceptance needs of drafted rows, in the same pass.

    Args:
        drafts: [G*K] contiguous.
    """
    rows, vocab = logits.shape
    piece, pieces, block = split(rows, vocab, heavy=True)
    partials = RelaxedPartials.unwritten(rows, vocab, logits.device)
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
        # outputs
        partials.values,
        partials.ids,
        partials.weights,
        partials.ahead,
        # sizes
        logits.stride(0),
        vocab,
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
        num_warps=4,
        **pdl_options(logits.device),
    )
    return partials


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
    unused = accepted.num_accepted  # a pointer that the kernel never reads
    emit_kernel[(layout.num_requests,)](
        # inputs
        partials.values,
        partials.ids,
        partials.weights if isinstance(partials, RelaxedPartials) else unused,
        partials.ahead if isinstance(partials, RelaxedPartials) else unused,
        logits,
        drafts if drafts.numel() else unused,
        draft_lens.contiguous() if draft_lens is not None else unused,
        final_context.contiguous() if final_context is not None else unused,
        rule.slots.slot_ids if rule is not None else unused,
        forced.contiguous() if forced is not None else unused,
        rules.choices.contiguous() if rules.choices is not None else unused,
        # outputs
        accepted.tokens,
        accepted.num_accepted,
        accepted.status,
        last_tokens if last_tokens is not None else unused,
        # read, and moved on
        rule.slots.table if rule is not None else unused,
        rule.delta_in_force if rule is not None else unused,
        # sizes
        layout.num_contexts,
        partials.num_pieces,
        logits.stride(0),
        logits.shape[1],
        0 if last_tokens is None else last_tokens.stride(0),
        rule.slots.slot_ids.stride(0) if rule is not None else 0,
        rule.slots.table.stride(0) if rule is not None else 0,
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
        num_warps=1 if k < 8 else 4,
        **pdl_options(logits.device),
    )

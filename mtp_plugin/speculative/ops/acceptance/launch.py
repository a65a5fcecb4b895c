"""Acceptance on the device: one reduction of the logits, and one launch that judges and emits."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import RelaxedPartials, Top1Partials, relaxed_partials, top1_partials
from mtp_plugin.speculative.ops.acceptance.contract import AcceptanceRules, RelaxedRule, Verdict
from mtp_plugin.speculative.ops.acceptance.kernel import emit_kernel
from mtp_plugin.speculative.step import Accepted, StepLayout


def accept(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules,
    *,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
) -> Verdict:
    """As at the door."""
    expect_reachable(emit_kernel, "logits", logits)
    drafts = draft_tokens.reshape(-1).contiguous()
    accepted = Accepted.unwritten(layout.num_requests, layout.draft_len, logits.device)
    thinking = None
    if rules.relaxed is None:
        partials = top1_partials(logits)
    else:
        thinking = torch.empty(layout.num_requests, dtype=torch.bool, device=logits.device)
        partials = relaxed_partials(
            logits,
            drafts,
            rules.relaxed.thinking.contiguous(),
            layout.num_contexts,
            layout.step_rows,
            rules.relaxed.begin_token,
        )
    verdict = Verdict(accepted, thinking)
    if layout.num_requests:
        _emit(
            layout, partials, logits, drafts, rules, draft_lens, final_context, last_tokens, verdict
        )
    return verdict


def _emit(
    layout: StepLayout,
    partials: Top1Partials,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rules: AcceptanceRules,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    verdict: Verdict,
) -> None:
    """Fill ``verdict``."""
    k, accepted, thinking = layout.draft_len, verdict.accepted, verdict.thinking
    rule, forced = rules.relaxed, rules.forced_matches
    stops = _stop_ids(rule)
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
        rule.thinking.contiguous() if rule is not None else unused,
        rule.topk.contiguous() if rule is not None else unused,
        rule.delta.contiguous() if rule is not None else unused,
        stops if stops is not None else unused,
        forced.contiguous() if forced is not None else unused,
        # outputs
        accepted.tokens,
        accepted.num_accepted,
        accepted.status,
        last_tokens if last_tokens is not None else unused,
        thinking.view(torch.int8) if thinking is not None else unused,
        # sizes
        layout.num_contexts,
        partials.num_pieces,
        logits.stride(0),
        logits.shape[1],
        0 if stops is None else stops.shape[1],
        0 if stops is None else stops.stride(0),
        0 if last_tokens is None else last_tokens.stride(0),
        rule.begin_token if rule is not None else -1,
        rule.end_token if rule is not None else -1,
        # constants
        K=k,
        COLUMNS=triton.next_power_of_2(k + 1),
        PIECES=triton.next_power_of_2(partials.num_pieces),
        STOPS=1 if stops is None else triton.next_power_of_2(max(stops.shape[1], 1)),
        RELAXED=rule is not None,
        HAS_DRAFT_LENS=draft_lens is not None,
        HAS_FINAL=final_context is not None,
        HAS_STOPS=stops is not None,
        HAS_LAST=last_tokens is not None,
        HAS_FORCED=forced is not None,
        num_warps=1 if k < 8 else 4,
        **pdl_options(logits.device),
    )


def _stop_ids(rule: RelaxedRule | None) -> torch.Tensor | None:
    """The stop ids with contiguous rows."""
    if rule is None or rule.stop_ids is None or rule.stop_ids.stride(1) == 1:
        return None if rule is None else rule.stop_ids
    return rule.stop_ids.contiguous()

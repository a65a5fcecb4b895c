"""Checks, outputs and grids of the acceptance kernels: two launches per call."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import RelaxedPartials, Top1Partials, relaxed_partials, top1_partials
from mtp_plugin.speculative.ops.acceptance.contract import RelaxedAccepted, RelaxedRule, check_rows
from mtp_plugin.speculative.ops.acceptance.kernel import emit_kernel
from mtp_plugin.speculative.step import Accepted


def accept_strict(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    num_contexts: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None = None,
    final_context: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    forced_matches: torch.Tensor | None = None,
    out: Accepted | None = None,
    scratch: Top1Partials | None = None,
) -> Accepted:
    """As the reference; ``last_tokens`` [R] int32 (any stride) takes each request's last token."""
    num_generations = check_rows(
        logits,
        draft_tokens,
        num_contexts,
        max_draft_len,
        draft_lens,
        final_context,
        forced_matches,
    )
    requests = num_contexts + num_generations
    if out is None:
        out = Accepted.unwritten(requests, max_draft_len, logits.device)
    else:
        out.check(requests, max_draft_len, logits.device)
    _emit(
        top1_partials(logits, scratch),
        logits,
        draft_tokens.reshape(-1),
        out,
        None,
        num_contexts,
        num_generations,
        max_draft_len,
        draft_lens,
        final_context,
        None,
        last_tokens,
        forced_matches,
    )
    return out


def accept_relaxed(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rule: RelaxedRule,
    *,
    num_contexts: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None = None,
    final_context: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    out: RelaxedAccepted | None = None,
    scratch: RelaxedPartials | None = None,
) -> RelaxedAccepted:
    """As the reference; the logits are read once, whatever the phases of the batch."""
    num_generations = check_rows(
        logits, draft_tokens, num_contexts, max_draft_len, draft_lens, final_context
    )
    if out is None:
        out = RelaxedAccepted.unwritten(num_contexts, num_generations, max_draft_len, logits.device)
    else:
        out.check(num_contexts, num_generations, max_draft_len, logits.device)
    drafts = draft_tokens.reshape(-1)
    partials = relaxed_partials(
        logits, drafts, rule.thinking, num_contexts, max_draft_len + 1, rule.begin_token, scratch
    )
    _emit(
        partials,
        logits,
        drafts,
        out.accepted,
        out,
        num_contexts,
        num_generations,
        max_draft_len,
        draft_lens,
        final_context,
        rule,
        last_tokens,
    )
    return out


def _emit(
    partials: Top1Partials,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    accepted: Accepted,
    relaxed: RelaxedAccepted | None,
    num_contexts: int,
    num_generations: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    rule: RelaxedRule | None,
    last_tokens: torch.Tensor | None,
    forced_matches: torch.Tensor | None = None,
) -> None:
    """Fill ``accepted``, and the rest of ``relaxed`` where there is a rule."""
    requests = num_contexts + num_generations
    k = max_draft_len
    stops = None if rule is None else rule.stop_ids
    if stops is not None and stops.stride(1) != 1:
        stops = stops.contiguous()
    unused = accepted.num_accepted  # a pointer that the kernel never reads
    if requests:
        weights = partials.weights if isinstance(partials, RelaxedPartials) else unused
        ahead = partials.ahead if isinstance(partials, RelaxedPartials) else unused
        emit_kernel[(requests,)](
            # inputs
            partials.values,
            partials.ids,
            weights,
            ahead,
            logits,
            drafts if drafts.numel() else unused,
            draft_lens if draft_lens is not None else unused,
            final_context if final_context is not None else unused,
            rule.thinking if rule is not None else unused,
            rule.topk if rule is not None else unused,
            rule.delta if rule is not None else unused,
            stops if stops is not None else unused,
            forced_matches if forced_matches is not None else unused,
            # outputs
            accepted.tokens,
            accepted.num_accepted,
            accepted.status,
            last_tokens if last_tokens is not None else unused,
            relaxed.thinking.view(torch.int8) if relaxed is not None else unused,
            relaxed.margin if relaxed is not None else unused,
            # sizes
            num_contexts,
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
            RELAXED=relaxed is not None,
            HAS_DRAFT_LENS=draft_lens is not None,
            HAS_FINAL=final_context is not None,
            HAS_STOPS=stops is not None,
            HAS_LAST=last_tokens is not None,
            HAS_FORCED=forced_matches is not None,
            num_warps=1 if k < 8 else 4,
            **pdl_options(logits.device),
        )

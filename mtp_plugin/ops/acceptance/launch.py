"""Checks, outputs and grids of the acceptance kernels: two launches per call."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.batch import Accepted
from mtp_plugin.ops.acceptance.contract import RelaxedAccepted, RelaxedRule, check_rows
from mtp_plugin.ops.acceptance.kernel import emit_kernel
from mtp_plugin.vocab_reduce import RelaxedPartials, Top1Partials, relaxed_partials, top1_partials


def accept_strict(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    num_contexts: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None = None,
    final_context: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
) -> Accepted:
    """As the reference; ``last_tokens`` [R] int32 (any stride) takes each request's last token."""
    num_generations = check_rows(
        logits, draft_tokens, num_contexts, max_draft_len, draft_lens, final_context
    )
    drafts = draft_tokens.reshape(-1)
    partials = top1_partials(logits)
    accepted, _, _ = _emit(
        partials,
        logits,
        drafts,
        num_contexts,
        num_generations,
        max_draft_len,
        draft_lens,
        final_context,
        None,
        last_tokens,
    )
    return accepted


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
) -> RelaxedAccepted:
    """As the reference; the logits are read once, whatever the phases of the batch."""
    num_generations = check_rows(
        logits, draft_tokens, num_contexts, max_draft_len, draft_lens, final_context
    )
    drafts = draft_tokens.reshape(-1)
    partials = relaxed_partials(
        logits, drafts, rule.thinking, num_contexts, max_draft_len + 1, rule.begin_token
    )
    accepted, thinking, margin = _emit(
        partials,
        logits,
        drafts,
        num_contexts,
        num_generations,
        max_draft_len,
        draft_lens,
        final_context,
        rule,
        last_tokens,
    )
    return RelaxedAccepted(accepted, thinking.to(torch.bool), margin)


def _emit(
    partials: Top1Partials,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    num_contexts: int,
    num_generations: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    rule: RelaxedRule | None,
    last_tokens: torch.Tensor | None,
) -> tuple[Accepted, torch.Tensor, torch.Tensor]:
    device = logits.device
    requests = num_contexts + num_generations
    k = max_draft_len
    tokens = torch.empty(requests, k + 1, dtype=torch.int32, device=device)
    counts = torch.empty(requests, dtype=torch.int32, device=device)
    status = torch.empty(requests, dtype=torch.int32, device=device)
    if last_tokens is None:
        last_tokens = torch.empty(requests, dtype=torch.int32, device=device)
    relaxed = rule is not None
    thinking = torch.empty(requests if relaxed else 0, dtype=torch.int8, device=device)
    margin = torch.empty((num_generations if relaxed else 0, k), dtype=torch.float32, device=device)
    stops = None if rule is None else rule.stop_ids
    if stops is not None and stops.stride(1) != 1:
        stops = stops.contiguous()
    unused = counts  # a pointer that the kernel never reads
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
            # outputs
            tokens,
            counts,
            status,
            last_tokens,
            thinking,
            margin,
            # sizes
            num_contexts,
            partials.num_pieces,
            logits.stride(0),
            logits.shape[1],
            0 if stops is None else stops.shape[1],
            0 if stops is None else stops.stride(0),
            last_tokens.stride(0),
            rule.begin_token if rule is not None else -1,
            rule.end_token if rule is not None else -1,
            # constants
            K=k,
            COLUMNS=triton.next_power_of_2(k + 1),
            PIECES=triton.next_power_of_2(partials.num_pieces),
            STOPS=1 if stops is None else triton.next_power_of_2(max(stops.shape[1], 1)),
            RELAXED=relaxed,
            HAS_DRAFT_LENS=draft_lens is not None,
            HAS_FINAL=final_context is not None,
            HAS_STOPS=stops is not None,
            num_warps=1 if k < 8 else 4,
        )
    return Accepted(tokens, counts, status), thinking, margin

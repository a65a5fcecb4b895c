"""Acceptance in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

from typing import Any

import torch

from mtp_plugin.speculative.ops.acceptance.contract import RelaxedAccepted, RelaxedRule, check_rows
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK, Accepted


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
    scratch: Any | None = None,  # noqa: ARG001
) -> Accepted:
    """Greedy acceptance: a draft stands while it is the target's argmax; then one bonus token.

    With K = 2, drafts ``b c`` and rows whose argmax is ``b x y``: emitted ``b x``.
    Ties go to the lowest id, NaN counts as -inf.

    Args:
        logits: [C + G*(K+1), V] floating, any row stride.
        draft_tokens: [G*K] or [G, K] integer; ids outside the vocabulary are never accepted.
        num_contexts: C.
        max_draft_len: K.
        draft_lens: [G] integer; drafts at or past it are absent. None: K everywhere.
        final_context: [C] bool; a context that does not end its prompt emits nothing. None: all do.
        last_tokens: [R] int32, any stride: takes each request's last emitted token, 0 without one.
        forced_matches: [G] integer, synthetic acceptance: so many leading drafts stand, whatever
            the argmax is, up to the first that is absent, outside the vocabulary or masked (-inf
            or NaN) in its row. None: the target decides.
        out: takes the result, and is given back. None: new tensors.
        scratch: for implementations that reduce in two launches: ``Top1Partials.unwritten`` of
            :mod:`mtp_plugin.kernels.top_k` for the logits' sizes. With ``out`` and ``scratch`` they
            allocate nothing.

    Raises:
        TensorContractError: a shape that does not fit.
    """
    num_generations = check_rows(
        logits,
        draft_tokens,
        num_contexts,
        max_draft_len,
        draft_lens,
        final_context,
        forced_matches,
    )
    if out is not None:
        out.check(num_contexts + num_generations, max_draft_len, logits.device)
    top1, alive = _top1(logits)
    drafts = _drafts(draft_tokens, num_generations, max_draft_len)
    present = _present(drafts, draft_lens)
    if forced_matches is None:
        top1_rows = _generation_rows(top1, num_contexts, max_draft_len)[:, :max_draft_len]
        matches = present & (drafts == top1_rows)
    else:
        rows = _generation_rows(logits, num_contexts, max_draft_len)[:, :max_draft_len]
        matches = present & _present(drafts, forced_matches) & _possible(rows, drafts)
    accepted = _emit(top1, alive, drafts, matches, num_contexts, final_context, last_tokens)
    return accepted if out is None else out.fill(accepted)


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
    scratch: Any | None = None,  # noqa: ARG001
) -> RelaxedAccepted:
    """Relaxed acceptance while a request thinks, strict acceptance elsewhere.

    A thinking request accepts a draft among the ``topk`` most probable tokens of its row with
    p(draft) >= p_max - delta (fp32 softmax; equality qualifies, the top-1 always does). Stop ids
    and the two thinking tokens are accepted only as top-1. The phase follows every emitted token,
    so later rows of the same run already obey the new one. The bonus is the argmax.

    Args: as :func:`accept_strict`, and ``rule``, one row per request of the batch. ``scratch`` is
        ``RelaxedPartials.unwritten``.
    """
    num_generations = check_rows(
        logits, draft_tokens, num_contexts, max_draft_len, draft_lens, final_context
    )
    if out is not None:
        out.check(num_contexts, num_generations, max_draft_len, logits.device)
    top1, alive = _top1(logits)
    drafts = _drafts(draft_tokens, num_generations, max_draft_len)
    present = _present(drafts, draft_lens)
    rows = _generation_rows(logits, num_contexts, max_draft_len)[:, :max_draft_len]
    generations = slice(num_contexts, None)
    eligible, distance = _distances(rows, drafts, rule.topk[generations], rule.delta[generations])
    eligible &= ~_protected(drafts, rule, generations)
    top1_rows = _generation_rows(top1, num_contexts, max_draft_len)[:, :max_draft_len]
    # a row without any value has no top-1
    is_top1 = (drafts == top1_rows) & _generation_rows(alive, num_contexts, max_draft_len)[:, :-1]

    # the phase before row i depends on the drafts accepted before it
    thinking = rule.thinking[generations]
    running = torch.ones_like(thinking)
    matches = torch.zeros_like(is_top1)
    margin = torch.full_like(distance, torch.inf)
    for i in range(max_draft_len):
        running = running & present[:, i]
        by_distance = running & thinking & eligible[:, i] & ~is_top1[:, i]
        margin[:, i] = torch.where(by_distance, distance[:, i].abs(), margin[:, i])
        running = running & (is_top1[:, i] | (by_distance & (distance[:, i] >= 0)))
        matches[:, i] = running
        thinking = _next_phase(thinking, drafts[:, i], running, rule)

    accepted = _emit(top1, alive, drafts, matches, num_contexts, final_context, last_tokens)
    before = torch.cat([rule.thinking[:num_contexts], thinking])
    emitted_bonus = (accepted.num_accepted > 0) & (accepted.status == STATUS_OK)
    after = _next_phase(before, accepted.last_tokens(), emitted_bonus, rule)
    result = RelaxedAccepted(accepted, after, margin)
    return result if out is None else out.fill(result)


def _top1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of the highest value per row [rows] int64, and whether the row has any
    value."""
    usable = logits.masked_fill(torch.isnan(logits), -torch.inf)
    top1 = usable.argmax(dim=-1)
    return top1, usable.gather(1, top1.unsqueeze(1)).squeeze(1) > -torch.inf


def _generation_rows(rows: torch.Tensor, num_contexts: int, max_draft_len: int) -> torch.Tensor:
    """[C + G*(K+1), ...] -> [G, K+1, ...]."""
    per_generation: torch.Tensor = rows[num_contexts:].unflatten(0, (-1, max_draft_len + 1))
    return per_generation


def _drafts(draft_tokens: torch.Tensor, num_generations: int, max_draft_len: int) -> torch.Tensor:
    return draft_tokens.reshape(num_generations, max_draft_len).to(torch.int64)


def _present(drafts: torch.Tensor, draft_lens: torch.Tensor | None) -> torch.Tensor:
    if draft_lens is None:
        return torch.ones_like(drafts, dtype=torch.bool)
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    return columns < draft_lens.to(torch.int64).unsqueeze(1)


def _possible(rows: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Whether each draft is a token that its row does not mask; rows [G, K, V], [G, K] bool."""
    vocab = rows.shape[-1]
    value = rows.gather(-1, drafts.clamp(0, vocab - 1).unsqueeze(-1)).squeeze(-1)
    return (drafts >= 0) & (drafts < vocab) & (value > -torch.inf)


def _emit(
    top1: torch.Tensor,
    alive: torch.Tensor,
    drafts: torch.Tensor,
    matches: torch.Tensor,
    num_contexts: int,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
) -> Accepted:
    """Emit the longest prefix of matching drafts and the argmax of the row behind it."""
    num_generations, max_draft_len = drafts.shape
    width = max_draft_len + 1
    generation_alive = alive[num_contexts:].view(num_generations, width)
    # a dead row matches nothing, so the run ends before it
    matches = matches & generation_alive[:, :max_draft_len]
    num_matches = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
    bonus_row = num_matches.unsqueeze(1)
    bonus = top1[num_contexts:].view(num_generations, width).gather(1, bonus_row)
    has_bonus = generation_alive.gather(1, bonus_row).squeeze(1)

    columns = torch.arange(width, device=top1.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    generation_tokens = torch.where(columns < bonus_row, padded, bonus)
    generation_counts = num_matches + has_bonus

    context_alive = alive[:num_contexts]
    emits = context_alive if final_context is None else context_alive & final_context
    context_ok = context_alive if final_context is None else context_alive | ~final_context
    context_tokens = top1[:num_contexts].unsqueeze(1).expand(-1, width)

    tokens = torch.cat([context_tokens, generation_tokens])
    counts = torch.cat([emits.to(torch.int64), generation_counts])
    ok = torch.cat([context_ok, has_bonus])
    tokens = tokens.masked_fill(columns >= counts.unsqueeze(1), PAD_TOKEN)
    status = torch.where(ok, STATUS_OK, STATUS_NO_FINITE_LOGIT)
    accepted = Accepted(tokens.to(torch.int32), counts.to(torch.int32), status.to(torch.int32))
    if last_tokens is not None:
        last_tokens.copy_(accepted.last_tokens())
    return accepted


def _distances(
    rows: torch.Tensor, drafts: torch.Tensor, topk: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each draft has a value among its row's top-k, and p(draft) - (p_max - delta).

    rows [G, K, V], drafts [G, K], topk [G], delta [G] -> bool [G, K], float32 [G, K].
    """
    vocab = rows.shape[-1]
    values = rows.masked_fill(torch.isnan(rows), -torch.inf).to(torch.float32)
    in_vocab = (drafts >= 0) & (drafts < vocab)
    ids = drafts.clamp(0, vocab - 1).unsqueeze(-1)
    value = values.gather(-1, ids)
    all_ids = torch.arange(vocab, device=rows.device)
    ahead = (values > value) | ((values == value) & (all_ids < ids))
    in_topk = ahead.sum(dim=-1) < topk.to(torch.int64).unsqueeze(1)

    highest = values.amax(dim=-1, keepdim=True)
    # the maximum itself may be +inf: its distance to itself is zero, not NaN
    below = torch.where(values == highest, torch.zeros_like(values), values - highest)
    weights = below.exp()
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    p_draft = probabilities.gather(-1, ids).squeeze(-1)
    threshold = probabilities.amax(dim=-1) - delta.to(torch.float32).unsqueeze(1)
    masked = value.squeeze(-1) == -torch.inf
    return in_vocab & in_topk & ~masked, p_draft - threshold


def _protected(drafts: torch.Tensor, rule: RelaxedRule, generations: slice) -> torch.Tensor:
    """Drafts that only the strict rule may accept [G, K] bool."""
    protected = (drafts == rule.begin_token) | (drafts == rule.end_token)
    if rule.stop_ids is not None:
        stop_ids = rule.stop_ids[generations].to(torch.int64)
        protected |= (drafts.unsqueeze(-1) == stop_ids.unsqueeze(1)).any(dim=-1)
    return protected


def _next_phase(
    thinking: torch.Tensor, token: torch.Tensor, emitted: torch.Tensor, rule: RelaxedRule
) -> torch.Tensor:
    """The phase after ``token`` where it was emitted [R] bool."""
    begins = emitted & (token == rule.begin_token) & (token >= 0)
    ends = emitted & (token == rule.end_token) & (token >= 0)
    return (thinking | begins) & ~ends

"""Torch reference of `accept`."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtp_plugin.ops.acceptance.types import AcceptanceRules, RelaxedRule
from mtp_plugin.ops.logit_rows import GREEDY_BELOW, LogitRows, process_logits
from mtp_plugin.ops.step import (
    PAD_TOKEN,
    STATUS_NO_FINITE_LOGIT,
    STATUS_OK,
    Accepted,
    SlotRows,
    StepLayout,
)


def accept_reference(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules,
    *,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    first_rows: torch.Tensor | None,
    keeps_rows: bool,
    fills: torch.dtype | None,
) -> Accepted:
    if first_rows is not None and draft_lens is not None:
        rows = _uniform_rows(layout, first_rows, draft_lens)
        logits, rules = logits[rows], _of_rows(rules, rows)
    top1, alive = _top1(logits) if rules.choices is None else _target_tokens(rules.choices)
    if rules.processed_slots is not None and (
        rules.relaxed is not None or rules.forced_matches is not None
    ):
        logits = _edited(layout, logits, draft_tokens, rules.processed_slots)
    drafts = draft_tokens.reshape(layout.num_generations, layout.draft_len).to(torch.int64)
    present = _present(drafts, draft_lens)
    # a row without any value has no top-1
    is_top1 = (drafts == _draft_rows(top1, layout)) & _draft_rows(alive, layout)
    matches = present & is_top1
    forced = rules.forced_matches
    only = None if rules.forced_ids is None else _draft_rows(rules.forced_ids, layout)
    if forced is not None:
        possible = _possible(_draft_rows(logits, layout), drafts)
        if only is not None:
            possible = torch.where(only >= 0, drafts == only, possible)
        leading = present & _present(drafts, forced) & possible
        matches = torch.where((forced >= 0).unsqueeze(1), leading, matches)
    rule = rules.relaxed
    if rule is not None:
        thinking, delta = rule.phase(slice(0, layout.num_requests))
        near = _near(_draft_rows(logits, layout), drafts, delta, rule, layout)
        near &= present & ~is_top1
        if forced is not None:
            near &= (forced < 0).unsqueeze(1)
        if rules.choices is not None:
            near &= ~_has_temperature(rule, layout).unsqueeze(1)
        if only is not None:
            near &= only < 0
        matches, thinking = _follow_phase(matches, near, drafts, thinking, rule, layout)
    accepted = _emit(top1, alive, drafts, matches, layout.num_contexts, final_context)
    if last_tokens is not None:
        last_tokens.copy_(accepted.last_tokens())
    if rule is not None:
        emitted_bonus = (accepted.num_accepted > 0) & (accepted.status == STATUS_OK)
        thinking = _next_phase(thinking, accepted.last_tokens(), emitted_bonus, rule)
        rule.set_phase(slice(0, layout.num_requests), thinking, delta)
    if keeps_rows:
        accepted = _with_rows(accepted, layout, first_rows)
    if fills is not None:
        accepted = replace(accepted, tokens=accepted.tokens.clamp_min(0).to(fills))
    return accepted


def _with_rows(accepted: Accepted, layout: StepLayout, first_rows: torch.Tensor | None) -> Accepted:
    """Return the rows of the output tokens too, a token of every request, and 0 as padding."""
    counts, device = accepted.num_accepted.clamp_min(1), accepted.tokens.device
    if first_rows is None:
        requests = torch.arange(layout.num_requests, device=device)
        first_rows = requests + (requests - layout.num_contexts).clamp_min(0) * layout.draft_len
    columns = torch.arange(layout.step_rows, device=device)
    rows = (first_rows.unsqueeze(1) + columns).masked_fill(columns >= counts.unsqueeze(1), -1)
    tokens = accepted.tokens.clamp_min(0)
    return replace(accepted, tokens=tokens, num_accepted=counts, rows=rows.to(torch.int32))


def _uniform_rows(
    layout: StepLayout, first_rows: torch.Tensor, draft_lens: torch.Tensor
) -> torch.Tensor:
    """The row of every logit of a uniform step [C + G*(K+1)] int64.

    In place of rows that a generation lacks its last one is repeated; their drafts are absent.
    """
    first = first_rows.to(torch.int64)
    columns = torch.arange(layout.step_rows, device=first.device)
    lens = draft_lens.to(torch.int64).clamp(0, layout.draft_len).unsqueeze(1)
    generations = first[layout.num_contexts :].unsqueeze(1) + torch.minimum(columns, lens)
    return torch.cat([first[: layout.num_contexts], generations.reshape(-1)])


def _of_rows(rules: AcceptanceRules, rows: torch.Tensor) -> AcceptanceRules:
    choices, forced_ids = rules.choices, rules.forced_ids
    return replace(
        rules,
        choices=None if choices is None else choices[rows],
        forced_ids=None if forced_ids is None else forced_ids[rows],
    )


def _top1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of the highest value of every row [rows] int64, and whether it has any."""
    usable = logits.masked_fill(torch.isnan(logits), -torch.inf)
    top1 = usable.argmax(dim=-1)
    return top1, usable.gather(1, top1.unsqueeze(1)).squeeze(1) > -torch.inf


def _target_tokens(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_top1`, of target tokens [rows]."""
    return choices.to(torch.int64).clamp_min(0), choices >= 0


def _edited(
    layout: StepLayout, logits: torch.Tensor, draft_tokens: torch.Tensor, slots: SlotRows
) -> torch.Tensor:
    """Logits [rows, V] after logits processing, which depends on no position."""
    drafts = None
    if layout.draft_len > 0:
        drafts = draft_tokens.reshape(layout.num_generations, layout.draft_len)
    positions = torch.zeros_like(slots.of(slice(0, layout.num_requests)))
    rows = LogitRows(layout.num_contexts, layout.step_rows, positions, drafts=drafts)
    return process_logits(logits, rows, slots)


def _draft_rows(rows: torch.Tensor, layout: StepLayout) -> torch.Tensor:
    """The rows that verify a draft: [C + G*(K+1), ...] -> [G, K, ...]."""
    shape = (layout.num_generations, layout.step_rows)
    per_generation: torch.Tensor = rows[layout.num_contexts :].unflatten(0, shape)
    return per_generation[:, : layout.draft_len]


def _present(drafts: torch.Tensor, draft_lens: torch.Tensor | None) -> torch.Tensor:
    if draft_lens is None:
        return torch.ones_like(drafts, dtype=torch.bool)
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    return columns < draft_lens.to(torch.int64).unsqueeze(1)


def _possible(rows: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Whether each draft [G, K] is a token that its row [G, K, V] does not mask."""
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
) -> Accepted:
    """Output the longest prefix of matching drafts and the target token of the row after it."""
    num_generations, max_draft_len = drafts.shape
    width = max_draft_len + 1
    generation_alive = alive[num_contexts:].view(num_generations, width)
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
    return Accepted(tokens.to(torch.int32), counts.to(torch.int32), status.to(torch.int32))


def _follow_phase(
    matches: torch.Tensor,
    near: torch.Tensor,
    drafts: torch.Tensor,
    before: torch.Tensor,
    rule: RelaxedRule,
    layout: StepLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept ``near`` drafts too while the request is thinking.

    Args:
        matches: [G, K] bool: drafts that another rule accepts. near: [G, K] bool.
        before: [R] bool: whether each request is thinking before the step.

    Returns:
        Accepted drafts [G, K] bool, and whether each request is thinking after its drafts [R] bool.
    """
    thinking = before[layout.num_contexts :]
    running = torch.ones_like(thinking)
    accepted = torch.zeros_like(matches)
    # the phase before row i depends on the drafts accepted before it
    for i in range(layout.draft_len):
        running = running & (matches[:, i] | (thinking & near[:, i]))
        accepted[:, i] = running
        thinking = _next_phase(thinking, drafts[:, i], running, rule)
    return accepted, torch.cat([before[: layout.num_contexts], thinking])


def _has_temperature(rule: RelaxedRule, layout: StepLayout) -> torch.Tensor:
    """Whether each generation has a temperature [G] bool."""
    generations = slice(layout.num_contexts, layout.num_requests)
    return rule.slots.read("temperature", generations) >= GREEDY_BELOW


def _near(
    rows: torch.Tensor,
    drafts: torch.Tensor,
    delta: torch.Tensor,
    rule: RelaxedRule,
    layout: StepLayout,
) -> torch.Tensor:
    """Whether relaxed acceptance takes each draft in the thinking phase [G, K] bool; delta [R]."""
    generations = slice(layout.num_contexts, layout.num_requests)
    topk = rule.slots.read("relaxed_topk", generations)
    eligible, distance = _distances(rows, drafts, topk, delta[generations])
    return eligible & ~_protected(drafts, rule, generations) & (distance >= 0)


def _distances(
    rows: torch.Tensor, drafts: torch.Tensor, topk: torch.Tensor, delta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each draft is among its row's top-k, and p(draft) - (p_max - delta).

    rows [G, K, V], drafts [G, K], topk [G], delta [G] -> bool [G, K], float32 [G, K].
    """
    vocab = rows.shape[-1]
    values = rows.masked_fill(torch.isnan(rows), -torch.inf).to(torch.float32)
    in_vocab = (drafts >= 0) & (drafts < vocab)
    ids = drafts.clamp(0, vocab - 1).unsqueeze(-1)
    value = values.gather(-1, ids)
    all_ids = torch.arange(vocab, device=rows.device)
    better = (values > value) | ((values == value) & (all_ids < ids))
    in_topk = better.sum(dim=-1) < topk.to(torch.int64).unsqueeze(1)

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
    """Drafts that are accepted only as argmax [G, K] bool."""
    protected = (drafts == rule.begin_token) | (drafts == rule.end_token)
    stop_ids = rule.slots.read("stop_ids", generations).to(torch.int64)
    return protected | (drafts.unsqueeze(-1) == stop_ids.unsqueeze(1)).any(dim=-1)


def _next_phase(
    thinking: torch.Tensor, token: torch.Tensor, emitted: torch.Tensor, rule: RelaxedRule
) -> torch.Tensor:
    """The phase after ``token`` where it is an output token [R] bool."""
    begins = emitted & (token == rule.begin_token) & (token >= 0)
    ends = emitted & (token == rule.end_token) & (token >= 0)
    return (thinking | begins) & ~ends

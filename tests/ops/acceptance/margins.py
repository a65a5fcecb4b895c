"""How close a threshold decided, in plain torch, so that rows too close to call may be left out."""

from __future__ import annotations

import torch

from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule
from mtp_plugin.ops.step import StepLayout
from tests.ops.top_k.rows import best_ids, without_nan

CLOSE = 1e-5
"""Nearer than this to a threshold, two orders of summation may decide differently."""


def margins(
    layout: StepLayout,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rules: AcceptanceRules,
    draft_lens: torch.Tensor | None,
) -> torch.Tensor:
    """|p(draft) - (p_max - delta)| [G, K] where it decided about a draft, inf elsewhere."""
    margin = torch.full(drafts.shape, torch.inf, device=logits.device)
    rule, forced, only = rules.relaxed, rules.forced_matches, rules.forced_ids
    if rule is None or drafts.numel() == 0:
        return margin
    drafts = drafts.long()
    of_generations = logits[layout.num_contexts :]
    shape = (layout.num_generations, layout.step_rows)
    rows = without_nan(of_generations).float().unflatten(0, shape)[:, :-1]
    choices = (
        best_ids(of_generations) if rules.choices is None else rules.choices[layout.num_contexts :]
    )
    is_top1 = drafts == choices.view(shape)[:, :-1]
    is_top1 &= rows.amax(dim=-1) > -torch.inf
    generations = slice(layout.num_contexts, layout.num_requests)
    thinking, delta = rule.phase(generations)
    eligible, distance = _distances(rows, drafts, rule, delta, generations)
    if rules.choices is not None:
        eligible &= (rule.slots.read("temperature", generations) < 1e-5).unsqueeze(1)
    if only is not None:
        eligible &= only[layout.num_contexts :].view(shape)[:, :-1] < 0
    running = torch.ones_like(thinking)
    for i in range(layout.draft_len):
        if draft_lens is not None:
            running = running & (i < draft_lens)
        decided = running & thinking & eligible[:, i] & ~is_top1[:, i]
        margin[:, i] = torch.where(decided, distance[:, i].abs(), margin[:, i])
        running = running & (is_top1[:, i] | (decided & (distance[:, i] >= 0)))
        thinking = thinking | (running & (drafts[:, i] == rule.begin_token))
        thinking = thinking & ~(running & (drafts[:, i] == rule.end_token))
    if forced is None:
        return margin
    return margin.masked_fill((forced >= 0).unsqueeze(1), torch.inf)


def undecided(margin: torch.Tensor, rules: AcceptanceRules, layout: StepLayout) -> torch.Tensor:
    """Requests with a margin too small to call [R]; equal values at distance 0 are not close."""
    prompts = torch.zeros(layout.num_contexts, dtype=torch.bool, device=margin.device)
    close = margin < CLOSE
    if rules.relaxed is not None:
        _, delta = rules.relaxed.phase(slice(layout.num_contexts, layout.num_requests))
        no_distance = delta == 0
        close &= ~(no_distance.unsqueeze(1) & (margin == 0))
    return torch.cat([prompts, close.any(dim=1)])


def _distances(
    rows: torch.Tensor,
    drafts: torch.Tensor,
    rule: RelaxedRule,
    delta: torch.Tensor,
    generations: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a distance may decide, and p(draft) - (p_max - delta), both [G, K]."""
    vocab = rows.shape[-1]
    known = (drafts >= 0) & (drafts < vocab)
    ids = drafts.clamp(0, vocab - 1).unsqueeze(-1)
    value = rows.gather(-1, ids)
    all_ids = torch.arange(vocab, device=rows.device)
    ahead = (rows > value) | ((rows == value) & (all_ids < ids))
    eligible = known & (
        ahead.sum(dim=-1) < rule.slots.read("relaxed_topk", generations).unsqueeze(1)
    )
    eligible &= value.squeeze(-1) > -torch.inf
    eligible &= (drafts != rule.begin_token) & (drafts != rule.end_token)
    stops = rule.slots.read("stop_ids", generations).unsqueeze(1)
    eligible &= (drafts.unsqueeze(-1) != stops).all(dim=-1)
    highest = rows.amax(dim=-1, keepdim=True)
    weights = torch.where(rows == highest, 0.0, rows - highest).exp()
    probabilities = weights / weights.sum(dim=-1, keepdim=True)
    threshold = probabilities.amax(dim=-1) - delta.unsqueeze(1)
    return eligible, probabilities.gather(-1, ids).squeeze(-1) - threshold

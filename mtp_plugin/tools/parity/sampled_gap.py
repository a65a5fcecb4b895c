"""How far a row of logits is from sampling another token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_plugin.infer import SamplingRule


def gap_of_sampled_token(
    sampling: SamplingRule, logits: torch.Tensor, output: Sequence[int], token: int
) -> float:
    """Return the smallest score gap that must close for ``token`` to be sampled; 0.0 if it is.

    Scores are logits divided by the temperature. A token with a higher noisy score is overtaken
    when its lead closes, or when it falls out of the kept tokens, whichever is closer; a token that
    is truncated must in addition close its own distance to the kept tokens.

    Args:
        logits: the raw row [V] after ``output``.
    """
    scores = sampling.scaled(logits, output).double()
    margins = _margins(sampling, scores)
    is_kept = sampling.scores(logits, output) > -torch.inf
    noisy = scores + sampling.noise(output, len(scores))
    lead = noisy - noisy[token]
    in_the_way = torch.where(is_kept & (lead > 0), torch.minimum(lead, margins.abs()), 0.0)
    own = 0.0 if is_kept[token] else float(margins[token].abs())
    return max(float(in_the_way.max()), own)


def _margins(sampling: SamplingRule, scores: torch.Tensor) -> torch.Tensor:
    """[V] float64: distance of each id to the truncation threshold, negative if truncated."""
    params, size = sampling.params, len(scores)
    ordered, order = scores.sort(descending=True, stable=True)
    ranks = torch.arange(size)
    margins = torch.full_like(ordered, torch.inf)
    weights = ordered.exp()
    if params.top_k and params.top_k < size:
        last, following = ordered[params.top_k - 1 : params.top_k + 1]
        is_within = ranks < params.top_k
        margins = ordered - torch.where(is_within, following, last)
        weights = torch.where(is_within, weights, 0.0)
    if params.top_p is not None and params.top_p < 1:
        ahead = ((weights.cumsum(0) - weights) / weights.sum()).clamp(0, 1)
        margins = torch.minimum(margins, _margins_of_share(ordered, ahead, params.top_p))
    if params.min_p:
        margins = torch.minimum(margins, ordered - torch.tensor(params.min_p).log())
    margins = torch.where(ordered > -torch.inf, margins, -torch.inf)
    return torch.empty_like(scores).scatter(0, order, margins)


def _margins_of_share(ordered: torch.Tensor, ahead: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the distances [V] to the top-p threshold.

    A score crosses the threshold when it reaches another rank and that rank crosses: the log-odds
    of the probability mass before a rank change by as much as scores do, so both gaps compare.

    Args:
        ordered: scores in descending order.
        ahead: share of the probability mass before each.
    """
    limit = torch.tensor(top_p).double()
    rest = limit.logit() - ahead.logit()  # of the rank: decreasing, negative if truncated
    # the first rank with a larger distance by score than by mass
    rank = torch.searchsorted(-(ordered + rest), -ordered)
    following, before = rank.clamp(max=len(ordered) - 1), (rank - 1).clamp(min=0)
    way = torch.where(rank < len(ordered), ordered - ordered[following], torch.inf)
    inside = torch.minimum(way, rest[before])
    outside = torch.maximum(rest[following], ordered - ordered[before])
    return torch.where(ahead < limit, inside, outside)

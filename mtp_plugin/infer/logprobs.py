"""Log-probabilities of a row of logits; told are those of the model's own, before a request's
options change them, or of what these leave."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Logprobs(NamedTuple):
    """What is told of one token."""

    logprob: float
    top: dict[int, float]
    """The most likely ids, the likeliest first, the lowest first of equals."""


def logprobs_of(logits: torch.Tensor, token: int, num_top: int) -> Logprobs:
    """Log-probabilities of a token, and of the most likely ones, under a row [V]."""
    logprobs = raw_logprobs(logits)
    ids = usable(logits).sort(descending=True, stable=True).indices[:num_top].tolist()
    return Logprobs(float(logprobs[token]), {one: float(logprobs[one]) for one in ids})


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [V] float32 of a raw row [V]; NaN counts as -inf, and of a row with +inf
    the lowest such id is certain."""
    values = usable(logits)
    highest = values.max()
    if highest == -torch.inf:
        return values
    if highest == torch.inf:
        certain = torch.full_like(values, -torch.inf)
        certain[values.argmax()] = 0.0
        return certain
    return values.log_softmax(dim=0)


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Logits [...] in float32 on the CPU, where one rounding is as good as another; NaN as -inf."""
    values = logits.detach().to("cpu", torch.float32)
    return values.masked_fill(values.isnan(), -torch.inf)

"""Log-probabilities of a row of logits, raw or processed by the request's options."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ReferenceLogprobs(NamedTuple):
    """Log-probability of a token and of the top-k tokens."""

    logprob: float
    top: dict[int, float]
    """Top-k token ids by descending log-probability, ties by ascending id."""


def logprobs_of(logits: torch.Tensor, token: int, num_top: int) -> ReferenceLogprobs:
    """Return the log-probabilities of a token and of the top-k tokens under a row [V]."""
    logprobs = raw_logprobs(logits)
    ids = usable(logits).sort(descending=True, stable=True).indices[:num_top].tolist()
    return ReferenceLogprobs(float(logprobs[token]), {one: float(logprobs[one]) for one in ids})


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [V] float32 of a raw row [V]; NaN counts as -inf, and in a row
    with +inf the lowest such id has probability 1."""
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
    """Return logits [...] in float32 on the CPU, with NaN as -inf."""
    values = logits.detach().to("cpu", torch.float32)
    return values.masked_fill(values.isnan(), -torch.inf)

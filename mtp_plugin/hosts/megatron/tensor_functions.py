"""Functions of tensors that Megatron's controller has as methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_plugin.errors import RequestError, format_value
from mtp_plugin.hosts.megatron.sampling_params import range_problems

Bucket = tuple[Sequence[int], float, int, float]
"""Requests that share (temperature, top_k, top_p), by their index in the batch."""


def sample(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    *,
    rng: torch.Generator,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Sample one token per row of logits [N, V], as Megatron's ``TorchSampling`` does.

    ``top_k=1`` is greedy; ``top_k=0`` and ``top_p=0.0`` are off.

    Raises:
        RequestError: a value out of range, or both truncations.
    """
    check_truncation(temperature, top_k, top_p, logits.shape[-1])
    if top_k == 1:
        return logits.argmax(-1)
    if temperature == 0:
        raise RequestError("temperature: expected > 0 unless top_k=1 (greedy), got 0")
    scores = logits / temperature
    if top_k > 1:
        kth = scores.topk(top_k).values[..., -1, None]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    elif top_p > 0:
        ordered, order = scores.sort(descending=True)
        cumulative = ordered.softmax(-1).cumsum(-1)
        outside = cumulative.roll(1, -1) > top_p  # the token that reaches top_p is kept
        outside[..., 0] = False
        scores = scores.masked_fill(outside.scatter(1, order, outside), float("-inf"))
    tokens = torch.multinomial(scores.softmax(-1), 1, generator=rng).view(-1)
    return tokens if vocab_size is None else tokens.clamp(max=vocab_size - 1)


def check_truncation(
    temperature: float, top_k: int, top_p: float, vocab_size: int | None = None
) -> None:
    """Check sampling parameters.

    Args:
        vocab_size: None: ``top_k`` has no maximum.

    Raises:
        RequestError: lists every value out of range, or both truncations.
    """
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    problems = range_problems(values, required=values)
    if problems:
        raise RequestError("; ".join(problems))
    if top_k > 0 and top_p:
        raise RequestError(f"expected top_k or top_p, got top_k={top_k} and top_p={top_p}")
    if vocab_size is not None and top_k > vocab_size:
        raise RequestError(
            f"top_k: expected 0 (off) to {vocab_size}, the vocabulary, got {format_value(top_k)}"
        )


def sample_buckets(
    logits: torch.Tensor,
    request_of_row: torch.Tensor,
    buckets: Sequence[Bucket],
    rng: torch.Generator,
) -> torch.Tensor:
    """Sample the rows of logits [N, V] of each bucket; ``request_of_row`` is [N].

    Raises:
        RequestError: a request is in no bucket.
    """
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
    for requests, temperature, top_k, top_p in buckets:
        members = torch.tensor(list(requests), device=logits.device)
        rows = torch.isin(request_of_row, members).nonzero().squeeze(1)
        tokens[rows] = sample(logits[rows], temperature, top_k, top_p, rng=rng)
    if bool((tokens < 0).any()):
        missing = request_of_row[tokens < 0].unique().tolist()
        raise RequestError(
            f"sampling buckets: expected every request in one, {missing} are in none"
        )
    return tokens


def make_buckets(params: Sequence[tuple[float, int, float]]) -> list[Bucket]:
    """Group requests by (temperature, top_k, top_p)."""
    grouped: dict[tuple[float, int, float], list[int]] = {}
    for index, each in enumerate(params):
        grouped.setdefault(each, []).append(index)
    return [(indices, *each) for each, indices in grouped.items()]

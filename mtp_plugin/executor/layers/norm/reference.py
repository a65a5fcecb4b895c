"""The norms in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As at the door, and of tensors of any rank."""
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As at the door."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def join_norms(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    *,
    embedding_eps: float,
    hidden_eps: float,
    embedding_first: bool,
) -> torch.Tensor:
    """As at the door."""
    embedded = embedding if ids is None else functional.embedding(ids, embedding)
    halves = [
        rms_norm(embedded, embedding_weight, embedding_eps),
        rms_norm(hidden, hidden_weight, hidden_eps),
    ]
    return torch.cat(halves if embedding_first else halves[::-1], dim=-1)

"""The norms in torch, in the words of transformers' RMSNorm classes."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows over their root mean square, in fp32, cast to the dtype of ``x``, times the weight.

    Args:
        x: [T, width]. weight: [width]. eps: added to the mean square.

    Returns:
        [T, width].
    """
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual plus ``x``, normed, and the sum itself, [T, width] each."""
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
    """What the joining projection of an MTP layer reads: two normed halves side by side.

    Args:
        embedding: [V, width], or [T, width] where ``ids`` is None.
        ids: [T], rows of ``embedding``; any stride.
        hidden: [T, width].
        embedding_weight, hidden_weight: [width].
        embedding_first: order of the halves.

    Returns:
        [T, 2 * width].
    """
    embedded = embedding if ids is None else functional.embedding(ids, embedding)
    halves = [
        rms_norm(embedded, embedding_weight, embedding_eps),
        rms_norm(hidden, hidden_weight, hidden_eps),
    ]
    return torch.cat(halves if embedding_first else halves[::-1], dim=-1)

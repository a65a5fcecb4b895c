"""Bitwise equality, also of NaN."""

from __future__ import annotations

import torch


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, type and every bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # a clone, since one element with a stride counts as contiguous
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

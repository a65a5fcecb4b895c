"""The gated activation in torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded to the dtype after each of both steps.

    Args:
        gate_up: [T, 2 * width], gates first.

    Returns:
        [T, width].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up

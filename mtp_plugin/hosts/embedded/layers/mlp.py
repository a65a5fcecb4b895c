"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, expect_tensor


def silu_mul(gate_up: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """Compute silu(gate) * up, rounded to the dtype after each of the two steps.

    Args:
        gate_up: [T, 2 * width] with contiguous rows, gates first.

    Returns:
        [T, width].
    """
    expect_tensor("gate_up", gate_up, dtype=FLOATS, shape=("T", "2 * width"), contiguous="rows")
    if gate_up.shape[1] % 2:
        raise TensorContractError(
            f"gate_up: expected an even number of columns, got {list(gate_up.shape)}"
        )
    return backend.dispatch(silu_mul_reference)(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up

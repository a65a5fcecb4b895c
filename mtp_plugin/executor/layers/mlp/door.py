"""The door of the gated activation."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.mlp import reference
from mtp_plugin.kernels.backend import Backend


def silu_mul(gate_up: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """silu(gate) * up, rounded to the dtype after each of both steps.

    Args:
        gate_up: [T, 2 * width] with contiguous rows, gates first.

    Returns:
        [T, width].

    Raises:
        TensorContractError: rows of another shape or with gaps.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0 or gate_up.stride(1) != 1:
        raise TensorContractError(
            f"gate_up: expected [T, 2 * width] with contiguous rows, got {list(gate_up.shape)} "
            f"with strides {list(gate_up.stride())}"
        )
    return _side(backend).silu_mul(gate_up)


class _Side(Protocol):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.executor.layers.mlp import launch

    return launch

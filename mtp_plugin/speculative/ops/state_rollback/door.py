"""The door of the state rollback.

L layers, M state slots, N requests, S drafts behind the base token of a decode request.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.state_rollback import reference

INDEX_DTYPES = (torch.int32, torch.int64)


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    *,
    backend: Backend,
) -> None:
    """Set the state of every decode request to the one after its last accepted token, in place.

    A step over the base token ``a`` and drafts ``b c d`` leaves the states after ``a``, ``ab``,
    ``abc`` and ``abcd``; with ``b`` accepted alone the request goes on from the state after
    ``ab``: ``current[layer, slot] = intermediate[layer, slot, accepted]``.

    Prefill requests, rows with a slot outside 0..M-1 or a count outside 0..S, and slots and layers
    that no row names stay as they are. Decode rows that share a slot have to share the count.

    Args:
        intermediate_states: [L, M, S+1, ...] any dtype and any state shape. The kernel needs each
            state in one piece (dense trailing dimensions), here and in ``current_states``.
        current_states: [L, M, ...] of the same dtype, written.
        prefill_status: [N] int32, int64 or bool, 0 for a decode request.
        state_idx: [>= N] int32 or int64, the slot of a request.
        accepted_counts: [>= N] int32 or int64, accepted drafts.
        num_layers: how many of the layers are copied.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device.

    Source: Megatron-LM, ``mtp_utils_pytorch``.
    """
    rows = (prefill_status, state_idx, accepted_counts)
    num_requests = _check(intermediate_states, current_states, *rows, num_layers)
    if num_requests > 0 and num_layers > 0 and current_states.numel() > 0:
        _side(backend).mamba_state_selective_copy(
            intermediate_states, current_states, *rows, num_layers, num_requests=num_requests
        )


class _Side(Protocol):
    def mamba_state_selective_copy(
        self,
        intermediate_states: torch.Tensor,
        current_states: torch.Tensor,
        prefill_status: torch.Tensor,
        state_idx: torch.Tensor,
        accepted_counts: torch.Tensor,
        num_layers: int,
        *,
        num_requests: int,
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.state_rollback import launch

    return launch


def _check(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
) -> int:
    """Check one call and return N, the length of ``prefill_status``."""
    device = current_states.device
    shape = tuple(intermediate_states.shape)
    fits = len(shape) >= 3 and shape[2] >= 1 and intermediate_states.device == device
    if not fits:
        raise TensorContractError(
            f"intermediate_states: expected [L, M, S+1, ...] on {device}, got {list(shape)} on "
            f"{intermediate_states.device}"
        )
    alike = tuple(current_states.shape[1:]) == (shape[1], *shape[3:])
    if not (alike and current_states.dtype == intermediate_states.dtype):
        raise TensorContractError(
            f"current_states: expected {intermediate_states.dtype} "
            f"{['L', shape[1], *shape[3:]]}, got {current_states.dtype} "
            f"{list(current_states.shape)}"
        )
    most = min(shape[0], current_states.shape[0])
    if not 0 <= num_layers <= most:
        raise TensorContractError(
            f"num_layers: expected 0..{most}, the layers of both states, got {num_layers}"
        )
    num_requests = prefill_status.shape[0] if prefill_status.dim() == 1 else 0
    for name, tensor in (
        ("prefill_status", prefill_status),
        ("state_idx", state_idx),
        ("accepted_counts", accepted_counts),
    ):
        fits = tensor.dim() == 1 and tensor.shape[0] >= num_requests and tensor.is_contiguous()
        is_flag = tensor is prefill_status and tensor.dtype == torch.bool
        typed = tensor.dtype in INDEX_DTYPES or is_flag
        if not (fits and typed and tensor.device == device):
            raise TensorContractError(
                f"{name}: expected a contiguous int32 or int64 vector of at least {num_requests} "
                f"entries on {device}, got {tensor.dtype} {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} on {tensor.device}"
            )
    return num_requests

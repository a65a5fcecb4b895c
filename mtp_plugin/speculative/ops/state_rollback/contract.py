"""The checks at the door of the state rollback.

L layers, M state slots, N requests, S drafts behind the base token of a decode request.
"""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError

INDEX_DTYPES = (torch.int32, torch.int64)


def check_states(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
) -> int:
    """Check one call and return N, the length of ``prefill_status``.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
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

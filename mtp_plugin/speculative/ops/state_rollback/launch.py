"""The state rollback on the device, in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.state_rollback.kernel import _mamba_state_selective_copy_kernel

# states are copied as words; from 4 bytes on neighbouring words share one 16-byte access
_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
_CHUNK_BYTES = 4 * 1024
_WARPS = 4
"""A thread moves 32 bytes: best of the sizes from 1 to 16 KiB and 1 to 16 warps measured."""


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    *,
    num_requests: int,
) -> None:
    """As at the door, in one launch."""
    _expect_dense("intermediate_states", intermediate_states, 3)
    _expect_dense("current_states", current_states, 2)
    expect_reachable(_mamba_state_selective_copy_kernel, "current_states", current_states)

    item = current_states.element_size()
    state_bytes = math.prod(current_states.shape[2:]) * item
    intermediate_strides = [stride * item for stride in intermediate_states.stride()[:3]]
    current_strides = [stride * item for stride in current_states.stride()[:2]]
    bounds = (
        state_bytes,
        *intermediate_strides,
        *current_strides,
        intermediate_states.data_ptr(),
        current_states.data_ptr(),
    )
    word = next(size for size in _WORDS if all(bound % size == 0 for bound in bounds))
    words = min(triton.next_power_of_2(state_bytes), _CHUNK_BYTES) // word
    num_chunks = triton.cdiv(state_bytes // word, words)
    _mamba_state_selective_copy_kernel[(num_chunks * num_requests, num_layers)](
        intermediate_ptr=triton.reinterpret(intermediate_states, _WORDS[word]),
        current_ptr=triton.reinterpret(current_states, _WORDS[word]),
        prefill_status_ptr=prefill_status,
        state_idx_ptr=state_idx,
        accepted_counts_ptr=accepted_counts,
        intermediate_layer_stride=intermediate_strides[0] // word,
        intermediate_slot_stride=intermediate_strides[1] // word,
        intermediate_count_stride=intermediate_strides[2] // word,
        current_layer_stride=current_strides[0] // word,
        current_slot_stride=current_strides[1] // word,
        state_words=state_bytes // word,
        num_chunks=num_chunks,
        num_slots=intermediate_states.shape[1],
        num_counts=intermediate_states.shape[2],
        WORDS=words,
        num_warps=_WARPS,
        **pdl_options(current_states.device),
    )


def _expect_dense(name: str, states: torch.Tensor, leading: int) -> None:
    """Each state in one piece, whatever lies between two states."""
    stride = 1
    for size, step in zip(
        reversed(states.shape[leading:]), reversed(states.stride()[leading:]), strict=True
    ):
        expect(
            size == 1 or step == stride,
            TensorContractError,
            f"{name}: expected states of dense dimensions {list(states.shape[leading:])}, got "
            f"strides {list(states.stride()[leading:])}",
        )
        stride *= size

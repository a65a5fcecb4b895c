"""Triton implementation of `state_rollback`, in one launch.

States are dense, so a state of any shape and dtype is copied as a vector of words: integers of 4, 2
or 1 bytes, the widest that all sizes, strides and addresses are multiples of.

1. Grid (chunks of a state x N requests, layers): one program per chunk of WORDS words of a
   request's state in a layer. Neighbouring programs access neighbouring memory.
2. Load the request's prefill status, slot and accepted count.
3. A decode request whose slot and count are in range copies its chunk of ``intermediate[layer,
   slot, count]`` to ``current[layer, slot]``. All other rows (prefill requests, and padding with a
   slot of -1) write nothing.

No program reads what another one writes. Two decode rows with one slot have the same count, so they
write the same values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

# states are copied as words; with 4 bytes or more, neighbouring words share one 16-byte access
_WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
_CHUNK_BYTES = 4 * 1024
_WARPS = 4
"""A thread moves 32 bytes: the best of the sizes from 1 to 16 KiB and 1 to 16 warps measured."""


@triton.jit
def _mamba_state_selective_copy_kernel(
    # inputs
    intermediate_ptr,  # [L, M, num_counts, state_words], words as in `_WORDS`
    # output
    current_ptr,  # [L, M, state_words], words as in `_WORDS`
    # inputs
    prefill_status_ptr,  # [N] int32, int64 or bool: 0 for a decode request
    state_idx_ptr,  # [>= N] int32 or int64: the slot of a request
    accepted_counts_ptr,  # [>= N] int32 or int64: accepted drafts
    # sizes in words
    intermediate_layer_stride,
    intermediate_slot_stride,
    intermediate_count_stride,
    current_layer_stride,
    current_slot_stride,
    state_words,  # of a state
    # other sizes
    num_chunks,  # of a state
    num_slots,  # M
    num_counts,  # S+1
    # constants
    WORDS: tl.constexpr,  # of a chunk
    PDL: tl.constexpr,
):
    """One program per chunk of a request's state in a layer: copy it if it rolls back."""
    grid_dependency_synchronize(PDL)
    chunk = tl.program_id(0) % num_chunks
    request = tl.program_id(0) // num_chunks
    layer = tl.program_id(1).to(tl.int64)
    status = tl.load(prefill_status_ptr + request).to(tl.int64)
    slot = tl.load(state_idx_ptr + request).to(tl.int64)
    count = tl.load(accepted_counts_ptr + request).to(tl.int64)
    in_range = (slot >= 0) & (slot < num_slots) & (count >= 0) & (count < num_counts)
    if (status == 0) & in_range:
        source_ptr = (
            intermediate_ptr
            + layer * intermediate_layer_stride
            + slot * intermediate_slot_stride
            + count * intermediate_count_stride
        )
        target_ptr = current_ptr + layer * current_layer_stride + slot * current_slot_stride
        words = chunk.to(tl.int64) * WORDS + tl.arange(0, WORDS)
        inside = words < state_words
        # intermediate states are not read again, the others only a step later
        state = tl.load(source_ptr + words, mask=inside, eviction_policy="evict_first")
        tl.store(target_ptr + words, state, mask=inside, eviction_policy="evict_first")


def mamba_state_selective_copy_triton(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
) -> None:
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
    _mamba_state_selective_copy_kernel[(num_chunks * prefill_status.shape[0], num_layers)](
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
    """Check that each state is dense; there may be gaps between states."""
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

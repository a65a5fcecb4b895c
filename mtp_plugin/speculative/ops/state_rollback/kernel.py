"""Device code of the state rollback."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def _mamba_state_selective_copy_kernel(
    intermediate_ptr,  # [L, M, num_counts, state_words]
    current_ptr,  # [L, M, state_words]
    prefill_status_ptr,  # [N]
    state_idx_ptr,  # [N]
    accepted_counts_ptr,  # [N]
    # in words
    intermediate_layer_stride,
    intermediate_slot_stride,
    intermediate_count_stride,
    current_layer_stride,
    current_slot_stride,
    state_words,
    num_chunks,
    num_slots,
    num_counts,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    grid_dependency_synchronize(PDL)
    # one program per chunk of a request's state in a layer, neighbours in neighbouring memory
    chunk = tl.program_id(0) % num_chunks
    request = tl.program_id(0) // num_chunks
    layer = tl.program_id(1).to(tl.int64)
    status = tl.load(prefill_status_ptr + request).to(tl.int32)
    slot = tl.load(state_idx_ptr + request).to(tl.int64)
    count = tl.load(accepted_counts_ptr + request).to(tl.int64)
    named = (slot >= 0) & (slot < num_slots) & (count >= 0) & (count < num_counts)
    if (status == 0) & named:
        source = (
            intermediate_ptr
            + layer * intermediate_layer_stride
            + slot * intermediate_slot_stride
            + count * intermediate_count_stride
        )
        target = current_ptr + layer * current_layer_stride + slot * current_slot_stride
        word = chunk.to(tl.int64) * WORDS + tl.arange(0, WORDS)
        inside = word < state_words
        # the intermediate states are dead after this read, the others read a step later
        state = tl.load(source + word, mask=inside, eviction_policy="evict_first")
        tl.store(target + word, state, mask=inside, eviction_policy="evict_first")

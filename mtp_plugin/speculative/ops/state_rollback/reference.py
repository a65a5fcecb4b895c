"""The state rollback in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.ops.state_rollback.contract import check_states


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
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
    num_requests = check_states(
        intermediate_states,
        current_states,
        prefill_status,
        state_idx,
        accepted_counts,
        num_layers,
    )
    num_slots, num_counts = intermediate_states.shape[1:3]
    if num_requests == 0 or num_slots == 0:
        return
    slots = state_idx[:num_requests].to(torch.int64)
    counts = accepted_counts[:num_requests].to(torch.int64)
    named = (slots >= 0) & (slots < num_slots)
    copied = named & (prefill_status == 0) & (counts >= 0) & (counts < num_counts)

    # by slot, so that rows that copy nothing cannot undo what another row of the slot copied
    count_of_slot = torch.full((num_slots + 1,), -1, device=slots.device)
    count_of_slot.scatter_(0, torch.where(copied, slots, num_slots), counts)
    slots = torch.where(named, slots, 0)
    count = count_of_slot[slots]

    # as bytes: not every dtype can be selected from
    current = _bytes(current_states)
    after = _bytes(intermediate_states)[:num_layers, slots, count.clamp_min(0)]
    before = current[:num_layers, slots]
    copies = (count >= 0).view(-1, *(1,) * (current.dim() - 2))
    current[:num_layers, slots] = torch.where(copies, after, before)


def _bytes(states: torch.Tensor) -> torch.Tensor:
    """A view of the same memory with one more dimension: the bytes of an element."""
    return states.unsqueeze(-1).view(torch.uint8)

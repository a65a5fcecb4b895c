"""The state rollback in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch


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
    """As at the door."""
    num_slots, num_counts = intermediate_states.shape[1:3]
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

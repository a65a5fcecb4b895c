"""Roll recurrent states back to the last accepted token."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import AtLeast, expect_tensor

INDEX_DTYPES = frozenset({torch.int32, torch.int64})


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    *,
    backend: Backend | str = "auto",
) -> None:
    """Set the state of every decode request to the one after its last accepted token, in place.

    A step over the base token ``a`` and drafts ``b c d`` leaves the states after ``a``, ``ab``,
    ``abc`` and ``abcd``; if only ``b`` is accepted, the request continues from the state after
    ``ab``: ``current[layer, slot] = intermediate[layer, slot, accepted]``.

    Prefill requests, rows with a slot outside 0..M-1 or a count outside 0..S, and slots and layers
    that no row names do not change. Decode rows that share a slot must have the same count.

    Args:
        intermediate_states: [L, M, S+1, ...] any dtype and state shape: L layers, M slots, S drafts
            per request. The kernel needs dense trailing dimensions, also in ``current_states``.
        current_states: [L, M, ...] of the same dtype, written.
        prefill_status: [N] int32, int64 or bool, 0 for a decode request.
        state_idx: [>= N] int32 or int64, the slot of a request.
        accepted_counts: [>= N] int32 or int64, accepted drafts.
        num_layers: how many of the layers are copied.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or a number of
            layers out of range.

    Source: Megatron-LM, ``mtp_utils_pytorch``.
    """
    current = expect_tensor("current_states", current_states)
    device = current.device
    states = expect_tensor("intermediate_states", intermediate_states, device=device)
    if states.dim() < 3 or states.shape[2] < 1:
        raise TensorContractError(
            f"intermediate_states: expected [L, M, S+1, ...], got {list(states.shape)}"
        )
    shape = ("L", int(states.shape[1]), *states.shape[3:])
    expect_tensor("current_states", current, dtype=states.dtype, shape=shape)
    expect_int("num_layers", num_layers, 0, min(states.shape[0], current.shape[0]))
    rows = ("N",)
    flags = INDEX_DTYPES | {torch.bool}
    expect_tensor(
        "prefill_status", prefill_status, dtype=flags, shape=rows, device=device, contiguous=True
    )
    num_requests = int(prefill_status.shape[0])
    for name, tensor in (("state_idx", state_idx), ("accepted_counts", accepted_counts)):
        expect_tensor(
            name,
            tensor,
            dtype=INDEX_DTYPES,
            shape=(AtLeast(num_requests),),
            device=device,
            contiguous=True,
        )
    if num_requests > 0 and num_layers > 0 and current.numel() > 0:
        backend = Backend.of(backend, device, "backend")
        backend.dispatch(mamba_state_selective_copy_reference)(
            states, current, prefill_status, state_idx, accepted_counts, num_layers
        )


def mamba_state_selective_copy_reference(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
) -> None:
    num_requests = prefill_status.shape[0]
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

    # as bytes: not every dtype supports indexing
    current = _bytes(current_states)
    after = _bytes(intermediate_states)[:num_layers, slots, count.clamp_min(0)]
    before = current[:num_layers, slots]
    copies = (count >= 0).view(-1, *(1,) * (current.dim() - 2))
    current[:num_layers, slots] = torch.where(copies, after, before)


def _bytes(states: torch.Tensor) -> torch.Tensor:
    """Return a view with one more dimension: the bytes of an element."""
    return states.unsqueeze(-1).view(torch.uint8)

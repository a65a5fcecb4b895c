"""Grid of the kernel that moves state windows on: one launch per depth."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.draft import reference
from mtp_plugin.speculative.ops.draft.states_kernel import place_states_kernel

APART, SHARED, COLUMNS = 32, 256, 64
"""Requests and columns that a program holds at a time: where outputs have memory of their own, and
where every program goes through all requests, chunk after chunk."""


def place_last_states(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    """As the reference; ``last_rows`` rise, as those of sequences that lie one behind the other.

    Raises:
        TensorContractError: states, outputs or rows of shapes that do not fit.
    """
    expect(
        states.dim() == 2 and outputs.dim() == 2 and states.shape[1] == outputs.shape[1],
        TensorContractError,
        f"outputs: expected [T', H] for states {list(states.shape)}, got {list(outputs.shape)}",
    )
    expect(
        last_rows.dim() == 1,
        TensorContractError,
        f"last_rows: expected a vector, got {list(last_rows.shape)}",
    )
    expect_reachable(place_states_kernel, "states", states)
    requests, hidden = last_rows.shape[0], states.shape[1]
    if requests == 0 or hidden == 0:
        return
    shares = _share_memory(states, outputs)
    if (shares and not _is_window(states, outputs, offset)) or not _has_plain_rows(states, outputs):
        reference.place_last_states(states, outputs, last_rows, offset)
        return
    rows = min(SHARED if shares else APART, triton.next_power_of_2(requests))
    chunks = triton.cdiv(requests, rows)
    block = min(COLUMNS, triton.next_power_of_2(hidden))
    # chunk after chunk it runs long enough that an overlapping launch costs more than it saves
    timing = {"PDL": False} if shares else pdl_options(states.device)
    place_states_kernel[(triton.cdiv(hidden, block), 1 if shares else chunks)](
        # inputs
        outputs,
        last_rows.contiguous(),
        # outputs
        states,
        # sizes
        requests,
        hidden,
        outputs.stride(0),
        states.stride(0),
        offset,
        chunks if shares else 1,
        # constants
        REQUESTS=rows,
        BLOCK=block,
        num_warps=8,
        **timing,
    )


def _share_memory(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    return states.untyped_storage().data_ptr() == outputs.untyped_storage().data_ptr()


def _is_window(states: torch.Tensor, outputs: torch.Tensor, offset: int) -> bool:
    """Whether ``outputs`` are rows of ``states`` from at most row ``offset`` on."""
    ahead = outputs.storage_offset() - states.storage_offset()
    return (
        outputs.dtype == states.dtype
        and outputs.stride() == states.stride()
        and ahead % states.stride(0) == 0
        and 0 <= ahead // states.stride(0) <= offset
    )


def _has_plain_rows(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Whether both are rows of neighbouring elements, and no two rows of states are one."""
    return states.stride(1) == outputs.stride(1) == 1 and states.stride(0) >= states.shape[1]

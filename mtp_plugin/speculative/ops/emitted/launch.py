"""Launch of what follows from emitted tokens."""

from __future__ import annotations

import triton

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.emitted.kernel import note_kernel
from mtp_plugin.speculative.step import Accepted, SlotRows


def note_emitted(accepted: Accepted, slots: SlotRows) -> None:
    """As at the door."""
    tokens, pools = accepted.tokens, slots.pools
    if pools is None:
        raise TensorContractError("note_emitted: expected slots with pools, got None")
    expect_reachable(note_kernel, "tokens", tokens)
    requests, width = tokens.shape
    note_kernel[(requests,)](
        # inputs
        tokens,
        accepted.num_accepted,
        slots.slot_ids,
        # read, and moved on
        slots.table,
        pools.counts,
        pools.seen,
        # sizes
        tokens.stride(0),
        accepted.num_accepted.stride(0),
        slots.slot_ids.stride(0),
        slots.table.stride(0),
        pools.vocab_size,
        # constants
        COLUMNS=triton.next_power_of_2(width),
        LENGTH=slots.columns["recent"].width,
        num_warps=1,
        **pdl_options(tokens.device),
    )

"""Launch of what follows from emitted tokens."""

from __future__ import annotations

import triton

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.requests.options import MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.emitted.kernel import note_kernel
from mtp_plugin.speculative.step import Accepted, SlotRows


def note_emitted(accepted: Accepted, slots: SlotRows, rows: DrawnRows | None) -> None:
    """As at the door; ``rows``: that propose the first drafts behind."""
    tokens, pools, bans = accepted.tokens, slots.pools, slots.bans
    positions = None if rows is None or bans is None else rows.positions
    if pools is None:
        raise TensorContractError("note_emitted: expected slots with pools, got None")
    expect_reachable(note_kernel, "tokens", tokens)
    requests, width = tokens.shape
    note_kernel[(requests,)](
        # inputs
        tokens,
        accepted.num_accepted,
        slots.slot_ids,
        tokens if positions is None else positions,  # what is not there is never read
        pools.words,
        # read, and moved on
        slots.table,
        pools.counts,
        pools.seen,
        tokens if bans is None else bans.allowed,
        tokens if bans is None else bans.hidden,
        # sizes
        tokens.stride(0),
        accepted.num_accepted.stride(0),
        slots.slot_ids.stride(0),
        slots.table.stride(0),
        0 if positions is None else positions.stride(0),
        pools.vocab_size,
        # constants
        COLUMNS=triton.next_power_of_2(width),
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        HAS_BANS=positions is not None,
        LENGTH=slots.columns["recent"].width,
        num_warps=1,
        **pdl_options(tokens.device),
    )

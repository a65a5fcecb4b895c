"""Grids of the masking kernels: two launches around what reads the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.ops.logits.kernel import hide_kernel, restore_kernel
from mtp_plugin.speculative.step import SlotRows

KEPT = MAX_STOP_IDS + MAX_BAD_WORDS
"""Entries of a row that are kept aside at most."""


@contextmanager
def banned_masked(logits: torch.Tensor, rows: DrawnRows, slots: SlotRows) -> Iterator[torch.Tensor]:
    """As at the door, in place: a copy would cost more than all of acceptance.

    The few masked entries are kept aside and put back on exit, bit for bit.
    """
    expect_reachable(hide_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1 or (num_rows > 1 and logits.stride(0) < vocab):
        # rows that share memory cannot be masked each for itself
        with reference.banned_masked(logits, rows, slots) as masked:
            yield masked
        return
    ids = torch.empty(num_rows, KEPT, dtype=torch.int32, device=logits.device)
    values = torch.empty(num_rows, KEPT, dtype=logits.dtype, device=logits.device)
    _hide(logits, rows, slots, ids, values)
    try:
        yield logits
    finally:
        restore_kernel[(num_rows,)](
            # inputs
            ids,
            values,
            # outputs
            logits,
            # sizes
            logits.stride(0),
            # constants
            KEPT=KEPT,
            SIZE=triton.next_power_of_2(KEPT),
            num_warps=1,
            **pdl_options(logits.device),
        )


def _hide(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    pools, drafts = slots.pools, rows.drafts
    hide_kernel[(logits.shape[0],)](
        # inputs
        logits,
        rows.positions,
        ids if drafts is None else drafts,  # what is not there is never read
        slots.table,
        slots.slot_ids,
        ids if pools is None else pools.allowed,
        ids if pools is None else pools.words,
        # outputs, beside the logits
        ids,
        values,
        # sizes
        rows.num_contexts,
        rows.width,
        logits.stride(0),
        logits.shape[1],
        0 if pools is None else pools.vocab_size,
        rows.positions.stride(0),
        0 if drafts is None else drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        # constants
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        LENGTH=MAX_BAD_WORD_LEN,
        HAS_DRAFTS=drafts is not None,
        HAS_POOLS=pools is not None,
        num_warps=1,
        **pdl_options(logits.device),
    )

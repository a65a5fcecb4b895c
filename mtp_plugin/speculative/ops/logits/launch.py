"""Grids of the masking kernels: two launches around what reads the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.ops.logits.contract import LogitRows, check_step
from mtp_plugin.speculative.ops.logits.kernel import hide_kernel, restore_kernel
from mtp_plugin.speculative.step import RowParameters


@contextmanager
def early_stops_masked(
    logits: torch.Tensor, parameters: RowParameters, step: LogitRows
) -> Iterator[torch.Tensor]:
    """As the reference, in place: a copy would cost more than all of acceptance.

    The few masked entries are kept aside and put back on exit, bit for bit.
    """
    check_step(logits, parameters, step)
    expect_reachable(hide_kernel, "logits", logits)
    rows, vocab = logits.shape
    first, stops = parameters.min_tokens_end, parameters.stop_ids
    num_stops = int(stops.shape[1])
    if first is None or rows == 0 or num_stops == 0:
        yield logits
        return
    if logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < vocab):
        # rows that share memory cannot be masked each for itself
        with reference.early_stops_masked(logits, parameters, step) as masked:
            yield masked
        return
    ids = torch.empty(rows, num_stops, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, num_stops, dtype=logits.dtype, device=logits.device)
    _hide(logits, stops, first, step, ids, values)
    try:
        yield logits
    finally:
        restore_kernel[(rows,)](
            # inputs
            ids,
            values,
            # outputs
            logits,
            # sizes
            logits.stride(0),
            num_stops,
            # constants
            STOPS=triton.next_power_of_2(num_stops),
            num_warps=1,
            **pdl_options(logits.device),
        )


def _hide(
    logits: torch.Tensor,
    stops: torch.Tensor,
    first: torch.Tensor,
    step: LogitRows,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    positions = step.positions.contiguous()
    stops = stops if stops.stride(1) == 1 else stops.contiguous()
    hide_kernel[(logits.shape[0],)](
        # inputs
        logits,
        positions,
        step.context_lens.contiguous() if step.num_contexts else positions,
        stops,
        first.contiguous(),
        # outputs, beside the logits
        ids,
        values,
        # sizes
        step.num_contexts,
        step.num_ctx_tokens,
        logits.stride(0),
        logits.shape[1],
        stops.shape[1],
        stops.stride(0),
        # constants
        WIDTH=step.width,
        CONTEXTS=triton.next_power_of_2(max(step.num_contexts, 1)),
        STOPS=triton.next_power_of_2(stops.shape[1]),
        num_warps=1,
        **pdl_options(logits.device),
    )

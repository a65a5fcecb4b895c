"""Triton kernels that take single logits out of their rows and put them back."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column

PROMPT_LEN = tl.constexpr(request_column("prompt_len"))
MIN_TOKENS = tl.constexpr(request_column("min_tokens"))
STOP_IDS = tl.constexpr(request_column("stop_ids"))


@triton.jit
def hide_kernel(
    # inputs
    logits_ptr,
    position_ptr,
    context_len_ptr,
    table_ptr,
    slot_ptr,
    # outputs, beside the logits
    hidden_id_ptr,
    hidden_value_ptr,
    # sizes
    num_contexts,
    num_ctx_tokens,
    row_stride,
    vocab,
    table_stride,
    slot_stride,
    # constants
    WIDTH: tl.constexpr,
    CONTEXTS: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of logits: its stop ids, if they come too early, kept aside and masked."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0)
    is_context = row < num_contexts
    behind = tl.maximum(row - num_contexts, 0)
    generation = behind // WIDTH
    request = tl.where(is_context, row, num_contexts + generation).to(tl.int64)
    # asked for before all that its row does not wait for
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    contexts = tl.arange(0, CONTEXTS)
    before = (contexts < num_contexts) & (contexts <= row)
    end = tl.sum(tl.load(context_len_ptr + contexts, mask=before, other=0).to(tl.int64), axis=0)
    flat = tl.where(is_context, end - 1, num_ctx_tokens + generation.to(tl.int64) * WIDTH)
    offset = tl.where(is_context, 0, behind % WIDTH)
    position = tl.load(position_ptr + flat).to(tl.int64)
    slot_row = table_ptr + slot * table_stride
    columns = tl.arange(0, STOPS)
    stops = tl.load(slot_row + STOP_IDS + columns)
    first = tl.load(slot_row + PROMPT_LEN).to(tl.int64) + tl.load(slot_row + MIN_TOKENS)
    early = position + 1 + offset < first

    hidden = early & (stops >= 0) & (stops < vocab)
    entries = logits_ptr + row.to(tl.int64) * row_stride + tl.where(hidden, stops, 0)
    values = tl.load(entries, mask=hidden, other=0.0)
    # an id may stand twice among the stops: both must be read before one is masked
    tl.debug_barrier()
    tl.store(entries, float("-inf"), mask=hidden)
    out = row.to(tl.int64) * STOPS + columns
    tl.store(hidden_id_ptr + out, tl.where(hidden, stops, -1))
    tl.store(hidden_value_ptr + out, values)


@triton.jit
def restore_kernel(
    # inputs
    hidden_id_ptr,
    hidden_value_ptr,
    # outputs
    logits_ptr,
    # sizes
    row_stride,
    # constants
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of logits: what was kept aside, back in its place."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, STOPS)
    kept = row * STOPS + columns
    ids = tl.load(hidden_id_ptr + kept)
    hidden = ids >= 0
    values = tl.load(hidden_value_ptr + kept, mask=hidden, other=0.0)
    tl.store(logits_ptr + row * row_stride + tl.where(hidden, ids, 0), values, mask=hidden)

"""Device code of the product of few rows with a large weight."""

import triton
import triton.language as tl

from mtp_plugin.models.fused.gating.kernel import silu_mul
from mtp_plugin.triton_device.kernel import inputs_written


@triton.jit
def _fetch(addresses, num_bytes):
    """Ask for `num_bytes` behind each address to come into the L2 cache, and do not wait."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [addresses, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(
    acc,
    bias_ptr,
    out_ptr,
    first_column,
    num_rows,
    num_columns,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Bias or gate, and the store of a finished tile [weight rows, rows of x]."""
    dtype = out_ptr.dtype.element_ty
    rows = tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    if GATED:
        # the upper half of the tile is the gate of the lower half's columns
        pair = tl.permute(tl.reshape(acc, [2, COLUMNS, ROWS]), (1, 2, 0))
        gate, up = tl.split(pair)
        out = silu_mul(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
    else:
        if BIASED:
            bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0)
            acc += bias.to(tl.float32)[:, None]
        out = acc.to(dtype)
    place = rows.to(tl.int64)[None, :] * num_columns + columns[:, None]
    inside = (rows < num_rows)[None, :] & (columns < num_columns)[:, None]
    tl.store(out_ptr + place, out, mask=inside)


@triton.jit
def skinny_kernel(
    x_ptr,  # [num_rows, width]
    weight_ptr,  # [num_columns, width]; gated: [2 * num_columns, width], gates first
    bias_ptr,  # [num_columns]
    out_ptr,  # [num_rows, num_columns]
    partial_ptr,  # [tiles, SPLIT, TILE, ROWS] fp32
    ticket_ptr,  # [tiles] int32, 0 before and after
    x_stride,
    num_rows,
    num_columns,
    width,
    piece,  # width that one split reads, a multiple of BLOCK
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,  # weight rows of a program
    ROWS: tl.constexpr,  # rows of x, padded
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    FETCH: tl.constexpr,  # bytes of each weight row to ask for while the kernel in front runs
    EARLY: tl.constexpr,
):
    """One tile of the weight, or a piece of its width, with all rows of x.

    The tile stands on the left of the product, so that few rows of x waste little of it. The last
    split of a tile to arrive adds all of them up in their order.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    COLUMNS: tl.constexpr = TILE // 2 if GATED else TILE
    begin = split * piece
    end = tl.minimum(begin + piece, width)
    if EARLY and FETCH > 0:
        # two lanes a row; weights are there before the kernel in front has ended
        halves = tl.arange(0, 2 * TILE)
        lane = halves // 2
        fetched = tl.minimum(tile * COLUMNS + lane % COLUMNS, num_columns - 1).to(tl.int64)
        if GATED:
            fetched += (lane // COLUMNS).to(tl.int64) * num_columns
        itemsize: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        num_bytes = tl.minimum(FETCH, (end - begin) * itemsize) // 2
        start_at = (fetched * width + begin) * itemsize + (halves % 2) * num_bytes
        if num_bytes > 0:
            _fetch(weight_ptr.to(tl.int64) + start_at, num_bytes)
    inputs_written(EARLY)
    lanes = tl.arange(0, TILE)
    rows = tl.arange(0, ROWS)
    column = tl.minimum(tile * COLUMNS + lanes % COLUMNS, num_columns - 1)
    weight_row = column.to(tl.int64)
    if GATED:
        weight_row += (lanes // COLUMNS).to(tl.int64) * num_columns
    # rows beyond the last repeat it, and are not stored
    x_row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    weight_at = weight_ptr + weight_row[:, None] * width + inner[None, :]
    x_at = x_ptr + x_row[:, None] * x_stride + inner[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_at + start)
            x = tl.load(x_at + start)
        else:
            inside = (start + inner < end)[None, :]
            weight = tl.load(weight_at + start, mask=inside, other=0)
            x = tl.load(x_at + start, mask=inside, other=0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")

    first = tile * COLUMNS
    if SPLIT == 1:
        _finish(acc, bias_ptr, out_ptr, first, num_rows, num_columns, BIASED, GATED, COLUMNS, ROWS)
    else:
        within = lanes[:, None] * ROWS + rows[None, :]
        own = partial_ptr + tile.to(tl.int64) * SPLIT * TILE * ROWS
        tl.store(own + split * TILE * ROWS + within, acc)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel")
        if ticket == SPLIT - 1:
            total = tl.zeros([TILE, ROWS], tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(own + other * TILE * ROWS + within, cache_modifier=".cg")
            _finish(
                total, bias_ptr, out_ptr, first, num_rows, num_columns, BIASED, GATED, COLUMNS, ROWS
            )
            tl.store(ticket_ptr + tile, 0)

"""Triton kernels of attention over the paged cache.

T query rows of R sequences, ragged ones first; pools of blocks of BLOCK_SIZE rows, with a block
table per sequence.

1. Grid (T, blocks of heads x width), `paged_write_kernel`: store the keys and values of the step in
   the rows of the pools that the block tables assign to their positions.
2. Grid (tiles of all ragged rows, key heads), `paged_ragged_kernel`: attend a tile of rows of one
   sequence. Keys that every row of the tile sees are attended first, without a mask.
3. Grid (sequences x tiles of their rows, key heads, splits), `paged_uniform_kernel`: the same for
   sequences with equal row counts. With few programs the keys are split; each split stores its
   normalized result and the log-sum of its weights.
4. Grid [rows x heads], `paged_merge_kernel`: merge the splits by their weights.

Attention is an online softmax over tiles of keys: highest score, sum of weights and weighted values
so far. The query heads of a key head share a tile, so its keys are read once.

Kernels read lengths, limits and block tables on the device; a launch depends only on shapes and on
the number of rows per sequence. Row r of a sequence of n rows has position ``kv_len - n + r``. A
row at a negative position, or at or past its limit, is padding (of a batch, or an absent draft): it
writes to the sentinel block, attends no key and returns zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize


@triton.jit
def _sequence_of_row(seq_len_ptr, num_ragged, row, LANES: tl.constexpr):
    """Return (sequence, its first row) of a row in the ragged part of the batch."""
    lanes = tl.arange(0, LANES)
    lens = tl.load(seq_len_ptr + lanes, mask=lanes < num_ragged, other=0)
    ends = tl.cumsum(lens, axis=0)
    sequence = tl.sum((ends <= row).to(tl.int32), axis=0)
    return sequence, tl.sum(tl.where(lanes < sequence, lens, 0), axis=0)


@triton.jit(
    do_not_specialize=[
        "num_ragged",
        "ragged_rows",
        "uniform_rows",
        "table_stride",
        "table_width",
        "sentinel_row",
    ]
)
def paged_write_kernel(
    # inputs
    key_ptr,  # [T, HEADS, WIDTH] floating
    value_ptr,  # [T, HEADS, WIDTH] floating
    seq_len_ptr,  # [R] int32: query rows
    kv_len_ptr,  # [R] int32: keys after this step
    limit_ptr,  # [R] int32: rows at or past it are padding
    table_ptr,  # [R, table_width] int32: blocks
    # updated in place
    key_pool_ptr,  # [rows, HEADS, WIDTH] floating
    value_pool_ptr,  # [rows, HEADS, WIDTH] floating
    # sizes
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    table_stride,
    table_width,
    sentinel_row,  # first row of the sentinel block
    num_ragged,  # ragged sequences
    ragged_rows,  # query rows of them
    uniform_rows,  # query rows of each other sequence
    # constants
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # a power of two >= num_ragged; 0: there are none
    BLOCK: tl.constexpr,  # heads x width per program
    PDL: tl.constexpr,
):
    """Store key and value of one (row, block of heads x width) in the pools."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0)
    after_ragged = row - ragged_rows
    sequence = num_ragged + after_ragged // uniform_rows
    offset = after_ragged % uniform_rows
    num_rows = uniform_rows
    if LANES > 0:  # noqa: SIM102 - decided when the kernel is compiled
        if row < ragged_rows:
            sequence, first_row = _sequence_of_row(seq_len_ptr, num_ragged, row, LANES)
            offset = row - first_row
            num_rows = tl.load(seq_len_ptr + sequence)
    position = tl.load(kv_len_ptr + sequence) - num_rows + offset
    limit = tl.load(limit_ptr + sequence)
    is_alive = (position >= 0) & (position < limit)
    block = tl.minimum(tl.maximum(position, 0) // BLOCK_SIZE, table_width - 1)
    entry = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + block).to(tl.int64)
    # the remainder of a negative number may be negative
    block_offset = (position % BLOCK_SIZE + BLOCK_SIZE) % BLOCK_SIZE
    out_row = tl.where(is_alive, entry * BLOCK_SIZE, sentinel_row) + block_offset

    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < HEADS * WIDTH
    head = offsets // WIDTH
    dim = offsets % WIDTH
    wide_row = row.to(tl.int64)
    out_offsets = out_row * (HEADS * WIDTH) + offsets
    key_ptrs = key_ptr + wide_row * key_row_stride + head * key_head_stride + dim
    value_ptrs = value_ptr + wide_row * value_row_stride + head * value_head_stride + dim
    # both are in flight before the first is stored
    key = tl.load(key_ptrs, mask=inside)
    value = tl.load(value_ptrs, mask=inside)
    tl.store(key_pool_ptr + out_offsets, key, mask=inside)
    tl.store(value_pool_ptr + out_offsets, value, mask=inside)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """Compute a @ b with float32 accumulation; float32 products are not rounded to TF32."""
    if WIDEN:  # the interpreter cannot multiply bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _attend_keys(
    highest,  # [BLOCK_M] highest score so far
    weight,  # [BLOCK_M] sum of weights so far
    total,  # [BLOCK_M, BLOCK_D] weighted values so far
    query,  # [BLOCK_M, BLOCK_D]
    last_key,  # [BLOCK_M] last position that a row sees; -1: none
    first_key,
    end_key,
    table_ptr,  # of the sequence
    table_width,
    key_pool_ptr,  # of the head
    value_pool_ptr,  # of the head
    score_scale,  # of scores for powers of two; positive
    ROW_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,  # False: whole tiles of keys that every row sees
    WIDEN: tl.constexpr,
):
    """Attend the keys [first_key, end_key) with a tile of rows and accumulate (online softmax)."""
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dims_inside = dims < WIDTH
    # blocks are looked up a tile ahead, so that keys and values can be fetched while the tiles
    # before them are attended
    entry = (first_key + offsets) // BLOCK_SIZE
    block = tl.load(table_ptr + entry, mask=entry < table_width, other=0)
    for start in range(first_key, end_key, BLOCK_N):
        position = start + offsets
        row = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        key_offsets = (row * ROW_STRIDE)[:, None] + dims[None, :]
        entry = (position + BLOCK_N) // BLOCK_SIZE
        block = tl.load(table_ptr + entry, mask=entry < table_width, other=0)
        inside = dims_inside[None, :]
        if MASKED:
            # what is no key is never read: 0 * NaN is NaN
            inside = (position < end_key)[:, None] & inside
        keys = tl.load(key_pool_ptr + key_offsets, mask=inside, other=0.0)
        scores = _dot(query, tl.trans(keys), WIDEN)
        if MASKED:
            scores = tl.where(position[None, :] <= last_key[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * score_scale)
        finite = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores * score_scale - finite[:, None])
        decay = tl.exp2(highest - finite)
        weight = weight * decay + tl.sum(weights, axis=1)
        values = tl.load(value_pool_ptr + key_offsets, mask=inside, other=0.0)
        total = total * decay[:, None] + _dot(weights.to(values.dtype), values, WIDEN)
        highest = higher
    return highest, weight, total


@triton.jit
def _rows_of_tile(
    tile,
    kv_head,
    query_rows,  # of the sequence
    kv_len,
    limit,
    max_keys,  # that the block table holds
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return, per tile entry: row in its sequence, query head, whether the row exists, and the last
    key that it sees or -1; and the end of the keys of all entries."""
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offset = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    used = offset < query_rows
    position = kv_len - query_rows + offset
    last_key = tl.where(used & (position >= 0) & (position < limit), position, -1)
    end_key = tl.minimum(tl.max(last_key, axis=0) + 1, max_keys)
    return offset, head, used, last_key, end_key


@triton.jit
def _mean(weight, total, last_key):
    """Return the attended values per row; zeros if a row sees no key. NaN is preserved."""
    seen = (last_key >= 0) & (weight != 0.0)
    return tl.where(seen[:, None], total / tl.where(seen, weight, 1.0)[:, None], 0.0)


@triton.jit(
    do_not_specialize=[
        "first_sequence",
        "first_row",
        "query_rows",
        "row_tiles",
        "table_stride",
        "table_width",
        "num_splits",
    ]
)
def paged_uniform_kernel(
    # inputs
    query_ptr,  # [T, KV_HEADS * GROUP, WIDTH] floating
    kv_len_ptr,  # [R] int32: keys after this step
    limit_ptr,  # [R] int32: rows at or past it are padding
    table_ptr,  # [R, table_width] int32: blocks
    key_pool_ptr,  # [rows, KV_HEADS, WIDTH] floating
    value_pool_ptr,  # [rows, KV_HEADS, WIDTH] floating
    # outputs; N: query rows of these sequences
    output_ptr,  # [T, KV_HEADS * GROUP, WIDTH]; SPLIT: [N, KV_HEADS * GROUP, num_splits, WIDTH]
    weight_ptr,  # SPLIT: [N, KV_HEADS * GROUP, num_splits] float32: log2 of the sum of weights
    # sizes
    query_row_stride,
    query_head_stride,
    table_stride,
    table_width,
    first_sequence,
    first_row,  # of these sequences
    query_rows,  # of each sequence
    row_tiles,  # of each sequence
    num_splits,
    score_scale,  # of scores for powers of two; positive
    # constants
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend one (sequence, tile of its rows; key head; split of its keys), for equal row counts.

    The query heads of a key head are adjacent in a tile, so that its keys are read once.
    """
    grid_dependency_synchronize(PDL)
    index = tl.program_id(0) // row_tiles
    tile = tl.program_id(0) % row_tiles
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = first_sequence + index
    kv_len = tl.load(kv_len_ptr + sequence)
    limit = tl.load(limit_ptr + sequence)

    offset, head, rows_inside, last_key, end_key = _rows_of_tile(
        tile, kv_head, query_rows, kv_len, limit, table_width * BLOCK_SIZE, GROUP, BLOCK_M
    )
    first_key = 0
    if SPLIT:
        # by the sequence's own length, in whole tiles
        split_keys = (end_key + num_splits * BLOCK_N - 1) // (num_splits * BLOCK_N) * BLOCK_N
        first_key = split * split_keys
        end_key = tl.minimum(first_key + split_keys, end_key)

    dims = tl.arange(0, BLOCK_D)
    inside = rows_inside[:, None] & (dims < WIDTH)[None, :]
    local_row = index * query_rows + offset
    row = (first_row + local_row).to(tl.int64)
    query_offsets = row * query_row_stride + head * query_head_stride
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=inside, other=0.0)
    highest, weight, total = _attend_keys(
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        query,
        last_key,
        first_key,
        end_key,
        table_ptr + sequence.to(tl.int64) * table_stride,
        table_width,
        key_pool_ptr + kv_head * WIDTH,
        value_pool_ptr + kv_head * WIDTH,
        score_scale,
        KV_HEADS * WIDTH,
        WIDTH,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_D,
        True,
        WIDEN,
    )
    result = _mean(weight, total, last_key)
    if SPLIT:
        item = (local_row.to(tl.int64) * (KV_HEADS * GROUP) + head) * num_splits + split
        seen = weight != 0.0
        # the logarithm of the sum of all weights, to base two
        weight = tl.where(seen, highest + tl.log2(tl.where(seen, weight, 1.0)), float("-inf"))
        tl.store(weight_ptr + item, weight, mask=rows_inside)
    else:
        item = row * (KV_HEADS * GROUP) + head
    out_offsets = item[:, None] * WIDTH + dims[None, :]
    tl.store(output_ptr + out_offsets, result.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits", "first_row"])
def paged_merge_kernel(
    # inputs
    partial_ptr,  # [N, HEADS, num_splits, WIDTH] float32
    weight_ptr,  # [N, HEADS, num_splits] float32: log2 of the sum of weights
    # output
    output_ptr,  # [T, HEADS, WIDTH] floating
    # sizes
    first_row,  # of the N rows
    num_splits,
    # constants
    HEADS: tl.constexpr,  # query heads
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two >= num_splits
    BLOCK_D: tl.constexpr,  # a power of two >= WIDTH
    PDL: tl.constexpr,
):
    """Merge the key splits of one (row, head) by their weights."""
    grid_dependency_synchronize(PDL)
    item = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    weight = tl.load(
        weight_ptr + item * num_splits + splits, mask=splits < num_splits, other=float("-inf")
    )
    highest = tl.max(weight, axis=0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2(weight - finite)
    dims = tl.arange(0, BLOCK_D)
    partial_offsets = (item * num_splits + splits)[:, None] * WIDTH + dims[None, :]
    inside = (splits < num_splits)[:, None] & (dims < WIDTH)[None, :]
    partial = tl.load(partial_ptr + partial_offsets, mask=inside, other=0.0)
    total = tl.sum(share, axis=0)
    result = tl.sum(partial * share[:, None], axis=0) / tl.where(total != 0.0, total, 1.0)
    out_offsets = (first_row.to(tl.int64) * HEADS + item) * WIDTH + dims
    tl.store(output_ptr + out_offsets, result.to(output_ptr.dtype.element_ty), mask=dims < WIDTH)


@triton.jit(do_not_specialize=["num_ragged", "table_stride", "table_width"])
def paged_ragged_kernel(
    # inputs
    query_ptr,  # [T, KV_HEADS * GROUP, WIDTH] floating
    seq_len_ptr,  # [R] int32: query rows
    kv_len_ptr,  # [R] int32: keys after this step
    limit_ptr,  # [R] int32: rows at or past it are padding
    table_ptr,  # [R, table_width] int32: blocks
    key_pool_ptr,  # [rows, KV_HEADS, WIDTH] floating
    value_pool_ptr,  # [rows, KV_HEADS, WIDTH] floating
    # output
    output_ptr,  # [T, KV_HEADS * GROUP, WIDTH] floating
    # sizes
    query_row_stride,
    query_head_stride,
    table_stride,
    table_width,
    num_ragged,  # ragged sequences
    score_scale,  # of scores for powers of two; positive
    # constants
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key head
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # a power of two >= num_ragged
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend one (tile of a sequence's rows, key head) of the ragged sequences."""
    grid_dependency_synchronize(PDL)
    # later rows see more keys: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    lens = tl.load(seq_len_ptr + lanes, mask=lanes < num_ragged, other=0)
    tiles = (lens * GROUP + BLOCK_M - 1) // BLOCK_M
    sequence = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    sequence = tl.minimum(sequence, num_ragged - 1)
    before = lanes < sequence
    first_row = tl.sum(tl.where(before, lens, 0), axis=0)
    tile -= tl.sum(tl.where(before, tiles, 0), axis=0)
    query_rows = tl.load(seq_len_ptr + sequence)
    kv_len = tl.load(kv_len_ptr + sequence)
    limit = tl.load(limit_ptr + sequence)

    offset, head, rows_inside, last_key, end_key = _rows_of_tile(
        tile, kv_head, query_rows, kv_len, limit, table_width * BLOCK_SIZE, GROUP, BLOCK_M
    )

    dims = tl.arange(0, BLOCK_D)
    inside = rows_inside[:, None] & (dims < WIDTH)[None, :]
    row = (first_row + offset).to(tl.int64)
    query_offsets = row * query_row_stride + head * query_head_stride
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=inside, other=0.0)
    table_ptr += sequence.to(tl.int64) * table_stride
    key_pool_ptr += kv_head * WIDTH
    value_pool_ptr += kv_head * WIDTH
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # keys before every row of the tile need no mask
    common = tl.min(tl.where(last_key >= 0, last_key + 1, end_key), axis=0)
    common = tl.minimum(common, end_key) // BLOCK_N * BLOCK_N
    highest, weight, total = _attend_keys(
        highest,
        weight,
        total,
        query,
        last_key,
        0,
        common,
        table_ptr,
        table_width,
        key_pool_ptr,
        value_pool_ptr,
        score_scale,
        KV_HEADS * WIDTH,
        WIDTH,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_D,
        False,
        WIDEN,
    )
    highest, weight, total = _attend_keys(
        highest,
        weight,
        total,
        query,
        last_key,
        common,
        end_key,
        table_ptr,
        table_width,
        key_pool_ptr,
        value_pool_ptr,
        score_scale,
        KV_HEADS * WIDTH,
        WIDTH,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_D,
        True,
        WIDEN,
    )
    result = _mean(weight, total, last_key)
    out_offsets = (row * (KV_HEADS * GROUP) + head)[:, None] * WIDTH + dims[None, :]
    tl.store(output_ptr + out_offsets, result.to(output_ptr.dtype.element_ty), mask=inside)

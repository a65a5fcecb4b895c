"""Kernel of prompt attention for GPUs of compute capability 9.0, in Gluon of Triton 3.6 and later.

The structure is that of FlashAttention-3 (Shah et al., 2024). Grid (tiles of all ragged rows, key
heads); a program of one producer warp and two consumer warpgroups:

1. All: find the sequence of the tile, the end of its keys, and how many tiles of keys need a mask.
2. Producer: copy tiles of keys and values to STAGES stages of shared memory with TMA, the last tile
   first, waiting until both consumers have freed a stage.
3. Consumers, 64 rows each: multiply the query and the first tile of keys.
4. For each further tile start the product with its keys and the product of the previous weights and
   values, both asynchronous, then update the online softmax.
5. Multiply the last weights and values, normalize, and store the rows through shared memory.

Rows, padding and lengths are those of ``kernels_triton``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"expected Triton 3.6 or later, got {triton.__version__}")

WIDTH = 128
"""Head width."""
ROWS = 128
"""Rows times query heads per key head, of a program."""
KEYS, STAGES = 128, 2
"""Keys of a tile, and tiles in shared memory; the fastest on an H100."""
MIN_BLOCK_SIZE = 8
"""Rows of the swizzle pattern of shared memory, which a page must fill."""
PANEL = gl.constexpr(64)
"""Values in a row of that pattern."""


def page_rows(block_size: int) -> int:
    """Return the number of rows that are copied at a time: a page, or a part of it."""
    return min(block_size, KEYS)


def pages_descriptor(pool, block_size: int) -> TensorDescriptor:
    """Return the TMA descriptor of a pool [rows, kv_heads, WIDTH]."""
    return TensorDescriptor.from_tensor(
        pool.view(-1, block_size, pool.shape[1] * pool.shape[2]),
        [1, page_rows(block_size), PANEL.value],
        gl.NVMMASharedLayout(PANEL.value * 2, 16, rank=3),
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _copy_tile(
    desc,
    tiles,
    ready,
    free,
    turn,
    table_ptr,
    start,
    end_key,
    kv_head,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy a tile of keys or values; rows that hold no key are zero and not read."""
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BLOCK_N * WIDTH * 2)
    PAGES: gl.constexpr = BLOCK_N // PAGE
    PANELS: gl.constexpr = WIDTH // PANEL
    for page in gl.static_range(PAGES):
        first = start + page * PAGE
        count = gl.minimum(gl.maximum(end_key - first, 0), PAGE)
        block = gl.load(table_ptr + first // BLOCK_SIZE, mask=count > 0, other=-1)
        # the copy ends with the last key; rows before the page are out of bounds, so zero
        row = first % BLOCK_SIZE + count - PAGE
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc,
                [block, row, kv_head * WIDTH + panel * PANEL],
                ready.index(stage),
                tiles.index(stage * (PAGES * PANELS) + panel * PAGES + page),
            )


@gluon.jit
def _copy_tiles(
    key_desc,
    value_desc,
    keys,
    values,
    ready_keys,
    free_keys,
    ready_values,
    free_values,
    table_ptr,
    kv_head,
    num_tiles,
    end_key,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy all tiles, the last one first: the consumers mask it while later ones are copied."""
    for turn in range(num_tiles):
        start = (num_tiles - 1 - turn) * BLOCK_N
        _copy_tile(
            key_desc,
            keys,
            ready_keys,
            free_keys,
            turn,
            table_ptr,
            start,
            end_key,
            kv_head,
            WIDTH,
            BLOCK_SIZE,
            BLOCK_N,
            PAGE,
            STAGES,
        )
        _copy_tile(
            value_desc,
            values,
            ready_values,
            free_values,
            turn,
            table_ptr,
            start,
            end_key,
            kv_head,
            WIDTH,
            BLOCK_SIZE,
            BLOCK_N,
            PAGE,
            STAGES,
        )


@gluon.jit
def _softmax(
    scores,
    highest,
    weight,
    last_key,
    start,
    end_key,
    score_scale,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,  # False: every row sees every key of the tile
):
    """Return the tile's weights, the highest score and sum of weights so far, and their decay."""
    if MASKED:
        lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        # see the shift of rows in `_copy_tile`
        first = start + lanes // PAGE * PAGE
        count = gl.minimum(gl.maximum(end_key - first, 0), PAGE)
        position = start + lanes + count - PAGE
        position = gl.where(position >= first, position, 2147483647)
        scores = gl.where(position[None, :] <= last_key[:, None], scores, float("-inf"))
    higher = gl.maximum(highest, gl.max(scores, axis=1) * score_scale)
    finite = higher
    if MASKED:
        finite = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * score_scale - finite[:, None])
    decay = gl.exp2(highest - finite)
    weight = weight * decay + gl.sum(weights, axis=1)
    return weights, higher, weight, decay


@gluon.jit
def _attend_tile(
    query,
    keys,
    values,
    ready_keys,
    free_keys,
    ready_values,
    free_values,
    turn,
    weights,  # of the tile before
    total,
    highest,
    weight,
    last_key,
    start,
    end_key,
    score_scale,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    ROWS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Multiply the keys of this tile and the values of the one before."""
    half = gl.convert_layout(weights.to(keys.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    stage = turn % STAGES
    mbarrier.wait(ready_keys.index(stage), (turn // STAGES) & 1)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    old = (turn - 1) % STAGES
    mbarrier.wait(ready_values.index(old), ((turn - 1) // STAGES) & 1)
    total = warpgroup_mma(half, values.index(old), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(free_keys.index(stage), count=1)
    weights, highest, weight, decay = _softmax(
        scores,
        highest,
        weight,
        last_key,
        start,
        end_key,
        score_scale,
        BLOCK_N,
        PAGE,
        S_LAYOUT,
        MASKED,
    )
    # the registers of `half` are in use until the multiplication ends
    total, weights = warpgroup_mma_wait(0, deps=[total, weights])
    mbarrier.arrive(free_values.index(old), count=1)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return weights, total, highest, weight


@gluon.jit
def _attend_tiles(
    query_tiles,
    keys,
    values,
    ready_keys,
    free_keys,
    ready_values,
    free_values,
    query_ptr,
    output_ptr,
    query_row_stride,
    query_head_stride,
    first_row,  # of the sequence
    first_packed,  # of the program
    query_rows,
    first_position,
    limit,
    kv_head,
    num_tiles,
    masked_tiles,
    end_key,
    score_scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Attend all tiles with the rows of one warpgroup."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0]
    )
    dtype: gl.constexpr = query_ptr.dtype.element_ty

    first_packed += WARPGROUP * ROWS
    packed = first_packed + gl.arange(0, ROWS, layout=gl.SliceLayout(1, IO_LAYOUT))
    offset = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    used = offset < query_rows
    row = (first_row + offset).to(gl.int64)
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, IO_LAYOUT))
    source = query_ptr + (row * query_row_stride + head * query_head_stride)[:, None]
    query = query_tiles.index(WARPGROUP)
    query.store(gl.load(source + dims[None, :], mask=used[:, None], other=0.0))
    fence_async_shared()

    lanes = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    offset_s = (first_packed + lanes) // GROUP
    position = first_position + offset_s
    alive = (offset_s < query_rows) & (position >= 0) & (position < limit)
    last_key = gl.where(alive, position, -1)
    highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    weight = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)

    mbarrier.wait(ready_keys.index(0), 0)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        query, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(free_keys.index(0), count=1)
    weights, highest, weight, _ = _softmax(
        scores,
        highest,
        weight,
        last_key,
        (num_tiles - 1) * BLOCK_N,
        end_key,
        score_scale,
        BLOCK_N,
        PAGE,
        S_LAYOUT,
        True,
    )
    for turn in range(1, masked_tiles):
        weights, total, highest, weight = _attend_tile(
            query,
            keys,
            values,
            ready_keys,
            free_keys,
            ready_values,
            free_values,
            turn,
            weights,
            total,
            highest,
            weight,
            last_key,
            (num_tiles - 1 - turn) * BLOCK_N,
            end_key,
            score_scale,
            BLOCK_N,
            PAGE,
            STAGES,
            S_LAYOUT,
            O_LAYOUT,
            ROWS,
            True,
        )
    for turn in range(masked_tiles, num_tiles):
        weights, total, highest, weight = _attend_tile(
            query,
            keys,
            values,
            ready_keys,
            free_keys,
            ready_values,
            free_values,
            turn,
            weights,
            total,
            highest,
            weight,
            last_key,
            (num_tiles - 1 - turn) * BLOCK_N,
            end_key,
            score_scale,
            BLOCK_N,
            PAGE,
            STAGES,
            S_LAYOUT,
            O_LAYOUT,
            ROWS,
            False,
        )
    last = num_tiles - 1
    half = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(ready_values.index(last % STAGES), (last // STAGES) & 1)
    total = warpgroup_mma(half, values.index(last % STAGES), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])

    # zeros if a row sees no key; NaN is preserved
    seen = (last_key >= 0) & (weight != 0.0)
    share = gl.where(seen, 1.0 / gl.where(seen, weight, 1.0), 0.0)
    share = gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))
    seen = gl.convert_layout(seen.to(gl.int32), gl.SliceLayout(1, O_LAYOUT)) != 0
    # the query's shared memory is free: results pass through it to whole rows per thread
    query.store(gl.where(seen[:, None], total * share[:, None], 0.0).to(dtype))
    target = output_ptr + ((row * HEADS + head) * WIDTH)[:, None] + dims[None, :]
    gl.store(target, query.load(IO_LAYOUT), mask=used[:, None])


@gluon.jit(do_not_specialize=["num_ragged", "table_stride", "table_width"])
def paged_prompt_kernel(
    # inputs
    query_ptr,  # [T, KV_HEADS * GROUP, WIDTH] float16 or bfloat16
    seq_len_ptr,  # [R] int32: query rows
    kv_len_ptr,  # [R] int32: keys after this step
    limit_ptr,  # [R] int32: rows at or past it are padding
    table_ptr,  # [R, table_width] int32: blocks
    key_desc,  # [blocks, BLOCK_SIZE, KV_HEADS * WIDTH], as the query
    value_desc,  # [blocks, BLOCK_SIZE, KV_HEADS * WIDTH], as the query
    # output
    output_ptr,  # [T, KV_HEADS * GROUP, WIDTH], as the query
    # sizes
    query_row_stride,
    query_head_stride,
    table_stride,
    table_width,
    num_ragged,  # ragged sequences
    score_scale,  # of scores for powers of two; positive
    # constants
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads that share a key head
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LANES: gl.constexpr,  # a power of two >= num_ragged
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE: gl.constexpr,  # rows of a page that are copied at a time
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend one (tile of a sequence's rows, key head) of the ragged sequences.

    Programs past the last tile of all sequences store nothing.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    PAGES: gl.constexpr = BLOCK_N // PAGE
    PANELS: gl.constexpr = WIDTH // PANEL
    # later rows see more keys: they start first
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    kv_head = gl.program_id(1)
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    lens = gl.load(seq_len_ptr + lanes, mask=lanes < num_ragged, other=0)
    tiles = (lens * GROUP + BLOCK_M - 1) // BLOCK_M
    sequence = gl.sum((gl.associative_scan(tiles, 0, _add) <= tile).to(gl.int32), axis=0)
    sequence = gl.minimum(sequence, num_ragged - 1)
    before = lanes < sequence
    first_row = gl.sum(gl.where(before, lens, 0), axis=0)
    tile -= gl.sum(gl.where(before, tiles, 0), axis=0)
    query_rows = gl.load(seq_len_ptr + sequence)
    kv_len = gl.load(kv_len_ptr + sequence)
    limit = gl.load(limit_ptr + sequence)
    table_ptr += sequence.to(gl.int64) * table_stride

    # the positions of the tile's live rows are [lowest, end_key)
    first_packed = tile * BLOCK_M
    first_position = kv_len - query_rows
    lowest = gl.maximum(first_position + first_packed // GROUP, 0)
    last_offset = gl.minimum((first_packed + BLOCK_M - 1) // GROUP, query_rows - 1)
    end_key = gl.minimum(first_position + last_offset + 1, limit)
    end_key = gl.where(lowest < end_key, gl.minimum(end_key, table_width * BLOCK_SIZE), 0)
    # keys before every row of the tile need no mask
    common = gl.minimum(lowest + 1, end_key) // BLOCK_N
    num_tiles = gl.maximum((end_key + BLOCK_N - 1) // BLOCK_N, 1)
    masked_tiles = gl.maximum(num_tiles - common, 1)

    PAGE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(PANEL * 2, 16, rank=3)
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(PANEL * 2, 16, rank=2)
    PAGES_SHAPE: gl.constexpr = [STAGES * PAGES * PANELS, 1, PAGE, PANEL]
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], TILE_LAYOUT)
    key_pages = gl.allocate_shared_memory(dtype, PAGES_SHAPE, PAGE_LAYOUT)
    value_pages = gl.allocate_shared_memory(dtype, PAGES_SHAPE, PAGE_LAYOUT)
    keys = key_pages._reinterpret(dtype, [STAGES, BLOCK_N, WIDTH], TILE_LAYOUT)
    values = value_pages._reinterpret(dtype, [STAGES, BLOCK_N, WIDTH], TILE_LAYOUT)
    ready_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready_keys.index(stage), count=1)
        mbarrier.init(ready_values.index(stage), count=1)
        mbarrier.init(free_keys.index(stage), count=2)
        mbarrier.init(free_values.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _attend_tiles,
                (
                    query_tiles,
                    keys,
                    values,
                    ready_keys,
                    free_keys,
                    ready_values,
                    free_values,
                    query_ptr,
                    output_ptr,
                    query_row_stride,
                    query_head_stride,
                    first_row,
                    first_packed,
                    query_rows,
                    first_position,
                    limit,
                    kv_head,
                    num_tiles,
                    masked_tiles,
                    end_key,
                    score_scale,
                    KV_HEADS * GROUP,
                    GROUP,
                    WIDTH,
                    BLOCK_N,
                    PAGE,
                    STAGES,
                    ROWS,
                    0,
                ),
            ),
            (
                _attend_tiles,
                (
                    query_tiles,
                    keys,
                    values,
                    ready_keys,
                    free_keys,
                    ready_values,
                    free_values,
                    query_ptr,
                    output_ptr,
                    query_row_stride,
                    query_head_stride,
                    first_row,
                    first_packed,
                    query_rows,
                    first_position,
                    limit,
                    kv_head,
                    num_tiles,
                    masked_tiles,
                    end_key,
                    score_scale,
                    KV_HEADS * GROUP,
                    GROUP,
                    WIDTH,
                    BLOCK_N,
                    PAGE,
                    STAGES,
                    ROWS,
                    1,
                ),
            ),
            (
                _copy_tiles,
                (
                    key_desc,
                    value_desc,
                    key_pages,
                    value_pages,
                    ready_keys,
                    free_keys,
                    ready_values,
                    free_values,
                    table_ptr,
                    kv_head,
                    num_tiles,
                    end_key,
                    WIDTH,
                    BLOCK_SIZE,
                    BLOCK_N,
                    PAGE,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],  # registers per thread of the second consumer and the producer
    )

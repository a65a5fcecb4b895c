"""Triton implementation of `experts`: five launches per layer.

T rows, E routed experts and SHARED ones; SLOTS = TOP_K + SHARED experts per row; a pair is a row
and one of its slots; a block holds up to BLOCK_ROWS pairs of one expert.

1. Grid (T, blocks of experts), `router_logits_kernel`: the router's products in fp32. Many rows use
   torch's product.
2. Grid [1], `assign_experts_kernel`: choose TOP_K experts of every row, weigh them, and sort the
   pairs by expert: a pair's index is the first block of its expert, and its rank among the expert's
   rows. Many rows or experts use the torch reference.
3. Grid [blocks x tiles of columns], `expert_gate_up_kernel`: silu(x @ gate) * (x @ up) of a block.
4. Grid [blocks x tiles of columns], `expert_down_kernel`: the down product, times the weight.
5. Grid (T, blocks of columns), `combine_experts_kernel`: sum the SLOTS parts of each row.

Grids cover the maximum number of blocks, so that a step can be captured; a program of an unused
block (0 filled rows) returns at once. Rows of a block after its filled ones repeat the last one and
are not stored. Every pair belongs to one block, so every part is written once. A row of NaN, or a
padding row, still takes TOP_K different experts, and its values stay in its own row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.embedded.layers import experts as torch_experts
from mtp_plugin.hosts.embedded.layers.experts import (
    Blocks,
    RouterRule,
    assign_reference,
    router_logits_reference,
)
from mtp_plugin.hosts.embedded.layers.mlp_triton import silu_mul
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

NAN_CHOICE = tl.constexpr(torch_experts.NAN_CHOICE)
MASKED_CHOICE = tl.constexpr(torch_experts.MASKED_CHOICE)
LOGITS_EXPERTS = 8
"""Experts per program of the router."""
LOGITS_BLOCK = 1024
MOST_PRODUCTS = 4096
"""Maximum of rows times experts for the router's own kernel, in which every row reads the router's
weight again."""
MOST_CHOICES = 4096
"""Maximum of rows times experts, both padded to powers of two, of one program."""
COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a product over blocks."""

    tile: int
    """Weight rows of a program."""
    block: int
    """Width that a program reads at a time."""
    stages: int
    """Reads in flight."""
    warps: int = 4


GATE_UP = {
    16: Tiling(tile=64, block=128, stages=5),
    32: Tiling(tile=128, block=64, stages=5),
    64: Tiling(tile=128, block=64, stages=5),
    128: Tiling(tile=128, block=64, stages=4, warps=8),
}
"""By rows of a block: the fastest on an H200 of those that fit into the 99 KiB which a program of
every GPU since Ampere can have."""
DOWN = {
    16: Tiling(tile=64, block=128, stages=3),
    32: Tiling(tile=128, block=64, stages=3),
    64: Tiling(tile=128, block=64, stages=4),
    128: Tiling(tile=128, block=64, stages=4, warps=8),
}
WIDE = Tiling(tile=32, block=32, stages=2)
"""For fp32, whose products do not run on tensor cores."""


def tiling_for(products: dict[int, Tiling], block_rows: int, dtype: torch.dtype) -> Tiling:
    """Look up the tiling in ``GATE_UP`` or ``DOWN``."""
    if dtype == torch.float32:
        return WIDE
    return products[min((size for size in products if size >= block_rows), default=128)]


@triton.jit
def router_logits_kernel(
    # inputs
    x_ptr,  # [T, width] floating
    weight_ptr,  # [E, width] floating
    # output
    logits_ptr,  # [T, E] fp32
    # sizes
    x_stride,
    num_experts,  # E
    width,
    # constants
    EXPERTS: tl.constexpr,  # per program
    NUM_BLOCKS: tl.constexpr,  # of the width
    BLOCK: tl.constexpr,  # columns per iteration
    PDL: tl.constexpr,
):
    """The router's products of one row with a few experts, in fp32."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    experts_inside = experts < num_experts
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros([EXPERTS, BLOCK], tl.float32)
    for block in tl.static_range(NUM_BLOCKS):
        columns = block * BLOCK + offsets
        columns_inside = columns < width
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns_inside, other=0).to(tl.float32)
        weight = tl.load(
            weight_ptr + experts[:, None] * width + columns[None, :],
            mask=experts_inside[:, None] & columns_inside[None, :],
            other=0,
        )
        acc += weight.to(tl.float32) * x[None, :]
    tl.store(logits_ptr + row * num_experts + experts, tl.sum(acc, axis=1), mask=experts_inside)


@triton.jit
def _mask_groups(
    choice,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):
    """Mask the experts of groups that are not among the best by the sum of their two best."""
    IN_GROUP: tl.constexpr = EXPERTS // GROUPS
    grouped = tl.reshape(choice, [ROWS, GROUPS, IN_GROUP])
    best = tl.max(grouped, axis=2)
    best_index = tl.argmax(grouped, axis=2)
    others = tl.where(
        tl.arange(0, IN_GROUP)[None, None, :] == best_index[:, :, None], float("-inf"), grouped
    )
    score = tl.maximum(best + tl.max(others, axis=2), NAN_CHOICE)
    groups = tl.arange(0, GROUPS)[None, :]
    chosen = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        top = tl.argmax(score, axis=1)[:, None]
        chosen = tl.where(groups == top, 1, chosen)
        score = tl.where(groups == top, float("-inf"), score)
    kept = tl.where(chosen[:, :, None] != 0, grouped, MASKED_CHOICE)
    return tl.reshape(kept, [ROWS, EXPERTS])


@triton.jit(do_not_specialize=["num_rows"])
def assign_experts_kernel(
    # inputs
    logits_ptr,  # [T, E] fp32
    bias_ptr,  # [E] fp32
    # outputs
    weights_ptr,  # [T, SLOTS] fp32: of each pair
    pairs_ptr,  # [num_blocks, BLOCK_ROWS] int32: row * SLOTS + slot
    block_expert_ptr,  # [num_blocks] int32
    block_rows_ptr,  # [num_blocks] int32: filled rows
    # sizes
    num_rows,  # T
    num_experts,  # E
    num_blocks,
    scale,  # of the weights
    # constants
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,  # experts that every row goes to, numbered after the routed ones
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,  # that experts are taken from
    NORMALISE: tl.constexpr,  # divide the weights of a row by their sum
    ROWS: tl.constexpr,  # a power of two >= num_rows
    EXPERTS: tl.constexpr,  # a power of two >= num_experts
    BLOCKS: tl.constexpr,  # a power of two >= num_blocks
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: choose the experts of every row, then sort the rows into blocks by expert."""
    grid_dependency_synchronize(PDL)
    rows = tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    inside = (rows < num_rows)[:, None] & (experts < num_experts)[None, :]
    logits = tl.load(
        logits_ptr + rows[:, None] * num_experts + experts[None, :], mask=inside, other=0
    )
    scores = 1 / (1 + tl.exp(-logits))
    bias = tl.load(bias_ptr + experts, mask=experts < num_experts, other=0)
    choice = scores + bias[None, :]
    # a row of NaN still goes to TOP_K different experts, and stays alone with its NaN
    choice = tl.where(choice == choice, tl.maximum(choice, NAN_CHOICE), NAN_CHOICE)
    choice = tl.where((experts < num_experts)[None, :], choice, float("-inf"))
    if CHOSEN_GROUPS < GROUPS:
        choice = _mask_groups(choice, ROWS, EXPERTS, GROUPS, CHOSEN_GROUPS)

    SLOTS: tl.constexpr = TOP_K + SHARED
    chosen = tl.zeros([ROWS, EXPERTS], tl.int32)
    left = choice
    total = tl.zeros([ROWS], tl.float32)
    for _ in tl.static_range(TOP_K):
        top = tl.argmax(left, axis=1)[:, None]
        is_top = experts[None, :] == top
        chosen = tl.where(is_top, 1, chosen)
        total += tl.sum(tl.where(is_top, scores, 0.0), axis=1)
        left = tl.where(is_top, float("-inf"), left)
    factor = tl.full([ROWS], 1.0, tl.float32) * scale
    divisor = tl.full([ROWS], 1.0, tl.float32)
    if NORMALISE:
        divisor = total + 1e-20

    # blocks: shared experts first, then the routed ones; each expert starts a new block
    chosen = tl.where((rows < num_rows)[:, None], chosen, 0)
    rank = tl.cumsum(chosen, axis=0) - chosen
    count = tl.sum(chosen, axis=0)
    full_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    expert_blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_block = SHARED * full_blocks + tl.cumsum(expert_blocks, axis=0) - expert_blocks
    pair_index = first_block[None, :] * BLOCK_ROWS + rank
    left = choice
    for slot in tl.static_range(TOP_K):
        top = tl.argmax(left, axis=1)[:, None]
        is_top = experts[None, :] == top
        left = tl.where(is_top, float("-inf"), left)
        weight = tl.sum(tl.where(is_top, scores, 0.0), axis=1) / divisor * factor
        index = tl.sum(tl.where(is_top, pair_index, 0), axis=1)
        tl.store(weights_ptr + rows * SLOTS + slot, weight, mask=rows < num_rows)
        tl.store(pairs_ptr + index, rows * SLOTS + slot, mask=rows < num_rows)
    for shared in tl.static_range(SHARED):
        slot = TOP_K + shared
        index = shared * full_blocks * BLOCK_ROWS + rows
        tl.store(weights_ptr + rows * SLOTS + slot, 1.0, mask=rows < num_rows)
        tl.store(pairs_ptr + index, rows * SLOTS + slot, mask=rows < num_rows)

    blocks = tl.arange(0, BLOCKS)
    nth_block = blocks[:, None] - first_block[None, :]
    owned = (nth_block >= 0) & (nth_block < expert_blocks[None, :])
    expert = tl.sum(tl.where(owned, experts[None, :], 0), axis=1)
    filled = tl.sum(tl.where(owned, count[None, :] - nth_block * BLOCK_ROWS, 0), axis=1)
    is_shared = blocks < SHARED * full_blocks
    expert = tl.where(is_shared, num_experts + blocks // full_blocks, expert)
    filled = tl.where(is_shared, num_rows - (blocks % full_blocks) * BLOCK_ROWS, filled)
    filled = tl.minimum(filled, BLOCK_ROWS)
    tl.store(block_expert_ptr + blocks, expert, mask=blocks < num_blocks)
    tl.store(block_rows_ptr + blocks, filled, mask=blocks < num_blocks)


@triton.jit
def expert_gate_up_kernel(
    # inputs
    x_ptr,  # [T, width] floating
    weight_ptr,  # [E + SHARED, 2 * num_columns, width], as x; gates first
    pairs_ptr,  # [num_blocks, BLOCK_ROWS] int32: row * SLOTS + slot
    block_expert_ptr,  # [num_blocks] int32
    block_rows_ptr,  # [num_blocks] int32: filled rows
    # output
    out_ptr,  # [T * SLOTS, num_columns], as x
    # sizes
    x_stride,
    num_columns,
    width,
    num_blocks,
    # constants
    SLOTS: tl.constexpr,  # experts per row
    TILE: tl.constexpr,  # weight rows of a program, half of them gates
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # width per iteration
    EVEN: tl.constexpr,  # the width is a multiple of BLOCK
    STAGES: tl.constexpr,  # iterations in flight
    PDL: tl.constexpr,
):
    """silu(x @ gate) * (x @ up) of one block of rows and a few columns."""
    grid_dependency_synchronize(PDL)
    block = tl.program_id(0) % num_blocks
    tile = tl.program_id(0) // num_blocks
    filled = tl.load(block_rows_ptr + block)
    if filled > 0:
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        COLUMNS: tl.constexpr = TILE // 2
        tile_rows = tl.arange(0, TILE)
        rows = tl.arange(0, BLOCK_ROWS)
        column = tl.minimum(tile * COLUMNS + tile_rows % COLUMNS, num_columns - 1)
        weight_row = (expert * 2 + tile_rows // COLUMNS) * num_columns + column
        # rows beyond the last repeat it, and are not stored
        pair = tl.load(pairs_ptr + block * BLOCK_ROWS + tl.minimum(rows, filled - 1)).to(tl.int64)
        offsets = tl.arange(0, BLOCK)
        weight_ptrs = weight_ptr + weight_row[:, None] * width + offsets[None, :]
        x_ptrs = x_ptr + (pair // SLOTS)[:, None] * x_stride + offsets[None, :]
        acc = tl.zeros([TILE, BLOCK_ROWS], tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            if EVEN:
                weight = tl.load(weight_ptrs + start)
                x = tl.load(x_ptrs + start)
            else:
                inside = (start + offsets < width)[None, :]
                weight = tl.load(weight_ptrs + start, mask=inside, other=0)
                x = tl.load(x_ptrs + start, mask=inside, other=0)
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        dtype = out_ptr.dtype.element_ty
        both = tl.permute(tl.reshape(acc, [2, COLUMNS, BLOCK_ROWS]), (1, 2, 0))
        gate, up = tl.split(both)
        active = silu_mul(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)
        out_column = tile * COLUMNS + tl.arange(0, COLUMNS)
        out_offsets = pair[None, :] * num_columns + out_column[:, None]
        is_stored = (rows < filled)[None, :] & (out_column < num_columns)[:, None]
        tl.store(out_ptr + out_offsets, active, mask=is_stored)


@triton.jit
def expert_down_kernel(
    # inputs
    active_ptr,  # [T * SLOTS, width] floating
    weight_ptr,  # [E + SHARED, num_columns, width], as active
    row_weights_ptr,  # [T * SLOTS] fp32: of each pair
    pairs_ptr,  # [num_blocks, BLOCK_ROWS] int32: row * SLOTS + slot
    block_expert_ptr,  # [num_blocks] int32
    block_rows_ptr,  # [num_blocks] int32: filled rows
    # output
    out_ptr,  # [T * SLOTS, num_columns], as active
    # sizes
    num_columns,
    width,
    num_blocks,
    # constants
    TILE: tl.constexpr,  # weight rows of a program
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # width per iteration
    EVEN: tl.constexpr,  # the width is a multiple of BLOCK
    STAGES: tl.constexpr,  # iterations in flight
    PDL: tl.constexpr,
):
    """active @ down, times the router's weight, of one block of rows and a few columns."""
    grid_dependency_synchronize(PDL)
    block = tl.program_id(0) % num_blocks
    tile = tl.program_id(0) // num_blocks
    filled = tl.load(block_rows_ptr + block)
    if filled > 0:
        expert = tl.load(block_expert_ptr + block).to(tl.int64)
        columns = tile * TILE + tl.arange(0, TILE)
        rows = tl.arange(0, BLOCK_ROWS)
        weight_row = expert * num_columns + tl.minimum(columns, num_columns - 1)
        pair = tl.load(pairs_ptr + block * BLOCK_ROWS + tl.minimum(rows, filled - 1)).to(tl.int64)
        offsets = tl.arange(0, BLOCK)
        weight_ptrs = weight_ptr + weight_row[:, None] * width + offsets[None, :]
        active_ptrs = active_ptr + pair[:, None] * width + offsets[None, :]
        acc = tl.zeros([TILE, BLOCK_ROWS], tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            if EVEN:
                weight = tl.load(weight_ptrs + start)
                active = tl.load(active_ptrs + start)
            else:
                inside = (start + offsets < width)[None, :]
                weight = tl.load(weight_ptrs + start, mask=inside, other=0)
                active = tl.load(active_ptrs + start, mask=inside, other=0)
            acc = tl.dot(weight, tl.trans(active), acc, input_precision="ieee")
        dtype = out_ptr.dtype.element_ty
        row_weight = tl.load(row_weights_ptr + pair)
        out = (acc.to(dtype).to(tl.float32) * row_weight[None, :]).to(dtype)
        out_offsets = pair[None, :] * num_columns + columns[:, None]
        is_stored = (rows < filled)[None, :] & (columns < num_columns)[:, None]
        tl.store(out_ptr + out_offsets, out, mask=is_stored)


@triton.jit
def combine_experts_kernel(
    # input
    parts_ptr,  # [T, TOP_K + SHARED, width] floating
    # output
    out_ptr,  # [T, width], as the parts
    # sizes
    width,
    # constants
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    PDL: tl.constexpr,
):
    """A block of columns of one row: sum of its routed experts, then of the shared ones."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dtype = out_ptr.dtype.element_ty
    part_ptrs = parts_ptr + row * (TOP_K + SHARED) * width + columns
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(part_ptrs + slot * width, mask=inside, other=0).to(tl.float32)
    if SHARED > 0:
        shared = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(SHARED):
            shared += tl.load(part_ptrs + (TOP_K + slot) * width, mask=inside, other=0).to(
                tl.float32
            )
        total = total.to(dtype).to(tl.float32) + shared.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, total.to(dtype), mask=inside)


def router_logits_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One launch for few rows, else torch's product in fp32."""
    num_rows, width = x.shape
    num_experts = weight.shape[0]
    if num_rows * num_experts > MOST_PRODUCTS:
        return router_logits_reference(x, weight)
    expect_reachable(router_logits_kernel, "x", x)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    if logits.numel():
        block = min(LOGITS_BLOCK, triton.next_power_of_2(width))
        router_logits_kernel[(num_rows, triton.cdiv(num_experts, LOGITS_EXPERTS))](
            x_ptr=x,
            weight_ptr=weight,
            logits_ptr=logits,
            x_stride=x.stride(0),
            num_experts=num_experts,
            width=width,
            EXPERTS=LOGITS_EXPERTS,
            NUM_BLOCKS=triton.cdiv(width, block),
            BLOCK=block,
            num_warps=8,
            **pdl_options(x.device),
        )
    return logits


def assign_triton(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    num_blocks: int,
) -> Blocks:
    """One launch for few rows and experts, else the torch reference."""
    num_rows, num_experts = logits.shape
    rows, experts = triton.next_power_of_2(max(num_rows, 1)), triton.next_power_of_2(num_experts)
    padded_blocks = triton.next_power_of_2(max(num_blocks, 1))
    # the kernel separates groups by reshaping, which padding would break
    grouped = rule.topk_group < rule.num_groups
    if (
        max(rows, padded_blocks) * experts > MOST_CHOICES
        or num_rows == 0
        or (grouped and (experts != num_experts or num_experts < 2 * rule.num_groups))
    ):
        return assign_reference(
            logits, bias, rule, shared=shared, block_rows=block_rows, num_blocks=num_blocks
        )
    expect_reachable(assign_experts_kernel, "logits", logits)
    device = logits.device
    blocks = Blocks(
        weights=torch.empty(num_rows, rule.top_k + shared, dtype=torch.float32, device=device),
        pairs=torch.empty(num_blocks, block_rows, dtype=torch.int32, device=device),
        expert=torch.empty(num_blocks, dtype=torch.int32, device=device),
        filled=torch.empty(num_blocks, dtype=torch.int32, device=device),
    )
    assign_experts_kernel[(1,)](
        logits_ptr=logits,
        bias_ptr=bias.contiguous(),
        weights_ptr=blocks.weights,
        pairs_ptr=blocks.pairs,
        block_expert_ptr=blocks.expert,
        block_rows_ptr=blocks.filled,
        num_rows=num_rows,
        num_experts=num_experts,
        num_blocks=num_blocks,
        scale=rule.scale,
        TOP_K=rule.top_k,
        SHARED=shared,
        GROUPS=rule.num_groups if grouped else 1,
        CHOSEN_GROUPS=rule.topk_group if grouped else 1,
        NORMALISE=rule.normalise,
        ROWS=rows,
        EXPERTS=experts,
        BLOCKS=padded_blocks,
        BLOCK_ROWS=block_rows,
        num_warps=4 if rows * experts <= 1024 else 8,
        **pdl_options(logits.device),
    )
    return blocks


def gate_up_triton(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """One launch, which reads each needed expert once per block."""
    expect_reachable(expert_gate_up_kernel, "x", x)
    columns, width = weight.shape[1] // 2, weight.shape[2]
    out = torch.empty(blocks.weights.numel(), columns, dtype=x.dtype, device=x.device)
    cut = tiling_for(GATE_UP, blocks.block_rows, x.dtype)
    if out.numel():
        expert_gate_up_kernel[(blocks.num_blocks * triton.cdiv(columns, cut.tile // 2),)](
            x_ptr=x,
            weight_ptr=weight,
            pairs_ptr=blocks.pairs,
            block_expert_ptr=blocks.expert,
            block_rows_ptr=blocks.filled,
            out_ptr=out,
            x_stride=x.stride(0),
            num_columns=columns,
            width=width,
            num_blocks=blocks.num_blocks,
            SLOTS=blocks.slots,
            TILE=cut.tile,
            BLOCK_ROWS=blocks.block_rows,
            BLOCK=cut.block,
            EVEN=width % cut.block == 0,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **pdl_options(x.device),
        )
    return out


def down_triton(active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """One launch, which reads each needed expert once per block."""
    expect_reachable(expert_down_kernel, "active", active)
    columns, width = weight.shape[1], weight.shape[2]
    out = torch.empty(blocks.weights.numel(), columns, dtype=active.dtype, device=active.device)
    cut = tiling_for(DOWN, blocks.block_rows, active.dtype)
    if out.numel():
        expert_down_kernel[(blocks.num_blocks * triton.cdiv(columns, cut.tile),)](
            active_ptr=active,
            weight_ptr=weight,
            row_weights_ptr=blocks.weights,
            pairs_ptr=blocks.pairs,
            block_expert_ptr=blocks.expert,
            block_rows_ptr=blocks.filled,
            out_ptr=out,
            num_columns=columns,
            width=width,
            num_blocks=blocks.num_blocks,
            TILE=cut.tile,
            BLOCK_ROWS=blocks.block_rows,
            BLOCK=cut.block,
            EVEN=width % cut.block == 0,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **pdl_options(active.device),
        )
    return out


def combine_triton(parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor:
    """One launch, one program per row and block of columns."""
    expect_reachable(combine_experts_kernel, "parts", parts)
    slots = top_k + shared
    num_rows, width = parts.shape[0] // slots, parts.shape[1]
    out = torch.empty(num_rows, width, dtype=parts.dtype, device=parts.device)
    if out.numel():
        block = min(COMBINE_BLOCK, triton.next_power_of_2(width))
        combine_experts_kernel[(num_rows, triton.cdiv(width, block))](
            parts_ptr=parts,
            out_ptr=out,
            width=width,
            TOP_K=top_k,
            SHARED=shared,
            BLOCK=block,
            num_warps=4,
            **pdl_options(parts.device),
        )
    return out

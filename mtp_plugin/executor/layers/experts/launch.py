"""The mixture of experts on the device: outputs and grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from mtp_plugin.executor.layers.experts import reference
from mtp_plugin.executor.layers.experts.contract import Blocks, RouterRule
from mtp_plugin.executor.layers.experts.kernel import (
    assign_kernel,
    combine_kernel,
    down_kernel,
    gate_up_kernel,
    logits_kernel,
)
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options

LOGITS_EXPERTS = 8
"""Experts that one program of the router takes."""
LOGITS_BLOCK = 1024
MOST_PRODUCTS = 4096
"""Rows times experts up to which the router's own kernel is used; beyond, every row would read the
router's weight again."""
MOST_CHOICES = 4096
"""Rows times experts, both padded to powers of two, that one program can hold."""
COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class Tiling:
    """How a product over blocks is cut."""

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
    """The tiling out of ``GATE_UP`` or ``DOWN``."""
    if dtype == torch.float32:
        return WIDE
    return products[min((size for size in products if size >= block_rows), default=128)]


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As at the door: one launch for few rows, else torch's product in fp32."""
    num_rows, width = x.shape
    num_experts = weight.shape[0]
    if num_rows * num_experts > MOST_PRODUCTS:
        return reference.router_logits(x, weight)
    expect_reachable(logits_kernel, "x", x)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    if logits.numel():
        block = min(LOGITS_BLOCK, triton.next_power_of_2(width))
        logits_kernel[(num_rows, triton.cdiv(num_experts, LOGITS_EXPERTS))](
            x_ptr=x,
            weight_ptr=weight,
            logits_ptr=logits,
            x_stride=x.stride(0),
            num_experts=num_experts,
            width=width,
            EXPERTS=LOGITS_EXPERTS,
            PIECES=triton.cdiv(width, block),
            BLOCK=block,
            num_warps=8,
            **pdl_options(x.device),
        )
    return logits


def assign(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    num_blocks: int,
) -> Blocks:
    """As at the door: one launch for few rows and experts, else the torch side."""
    num_rows, num_experts = logits.shape
    rows, experts = triton.next_power_of_2(max(num_rows, 1)), triton.next_power_of_2(num_experts)
    padded_blocks = triton.next_power_of_2(max(num_blocks, 1))
    # groups are told apart by reshaping, which padding would break
    grouped = rule.topk_group < rule.num_groups
    if (
        max(rows, padded_blocks) * experts > MOST_CHOICES
        or num_rows == 0
        or (grouped and (experts != num_experts or num_experts < 2 * rule.num_groups))
    ):
        return reference.assign(
            logits, bias, rule, shared=shared, block_rows=block_rows, num_blocks=num_blocks
        )
    expect_reachable(assign_kernel, "logits", logits)
    device = logits.device
    blocks = Blocks(
        weights=torch.empty(num_rows, rule.top_k + shared, dtype=torch.float32, device=device),
        pairs=torch.empty(num_blocks, block_rows, dtype=torch.int32, device=device),
        expert=torch.empty(num_blocks, dtype=torch.int32, device=device),
        filled=torch.empty(num_blocks, dtype=torch.int32, device=device),
    )
    assign_kernel[(1,)](
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


def gate_up(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """As at the door, in one launch that reads each needed expert once per block."""
    expect_reachable(gate_up_kernel, "x", x)
    columns, width = weight.shape[1] // 2, weight.shape[2]
    out = torch.empty(blocks.weights.numel(), columns, dtype=x.dtype, device=x.device)
    cut = tiling_for(GATE_UP, blocks.block_rows, x.dtype)
    if out.numel():
        gate_up_kernel[(blocks.num_blocks * triton.cdiv(columns, cut.tile // 2),)](
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


def down(active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """As at the door, in one launch that reads each needed expert once per block."""
    expect_reachable(down_kernel, "active", active)
    columns, width = weight.shape[1], weight.shape[2]
    out = torch.empty(blocks.weights.numel(), columns, dtype=active.dtype, device=active.device)
    cut = tiling_for(DOWN, blocks.block_rows, active.dtype)
    if out.numel():
        down_kernel[(blocks.num_blocks * triton.cdiv(columns, cut.tile),)](
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


def combine(parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor:
    """As at the door, in one launch."""
    expect_reachable(combine_kernel, "parts", parts)
    slots = top_k + shared
    num_rows, width = parts.shape[0] // slots, parts.shape[1]
    out = torch.empty(num_rows, width, dtype=parts.dtype, device=parts.device)
    if out.numel():
        block = min(COMBINE_BLOCK, triton.next_power_of_2(width))
        combine_kernel[(num_rows, triton.cdiv(width, block))](
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

"""Checks, scratch and grids of the product of few rows with a large weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.models.fused.skinny.kernel import skinny_kernel
from mtp_plugin.triton_device import early_launch, expect_reachable

MOST_ROWS = 64
MOST_TILES = 1 << 16
PROGRAMS = 384
"""Programs that a split is to give, about three per multiprocessor."""


@dataclass(frozen=True)
class SkinnyTiling:
    """How the weight is cut."""

    tile: int
    """Weight rows of a program."""
    block: int
    """Width that a program reads at a time."""
    split: int
    """Programs that share a tile, each with a piece of its width."""
    stages: int
    """Reads in flight."""
    warps: int = 4
    fetch: int = 1024
    """Bytes of each weight row that a program asks for before its inputs are there; 0: none."""


def new_tickets(device: torch.device | str) -> torch.Tensor:
    """Counters of the splits that arrived, 0 between calls; for calls that follow each other."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def padded_rows(num_rows: int) -> int:
    """Rows of x that a program computes for ``num_rows``."""
    return 16 if num_rows <= 16 else int(triton.next_power_of_2(num_rows))


def tiling_for(num_columns: int, width: int, dtype: torch.dtype, *, gated: bool) -> SkinnyTiling:
    """The tiling that is used where none is given."""
    if dtype == torch.float32:
        return SkinnyTiling(tile=32, block=32, split=1, stages=2)
    tiles = triton.cdiv(num_columns, 32 if gated else 64)
    split = min(max(PROGRAMS // tiles, 1), max(width // 1024, 1), 8)
    return SkinnyTiling(tile=64, block=128, split=split, stages=4)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tickets: torch.Tensor,
    gated: bool = False,
    tiling: SkinnyTiling | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear``, or silu(gate) * up of its halves, of up to 64 rows.

    Sums of splits are added in their order, whichever arrives last: equal inputs give equal bits.

    Args:
        x: [T, width], T <= 64.
        weight: [columns, width]; gated: [2 * columns, width], gates first.
        bias: [columns]; None where gated.
        tickets: from ``new_tickets``.
        gated: apply the gated activation.
        tiling: None: chosen by the shape.

    Returns:
        [T, columns].

    Raises:
        TensorContractError: operands that do not fit, or too many rows.
    """
    expect_reachable(skinny_kernel, "x", x)
    expect(
        x.dim() == 2 and x.shape[0] <= MOST_ROWS and x.stride(1) == 1,
        TensorContractError,
        f"x: expected up to {MOST_ROWS} contiguous rows, got {list(x.shape)} with strides "
        f"{list(x.stride())}",
    )
    num_rows, width = x.shape
    expect(
        weight.dim() == 2
        and weight.shape[1] == width
        and weight.is_contiguous()
        and weight.dtype == x.dtype,
        TensorContractError,
        f"weight: expected contiguous {x.dtype} [columns, {width}], got {weight.dtype} "
        f"{list(weight.shape)}",
    )
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    expect(
        bias is None or (not gated and bias.shape == (columns,)),
        TensorContractError,
        f"bias: expected {'none beside a gate' if gated else [columns]}, got "
        f"{None if bias is None else list(bias.shape)}",
    )
    cut = tiling or tiling_for(columns, width, x.dtype, gated=gated)
    tiles = triton.cdiv(columns, cut.tile // 2 if gated else cut.tile)
    expect(
        tickets.dtype == torch.int32 and (cut.split == 1 or tickets.shape[0] >= tiles),
        TensorContractError,
        f"tickets: expected int32 for {tiles} tiles, got {tickets.dtype} {list(tickets.shape)}",
    )
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = padded_rows(num_rows)
    scratch = (tiles * cut.split * cut.tile * rows,) if cut.split > 1 else (1,)
    partial = torch.empty(scratch, dtype=torch.float32, device=x.device)
    piece = triton.cdiv(triton.cdiv(width, cut.block), cut.split) * cut.block
    skinny_kernel[(tiles, cut.split)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=x if bias is None else bias,
        out_ptr=out,
        partial_ptr=partial,
        ticket_ptr=tickets,
        x_stride=x.stride(0),
        num_rows=num_rows,
        num_columns=columns,
        width=width,
        piece=piece,
        BIASED=bias is not None,
        GATED=gated,
        SPLIT=cut.split,
        TILE=cut.tile,
        ROWS=rows,
        BLOCK=cut.block,
        EVEN=width % cut.block == 0,
        STAGES=cut.stages,
        FETCH=cut.fetch if width * x.element_size() % 32 == 0 else 0,
        num_warps=cut.warps,
        **early_launch(x.device),
    )
    return out

"""The norms on the device: outputs and grids."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.executor.layers.norm.kernel import join_kernel, rms_norm_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As at the door, in one launch."""
    expect_reachable(rms_norm_kernel, "x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As at the door, in one launch."""
    expect_reachable(rms_norm_kernel, "x", x)
    expect_reachable(rms_norm_kernel, "residual", residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, total, out)
    return out, total


def join_norms(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    *,
    embedding_eps: float,
    hidden_eps: float,
    embedding_first: bool,
) -> torch.Tensor:
    """As at the door, in one launch."""
    expect_reachable(join_kernel, "embedding", embedding)
    expect_reachable(join_kernel, "hidden", hidden)
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        join_kernel[(num_rows, 2)](
            embedding_ptr=embedding,
            ids_ptr=hidden if ids is None else ids,
            hidden_ptr=hidden,
            embedding_weight_ptr=embedding_weight,
            hidden_weight_ptr=hidden_weight,
            out_ptr=out,
            ids_stride=0 if ids is None else ids.stride(0),
            embedding_stride=embedding.stride(0),
            hidden_stride=hidden.stride(0),
            width=width,
            embedding_eps=embedding_eps,
            hidden_eps=hidden_eps,
            GATHER=ids is not None,
            EMBEDDING_FIRST=embedding_first,
            BLOCK=block,
            num_warps=_warps(block),
            **pdl_options(hidden.device),
        )
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if x.shape[0] == 0:
        return
    block = triton.next_power_of_2(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](
        x_ptr=x,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        sum_ptr=total,
        out_ptr=out,
        x_stride=x.stride(0),
        residual_stride=x.stride(0) if residual is None else residual.stride(0),
        width=x.shape[1],
        eps=eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_options(x.device),
    )


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)

"""Checks, outputs and grids of the norms."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.executor.layers.norm.kernel import join_kernel, rms_norm_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, in one launch."""
    _check_rows("x", x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in one launch."""
    _check_rows("x", x, weight)
    _check_rows("residual", residual, weight)
    expect(
        residual.shape == x.shape and residual.dtype == x.dtype,
        TensorContractError,
        f"residual: expected {x.dtype} {list(x.shape)} like x, got {residual.dtype} "
        f"{list(residual.shape)}",
    )
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
    """As the reference, in one launch."""
    _check_rows("embedding", embedding, embedding_weight)
    _check_rows("hidden", hidden, hidden_weight)
    num_rows, width = hidden.shape
    given = embedding.shape[0] if ids is None else ids.shape[0]
    expect(
        given == num_rows and embedding.shape[1] == width,
        TensorContractError,
        f"hidden: expected one row of {embedding.shape[1]} for each of {given} embeddings, got "
        f"{list(hidden.shape)}",
    )
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


def _check_rows(name: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
    expect_reachable(rms_norm_kernel, name, rows)
    expect(
        rows.dim() == 2
        and rows.shape[1:] == weight.shape
        and (rows.stride(1) == 1 or rows.shape[1] == 1),
        TensorContractError,
        f"{name}: expected [rows, {weight.shape[0]}] with contiguous rows, got {list(rows.shape)} "
        f"with strides {list(rows.stride())}",
    )

"""The doors of the mixture of experts, in the order of its steps.

T rows, E routed experts and ``shared`` ones behind them, slots = top_k + shared.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.experts import reference
from mtp_plugin.executor.layers.experts.contract import Blocks, RouterRule, most_blocks
from mtp_plugin.kernels.backend import Backend


def router_logits(x: torch.Tensor, weight: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """The rows times the router's weight, in fp32.

    Args:
        x: [T, width] with contiguous rows.
        weight: [E, width], contiguous; any dtype.

    Returns:
        [T, E] fp32.

    Raises:
        TensorContractError: rows or weights of other shapes or strides.
    """
    if weight.dim() != 2 or not weight.is_contiguous():
        raise TensorContractError(
            f"weight: expected contiguous [E, width], got {list(weight.shape)} with strides "
            f"{list(weight.stride())}"
        )
    _expect_rows("x", x, None, weight.shape[1])
    return _side(backend).router_logits(x, weight)


def assign(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    backend: Backend,
) -> Blocks:
    """The experts of every row, and the rows of every expert in blocks.

    Scores are sigmoids; the correction bias counts for the choice alone. Equal choices go to the
    lower expert. A row of NaN goes to ``top_k`` experts with weights of NaN.

    Args:
        logits: [T, E] fp32, contiguous.
        bias: [E] fp32.
        rule: of the router.
        shared: experts that every row takes, with a weight of 1.
        block_rows: rows of a block.

    Raises:
        TensorContractError: tensors or a rule that do not fit.
    """
    num_blocks = _check_router(logits, bias, rule, shared, block_rows)
    return _side(backend).assign(
        logits, bias, rule, shared=shared, block_rows=block_rows, num_blocks=num_blocks
    )


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, *, backend: Backend
) -> torch.Tensor:
    """silu(x @ gate) * (x @ up) of every pair.

    In torch the blocks are read on the host, here and in :func:`down`: to compare with, not to run
    a step.

    Args:
        x: [T, width] with contiguous rows.
        weight: [experts, 2 * columns, width], contiguous, gates first.
        blocks: of the T rows.

    Returns:
        [T * slots, columns].

    Raises:
        TensorContractError: operands or blocks that do not fit.
    """
    _check_product(x, weight, blocks)
    _expect_rows("x", x, blocks.weights.shape[0], weight.shape[2])
    return _side(backend).gate_up(x, weight, blocks)


def down(
    active: torch.Tensor, weight: torch.Tensor, blocks: Blocks, *, backend: Backend
) -> torch.Tensor:
    """active @ down times the router's weight, of every pair.

    Args:
        active: [T * slots, width], contiguous.
        weight: [experts, columns, width], contiguous.
        blocks: of the T rows.

    Returns:
        [T * slots, columns].

    Raises:
        TensorContractError: operands or blocks that do not fit.
    """
    _check_product(active, weight, blocks)
    _expect_rows("active", active, blocks.weights.numel(), weight.shape[2])
    if not active.is_contiguous():
        raise TensorContractError(
            f"active: expected contiguous rows without gaps between them, got {list(active.shape)} "
            f"with strides {list(active.stride())}"
        )
    return _side(backend).down(active, weight, blocks)


def combine(parts: torch.Tensor, *, top_k: int, shared: int, backend: Backend) -> torch.Tensor:
    """What the routed experts gave, added in fp32 and rounded, plus what the shared ones gave.

    Args:
        parts: [T * (top_k + shared), columns], contiguous.
        top_k, shared: experts of a row.

    Returns:
        [T, columns].

    Raises:
        TensorContractError: parts of another shape or with gaps.
    """
    slots = top_k + shared
    if parts.dim() != 2 or parts.shape[0] % slots != 0 or not parts.is_contiguous():
        raise TensorContractError(
            f"parts: expected contiguous [T * {slots}, columns], got {list(parts.shape)} with "
            f"strides {list(parts.stride())}"
        )
    return _side(backend).combine(parts, top_k=top_k, shared=shared)


class _Side(Protocol):
    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def assign(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor,
        rule: RouterRule,
        *,
        shared: int,
        block_rows: int,
        num_blocks: int,
    ) -> Blocks: ...

    def gate_up(self, x: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor: ...

    def down(self, active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor: ...

    def combine(self, parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.executor.layers.experts import launch

    return launch


def _check_router(
    logits: torch.Tensor, bias: torch.Tensor, rule: RouterRule, shared: int, block_rows: int
) -> int:
    """Check one call and return how many blocks it has."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise TensorContractError(
            f"logits: expected contiguous fp32 [T, E], got {logits.dtype} {list(logits.shape)} "
            f"with strides {list(logits.stride())}"
        )
    num_rows, num_experts = map(int, logits.shape)
    if bias.shape != (num_experts,) or bias.dtype != torch.float32:
        raise TensorContractError(
            f"bias: expected fp32 [{num_experts}], got {bias.dtype} {list(bias.shape)}"
        )
    if not (
        0 < rule.top_k <= num_experts
        and rule.num_groups > 0
        and num_experts % rule.num_groups == 0
        and 0 < rule.topk_group <= rule.num_groups
        and rule.topk_group * (num_experts // rule.num_groups) >= rule.top_k
    ):
        raise TensorContractError(
            f"rule: expected top_k experts out of topk_group equal groups of {num_experts}, got "
            f"{rule}"
        )
    if block_rows <= 0:
        raise TensorContractError(f"block_rows: expected at least 1, got {block_rows}")
    return most_blocks(num_rows, num_experts, rule.top_k, shared, block_rows)


def _check_product(rows: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> None:
    """Check weights and blocks of one product; the rows themselves are left."""
    if weight.dim() != 3 or not weight.is_contiguous() or weight.dtype != rows.dtype:
        raise TensorContractError(
            f"weight: expected contiguous {rows.dtype} [experts, columns, width], got "
            f"{weight.dtype} {list(weight.shape)} with strides {list(weight.stride())}"
        )
    if not blocks.expert.shape == blocks.filled.shape == (blocks.num_blocks,):
        raise TensorContractError(
            f"blocks: expected an expert and a count for each of {blocks.num_blocks}, got "
            f"{list(blocks.expert.shape)} and {list(blocks.filled.shape)}"
        )
    for name, part in vars(blocks).items():
        if not part.is_contiguous():
            raise TensorContractError(
                f"blocks.{name}: expected a contiguous tensor, got {list(part.shape)} with strides "
                f"{list(part.stride())}"
            )


def _expect_rows(name: str, rows: torch.Tensor, count: int | None, width: int) -> None:
    """Check [count, width] with contiguous rows; None: however many."""
    fits = rows.dim() == 2 and rows.shape[1] == width and rows.stride(1) == 1
    if not fits or (count is not None and rows.shape[0] != count):
        raise TensorContractError(
            f"{name}: expected [{'T' if count is None else count}, {width}] with contiguous rows, "
            f"got {list(rows.shape)} with strides {list(rows.stride())}"
        )

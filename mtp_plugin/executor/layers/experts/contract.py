"""What routing decides and how pairs of rows and experts are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect


@dataclass(frozen=True)
class RouterRule:
    """How scores become experts and weights."""

    top_k: int
    num_groups: int
    topk_group: int
    """Groups that experts are taken from; as many as there are: all."""
    normalise: bool
    """Whether the weights of a row are divided by their sum."""
    scale: float


@dataclass(frozen=True)
class Blocks:
    """Pairs by expert. Entries behind the filled rows of a block mean nothing."""

    weights: torch.Tensor
    """[T, slots] fp32: of each pair; 1 for shared experts."""
    pairs: torch.Tensor
    """[blocks, block_rows] int32."""
    expert: torch.Tensor
    """[blocks] int32: routed experts first, then shared ones; any where nothing is filled."""
    filled: torch.Tensor
    """[blocks] int32: filled rows; 0 behind the last block."""

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return int(self.weights.shape[1])

    @property
    def num_blocks(self) -> int:
        """Blocks, filled or not."""
        return int(self.pairs.shape[0])

    @property
    def block_rows(self) -> int:
        """Rows that a block holds."""
        return int(self.pairs.shape[1])


def most_blocks(num_rows: int, num_experts: int, top_k: int, shared: int, block_rows: int) -> int:
    """Blocks that pairs can take at most, however they are routed."""
    whole = -(-num_rows // block_rows)
    pairs = num_rows * top_k
    hit = min(num_experts, pairs)
    # a row takes an expert once, so that none has more than all rows
    return shared * whole + min(hit * whole, hit + (pairs - hit) // block_rows)


def check_router(
    logits: torch.Tensor, bias: torch.Tensor, rule: RouterRule, block_rows: int
) -> tuple[int, int]:
    """Check one call and return (T, E).

    Raises:
        TensorContractError: naming the tensor or rule, what was expected and what came.
    """
    expect(
        logits.dim() == 2 and logits.dtype == torch.float32 and logits.is_contiguous(),
        TensorContractError,
        f"logits: expected contiguous fp32 [T, E], got {logits.dtype} {list(logits.shape)}",
    )
    num_rows, num_experts = map(int, logits.shape)
    expect(
        bias.shape == (num_experts,) and bias.dtype == torch.float32,
        TensorContractError,
        f"bias: expected fp32 [{num_experts}], got {bias.dtype} {list(bias.shape)}",
    )
    expect(
        0 < rule.top_k <= num_experts
        and rule.num_groups > 0
        and num_experts % rule.num_groups == 0
        and 0 < rule.topk_group <= rule.num_groups
        and rule.topk_group * (num_experts // rule.num_groups) >= rule.top_k,
        TensorContractError,
        f"rule: expected top_k experts out of topk_group equal groups of {num_experts}, got {rule}",
    )
    expect(
        block_rows > 0,
        TensorContractError,
        f"block_rows: expected at least 1, got {block_rows}",
    )
    return num_rows, num_experts


def check_product(
    name: str, rows: torch.Tensor, weight: torch.Tensor, blocks: Blocks, num_rows: int
) -> None:
    """Check the operands of one product over blocks.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    fits = weight.dim() == 3 and weight.is_contiguous() and weight.dtype == rows.dtype
    expect(
        fits,
        TensorContractError,
        f"weight: expected contiguous {rows.dtype} [experts, columns, width], got {weight.dtype} "
        f"{list(weight.shape)}",
    )
    expect(
        rows.dim() == 2
        and tuple(rows.shape) == (num_rows, weight.shape[2])
        and rows.stride(1) == 1,
        TensorContractError,
        f"{name}: expected [{num_rows}, {weight.shape[2]}] with contiguous rows, got "
        f"{list(rows.shape)} with strides {list(rows.stride())}",
    )
    expect(
        blocks.expert.shape == blocks.filled.shape == (blocks.num_blocks,),
        TensorContractError,
        f"blocks: expected an expert and a count for each of {blocks.num_blocks}, got "
        f"{list(blocks.expert.shape)} and {list(blocks.filled.shape)}",
    )

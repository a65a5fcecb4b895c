"""A mixture of experts: rows -> their experts -> blocks of rows by expert -> two products -> rows.

T rows, E routed experts of which each row takes ``top_k``, then ``shared`` experts that every row
takes; slots = top_k + shared. A pair is a row and one of its experts, ``row * slots + slot``. Each
block holds pairs of one expert. Only the device knows how many blocks are filled; grids cover the
maximum, so that a step can be captured whatever the router chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.hosts.embedded.layers.mlp import silu_mul_reference
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, expect_tensor

# scores of experts that sort after all finite ones: NaN, then experts of groups not chosen
NAN_CHOICE = -3.0e38
MASKED_CHOICE = -3.2e38


@dataclass(frozen=True)
class RouterRule:
    """How scores become experts and weights."""

    top_k: int
    num_groups: int
    topk_group: int
    """Groups that experts are taken from; ``num_groups``: all."""
    normalise: bool
    """Whether the weights of a row are divided by their sum."""
    scale: float


@dataclass(frozen=True)
class Blocks:
    """Pairs sorted by expert, contiguous. Unfilled rows of a block are undefined."""

    weights: torch.Tensor
    """[T, slots] fp32: of each pair; 1 for shared experts."""
    pairs: torch.Tensor
    """[blocks, block_rows] int32."""
    expert: torch.Tensor
    """[blocks] int32: routed experts are numbered first; undefined where no row is filled."""
    filled: torch.Tensor
    """[blocks] int32: number of filled rows; 0 for unused blocks."""

    @property
    def slots(self) -> int:
        """Experts per row."""
        return int(self.weights.shape[1])

    @property
    def num_blocks(self) -> int:
        """Blocks, filled or not."""
        return int(self.pairs.shape[0])

    @property
    def block_rows(self) -> int:
        """Rows per block."""
        return int(self.pairs.shape[1])


def block_rows_for(num_rows: int) -> int:
    """Rows per block for ``num_rows`` rows; a function of shapes alone."""
    if num_rows <= 32:
        return 16
    if num_rows <= 64:
        return 32
    return 64 if num_rows <= 512 else 128


def most_blocks(num_rows: int, num_experts: int, top_k: int, shared: int, block_rows: int) -> int:
    """Maximum number of blocks, whatever the router chooses."""
    whole = -(-num_rows // block_rows)
    pairs = num_rows * top_k
    hit = min(num_experts, pairs)
    # a row takes an expert at most once, so no expert has more than all rows
    return shared * whole + min(hit * whole, hit + (pairs - hit) // block_rows)


def router_logits(x: torch.Tensor, weight: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """Multiply the rows with the router's weight, in fp32.

    Args:
        x: [T, width] with contiguous rows.
        weight: [E, width], contiguous; any floating-point dtype.

    Returns:
        [T, E] fp32.
    """
    expect_tensor("weight", weight, dtype=FLOATS, shape=("E", "width"), contiguous=True)
    expect_tensor("x", x, dtype=FLOATS, shape=("T", int(weight.shape[1])), contiguous="rows")
    return backend.dispatch(router_logits_reference)(x, weight)


def assign(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    backend: Backend,
) -> Blocks:
    """Choose the experts of every row, and sort the rows of every expert into blocks.

    Scores are sigmoids; the correction bias changes the choice, not the weights. Ties go to the
    lower expert. A row of NaN goes to ``top_k`` experts with weights of NaN.

    Args:
        logits: [T, E] fp32, contiguous.
        bias: [E] fp32.
        shared: experts that every row takes, with a weight of 1.
    """
    num_blocks = _check_router(logits, bias, rule, shared, block_rows)
    return backend.dispatch(assign_reference)(
        logits, bias, rule, shared=shared, block_rows=block_rows, num_blocks=num_blocks
    )


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, *, backend: Backend
) -> torch.Tensor:
    """Compute silu(x @ gate) * (x @ up) of every pair.

    The torch reference of this and of :func:`down` reads the blocks on the host: it serves
    comparisons, not steps.

    Args:
        x: [T, width] with contiguous rows.
        weight: [experts, 2 * columns, width], contiguous, gates first.
        blocks: of the T rows.

    Returns:
        [T * slots, columns].
    """
    _check_product(x, weight, blocks)
    shape = (int(blocks.weights.shape[0]), int(weight.shape[2]))
    expect_tensor("x", x, dtype=FLOATS, shape=shape, contiguous="rows")
    return backend.dispatch(gate_up_reference)(x, weight, blocks)


def down(
    active: torch.Tensor, weight: torch.Tensor, blocks: Blocks, *, backend: Backend
) -> torch.Tensor:
    """Compute active @ down times the router's weight, of every pair.

    Args:
        active: [T * slots, width], contiguous.
        weight: [experts, columns, width], contiguous.
        blocks: of the T rows.

    Returns:
        [T * slots, columns].
    """
    _check_product(active, weight, blocks)
    shape = (blocks.weights.numel(), int(weight.shape[2]))
    expect_tensor("active", active, dtype=FLOATS, shape=shape, contiguous=True)
    return backend.dispatch(down_reference)(active, weight, blocks)


def combine(parts: torch.Tensor, *, top_k: int, shared: int, backend: Backend) -> torch.Tensor:
    """Add the outputs of the routed experts in fp32 and round, then add those of the shared ones.

    Args:
        parts: [T * (top_k + shared), columns], contiguous.

    Returns:
        [T, columns].
    """
    slots = top_k + shared
    expect_tensor("parts", parts, dtype=FLOATS, shape=("T * slots", "columns"), contiguous=True)
    if parts.shape[0] % slots != 0:
        raise TensorContractError(
            f"parts: expected a multiple of {slots} rows, one per expert of each row, got "
            f"{list(parts.shape)}"
        )
    return backend.dispatch(combine_reference)(parts, top_k=top_k, shared=shared)


def router_logits_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x.to(torch.float32), weight.to(torch.float32))


def assign_reference(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    num_blocks: int,
) -> Blocks:
    num_rows, num_experts = logits.shape
    device = logits.device
    scores = logits.sigmoid()
    choice = scores + bias
    choice = torch.where(choice.isnan(), NAN_CHOICE, choice.clamp_min(NAN_CHOICE))
    if rule.topk_group < rule.num_groups:
        choice = _mask_groups(choice, rule)
    chosen_ids = choice.argsort(dim=-1, descending=True, stable=True)[:, : rule.top_k]
    weights = scores.gather(1, chosen_ids)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * rule.scale
    weights = torch.cat([weights, weights.new_ones(num_rows, shared)], dim=1)

    slots = rule.top_k + shared
    rows = torch.arange(num_rows, device=device)
    whole = -(-num_rows // block_rows)
    chosen = torch.zeros(num_rows, num_experts, dtype=torch.int64, device=device)
    chosen.scatter_(1, chosen_ids, 1)
    rank = chosen.cumsum(0) - chosen
    count = chosen.sum(0)
    expert_blocks = (count + block_rows - 1) // block_rows
    first_block = shared * whole + expert_blocks.cumsum(0) - expert_blocks
    routed_index = (first_block * block_rows + rank).gather(1, chosen_ids)  # [T, top_k]
    shared_index = torch.arange(shared, device=device) * whole * block_rows + rows[:, None]
    index = torch.cat([routed_index, shared_index], dim=1)
    pairs = torch.zeros(num_blocks * block_rows, dtype=torch.int32, device=device)
    every_pair = torch.arange(num_rows * slots, dtype=torch.int32, device=device)
    pairs.scatter_(0, index.reshape(-1), every_pair)

    blocks = torch.arange(num_blocks, device=device)
    nth_block = blocks[:, None] - first_block
    owned = (nth_block >= 0) & (nth_block < expert_blocks)
    expert = torch.where(owned, torch.arange(num_experts, device=device), 0).sum(1)
    filled = torch.where(owned, count - nth_block * block_rows, 0).sum(1)
    if shared:
        is_shared = blocks < shared * whole
        expert = torch.where(is_shared, num_experts + blocks // whole, expert)
        filled = torch.where(is_shared, num_rows - blocks % whole * block_rows, filled)
    return Blocks(
        weights=weights,
        pairs=pairs.reshape(num_blocks, block_rows),
        expert=expert.to(torch.int32),
        filled=filled.clamp_max(block_rows).to(torch.int32),
    )


def _mask_groups(choice: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    grouped = choice.unflatten(1, (rule.num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1).clamp_min(NAN_CHOICE)
    order = best.argsort(dim=-1, descending=True, stable=True)[:, : rule.topk_group]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
    return torch.where(kept.unsqueeze(-1), grouped, MASKED_CHOICE).flatten(1)


def gate_up_reference(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    out = x.new_empty(blocks.weights.numel(), weight.shape[1] // 2)
    for expert, pairs in _filled(blocks):
        out[pairs] = silu_mul_reference(functional.linear(x[pairs // blocks.slots], weight[expert]))
    return out


def down_reference(active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    out = active.new_empty(blocks.weights.numel(), weight.shape[1])
    weights = blocks.weights.reshape(-1, 1)
    for expert, pairs in _filled(blocks):
        product = functional.linear(active[pairs], weight[expert])
        out[pairs] = (product * weights[pairs]).to(out.dtype)
    return out


def _filled(blocks: Blocks) -> list[tuple[int, torch.Tensor]]:
    """(expert, its pairs) of every block that has any, read back to the host."""
    filled = zip(blocks.expert.tolist(), blocks.filled.tolist(), blocks.pairs.long(), strict=True)
    return [(expert, pairs[:count]) for expert, count, pairs in filled if count]


def combine_reference(parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor:
    slots = parts.unflatten(0, (-1, top_k + shared)).to(torch.float32)
    out: torch.Tensor = slots[:, :top_k].sum(1).to(parts.dtype)
    if shared:
        out = out + slots[:, top_k:].sum(1).to(parts.dtype)
    return out


def _check_router(
    logits: torch.Tensor, bias: torch.Tensor, rule: RouterRule, shared: int, block_rows: int
) -> int:
    """Check one call and return how many blocks it has."""
    expect_tensor("logits", logits, dtype=torch.float32, shape=("T", "E"), contiguous=True)
    num_rows, num_experts = map(int, logits.shape)
    expect_tensor("bias", bias, dtype=torch.float32, shape=(num_experts,))
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
    expect_int("shared", shared, 0)
    expect_int("block_rows", block_rows, 1)
    return most_blocks(num_rows, num_experts, rule.top_k, shared, block_rows)


def _check_product(rows: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> None:
    """Check weights and blocks of one product; the caller checks the shape of the rows."""
    expect_tensor("rows", rows, dtype=FLOATS)
    shape = ("experts", "columns", "width")
    expect_tensor("weight", weight, dtype=rows.dtype, shape=shape, contiguous=True)
    expect_tensor("blocks.weights", blocks.weights, dtype=torch.float32, contiguous=True)
    expect_tensor("blocks.pairs", blocks.pairs, dtype=torch.int32, contiguous=True)
    per_block = (blocks.num_blocks,)
    for name, part in (("expert", blocks.expert), ("filled", blocks.filled)):
        expect_tensor(f"blocks.{name}", part, dtype=torch.int32, shape=per_block, contiguous=True)

"""The mixture of experts in torch. Routing has fixed shapes, and so can be captured on a GPU."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.executor.layers.experts.contract import (
    Blocks,
    RouterRule,
    check_product,
    check_router,
    most_blocks,
)
from mtp_plugin.executor.layers.mlp.reference import silu_mul

NAN_CHOICE = -3.0e38
MASKED_CHOICE = -3.2e38


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, width] times the router's weight [E, width] in fp32, [T, E]."""
    return functional.linear(x.to(torch.float32), weight.to(torch.float32))


def assign(
    logits: torch.Tensor, bias: torch.Tensor, rule: RouterRule, *, shared: int, block_rows: int
) -> Blocks:
    """The experts of every row, and the rows of every expert in blocks.

    Scores are sigmoids; the correction bias counts for the choice alone. Equal choices go to the
    lower expert. A row of NaN goes to ``top_k`` experts with weights of NaN.

    Args:
        logits: [T, E] fp32. bias: [E] fp32. rule: of the router.
        shared: experts that every row takes, with a weight of 1.
        block_rows: rows of a block.

    Raises:
        TensorContractError: tensors or a rule that do not fit.
    """
    num_rows, num_experts = check_router(logits, bias, rule, block_rows)
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
    num_blocks = most_blocks(num_rows, num_experts, rule.top_k, shared, block_rows)
    rows = torch.arange(num_rows, device=device)
    whole = -(-num_rows // block_rows)
    chosen = torch.zeros(num_rows, num_experts, dtype=torch.int64, device=device)
    chosen.scatter_(1, chosen_ids, 1)
    rank = chosen.cumsum(0) - chosen
    count = chosen.sum(0)
    expert_blocks = (count + block_rows - 1) // block_rows
    first_block = shared * whole + expert_blocks.cumsum(0) - expert_blocks
    routed_places = (first_block * block_rows + rank).gather(1, chosen_ids)  # [T, top_k]
    shared_places = torch.arange(shared, device=device) * whole * block_rows + rows[:, None]
    places = torch.cat([routed_places, shared_places], dim=1)
    pairs = torch.zeros(num_blocks * block_rows, dtype=torch.int32, device=device)
    every_pair = torch.arange(num_rows * slots, dtype=torch.int32, device=device)
    pairs.scatter_(0, places.reshape(-1), every_pair)

    blocks = torch.arange(num_blocks, device=device)
    behind = blocks[:, None] - first_block
    owned = (behind >= 0) & (behind < expert_blocks)
    expert = torch.where(owned, torch.arange(num_experts, device=device), 0).sum(1)
    filled = torch.where(owned, count - behind * block_rows, 0).sum(1)
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


def gate_up(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """silu(x @ gate) * (x @ up) of every pair.

    Reads the blocks on the host: a reference, not a way to run a step.

    Args:
        x: [T, width]. weight: [experts, 2 * columns, width], gates first.

    Returns:
        [T * slots, columns].
    """
    check_product("x", x, weight, blocks, blocks.weights.shape[0])
    out = x.new_empty(blocks.weights.numel(), weight.shape[1] // 2)
    for expert, pairs in _filled(blocks):
        out[pairs] = silu_mul(functional.linear(x[pairs // blocks.slots], weight[expert]))
    return out


def down(active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """active @ down times the router's weight, of every pair; as ``gate_up`` a reference only.

    Args:
        active: [T * slots, width]. weight: [experts, columns, width].

    Returns:
        [T * slots, columns].
    """
    check_product("active", active, weight, blocks, blocks.weights.numel())
    out = active.new_empty(blocks.weights.numel(), weight.shape[1])
    weights = blocks.weights.reshape(-1, 1)
    for expert, pairs in _filled(blocks):
        product = functional.linear(active[pairs], weight[expert])
        out[pairs] = (product * weights[pairs]).to(out.dtype)
    return out


def _filled(blocks: Blocks) -> list[tuple[int, torch.Tensor]]:
    """(expert, its pairs) of every block that has any."""
    filled = zip(blocks.expert.tolist(), blocks.filled.tolist(), blocks.pairs.long(), strict=True)
    return [(expert, pairs[:count]) for expert, count, pairs in filled if count]


def combine(parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor:
    """What the routed experts gave, added in fp32 and rounded, plus what the shared ones gave.

    Args:
        parts: [T * (top_k + shared), columns].

    Returns:
        [T, columns].
    """
    slots = parts.unflatten(0, (-1, top_k + shared)).to(torch.float32)
    out: torch.Tensor = slots[:, :top_k].sum(1).to(parts.dtype)
    if shared:
        out = out + slots[:, top_k:].sum(1).to(parts.dtype)
    return out

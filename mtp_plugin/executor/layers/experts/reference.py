"""The mixture of experts in torch: the CPU path and the oracle of the kernels.

Routing has fixed shapes, and so can be captured on a GPU; the products cannot.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.executor.layers.experts.contract import Blocks, RouterRule
from mtp_plugin.executor.layers.mlp.reference import silu_mul

NAN_CHOICE = -3.0e38
MASKED_CHOICE = -3.2e38


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As at the door."""
    return functional.linear(x.to(torch.float32), weight.to(torch.float32))


def assign(
    logits: torch.Tensor,
    bias: torch.Tensor,
    rule: RouterRule,
    *,
    shared: int,
    block_rows: int,
    num_blocks: int,
) -> Blocks:
    """As at the door."""
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
    """As at the door."""
    out = x.new_empty(blocks.weights.numel(), weight.shape[1] // 2)
    for expert, pairs in _filled(blocks):
        out[pairs] = silu_mul(functional.linear(x[pairs // blocks.slots], weight[expert]))
    return out


def down(active: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """As at the door."""
    out = active.new_empty(blocks.weights.numel(), weight.shape[1])
    weights = blocks.weights.reshape(-1, 1)
    for expert, pairs in _filled(blocks):
        product = functional.linear(active[pairs], weight[expert])
        out[pairs] = (product * weights[pairs]).to(out.dtype)
    return out


def _filled(blocks: Blocks) -> list[tuple[int, torch.Tensor]]:
    """(expert, its pairs) of every block that has any; read on the host."""
    filled = zip(blocks.expert.tolist(), blocks.filled.tolist(), blocks.pairs.long(), strict=True)
    return [(expert, pairs[:count]) for expert, count, pairs in filled if count]


def combine(parts: torch.Tensor, *, top_k: int, shared: int) -> torch.Tensor:
    """As at the door."""
    slots = parts.unflatten(0, (-1, top_k + shared)).to(torch.float32)
    out: torch.Tensor = slots[:, :top_k].sum(1).to(parts.dtype)
    if shared:
        out = out + slots[:, top_k:].sum(1).to(parts.dtype)
    return out

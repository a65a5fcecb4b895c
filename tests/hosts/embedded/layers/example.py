"""The ops of fused layers on plain Python numbers."""

from __future__ import annotations

import math

from mtp_plugin.hosts.embedded.layers.experts import RouterRule

Row = list[float]


def rms_norm(row: Row, weight: Row, eps: float) -> Row:
    root = math.sqrt(sum(v * v for v in row) / len(row) + eps)
    return [v / root * w for v, w in zip(row, weight, strict=True)]


def rotate(head: Row, cos: Row, sin: Row) -> Row:
    """Number j and number j + n are a point that turns by angle j; the rest passes."""
    n = len(cos)
    first = [head[j] * cos[j] - head[j + n] * sin[j] for j in range(n)]
    second = [head[j + n] * cos[j] + head[j] * sin[j] for j in range(n)]
    return first + second + head[2 * n :]


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def silu_mul(row: Row) -> Row:
    half = len(row) // 2
    return [silu(gate) * up for gate, up in zip(row[:half], row[half:], strict=True)]


def linear(row: Row, weight: list[Row]) -> Row:
    return [sum(a * b for a, b in zip(row, column, strict=True)) for column in weight]


def route(logits: Row, bias: Row, rule: RouterRule) -> list[tuple[int, float]]:
    """(expert, weight) of one row, best choice first; ties go to the lower expert."""
    scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    in_group = len(logits) // rule.num_groups
    groups = [choice[g * in_group : (g + 1) * in_group] for g in range(rule.num_groups)]
    best_two = [sum(sorted(group, reverse=True)[:2]) for group in groups]
    order = sorted(range(rule.num_groups), key=lambda g: -best_two[g])
    kept = set(order[: rule.topk_group])
    candidates = [e for e in range(len(logits)) if e // in_group in kept]
    chosen = sorted(candidates, key=lambda e: -choice[e])[: rule.top_k]
    total = sum(scores[e] for e in chosen) if rule.normalise else 1.0
    return [(e, scores[e] / total * rule.scale) for e in chosen]


def blocks(
    chosen: list[list[int]], num_experts: int, shared: int, block_rows: int
) -> list[tuple[int, list[int]]]:
    """(expert, pairs) of every block: shared experts first, each expert's rows in order."""
    slots = len(chosen[0]) + shared
    rows = range(len(chosen))
    lists = [
        (num_experts + s, [r * slots + slots - shared + s for r in rows]) for s in range(shared)
    ]
    for expert in range(num_experts):
        pairs = [r * slots + ids.index(expert) for r, ids in enumerate(chosen) if expert in ids]
        lists.append((expert, pairs))
    return [
        (expert, pairs[start : start + block_rows])
        for expert, pairs in lists
        for start in range(0, len(pairs), block_rows)
    ]

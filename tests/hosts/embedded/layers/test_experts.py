"""The mixture of experts: transformers' modules, torch and kernels agree."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.embedded.layers import experts_triton
from mtp_plugin.hosts.embedded.layers.experts import (
    Blocks,
    RouterRule,
    assign,
    block_rows_for,
    combine,
    down,
    gate_up,
    most_blocks,
    router_logits,
)
from mtp_plugin.ops.backend import Backend
from tests.hosts.embedded.layers.closeness import FLOAT, KINDS, Kind, rolled
from tests.op_arguments import check_strided_arguments, poisoned_memory
from tests.ops.on_device import DEVICE

PLAIN = RouterRule(top_k=2, num_groups=1, topk_group=1, normalise=True, scale=1.0)
GROUPED = RouterRule(top_k=3, num_groups=4, topk_group=2, normalise=False, scale=2.5)


def filled_blocks(blocks: Blocks) -> list[tuple[int, list[int]]]:
    """The filled blocks in order."""
    filled = zip(blocks.expert.tolist(), blocks.filled.tolist(), blocks.pairs.tolist(), strict=True)
    return [(expert, pairs[:count]) for expert, count, pairs in filled if count]


def chosen_by(blocks: Blocks, num_rows: int, num_experts: int) -> list[list[int]]:
    """The routed experts of every row, best first."""
    chosen: dict[int, int] = {}
    for expert, pairs in filled_blocks(blocks):
        chosen.update(dict.fromkeys(pairs, expert))
    slots = blocks.slots
    assert sorted(chosen) == list(range(num_rows * slots))
    rows = [[chosen[row * slots + slot] for slot in range(slots)] for row in range(num_rows)]
    return [[expert for expert in row if expert < num_experts] for row in rows]


def logits_of(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    return rolled(rows, experts, kind=FLOAT, seed=seed, scale=2.0)


def assigned(*given: torch.Tensor, **options: Any) -> Blocks:
    """Blocks without undefined rows."""
    blocks = assign(*given, **options)
    is_filled = torch.arange(blocks.block_rows, device=DEVICE) < blocks.filled[:, None]
    return replace(blocks, pairs=torch.where(is_filled, blocks.pairs, -1))


@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    experts=st.sampled_from([4, 6, 8, 16]),
    top_k=st.integers(1, 4),
    groups=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    normalise=st.booleans(),
    shared=st.integers(0, 2),
    block_rows=st.sampled_from([1, 3, 4, 16]),
    is_alike=st.booleans(),
    seed=st.integers(0, 999),
)
def test_routing_of_torch_and_kernel(
    rows: int,
    experts: int,
    top_k: int,
    groups: tuple[int, int],
    normalise: bool,
    shared: int,
    block_rows: int,
    is_alike: bool,
    seed: int,
) -> None:
    """Every pair is in one block, also where all rows choose the same experts."""
    top_k = min(top_k, experts // groups[0] * groups[1])
    rule = RouterRule(top_k, *groups, normalise=normalise, scale=1.5)
    logits, bias = logits_of(rows, experts, seed), 0.3 * logits_of(1, experts, seed + 1)[0]
    if is_alike:
        logits[:] = logits[0].clone()
    found = []
    for backend in Backend:
        with poisoned_memory():
            blocks = assign(
                logits, bias, rule, shared=shared, block_rows=block_rows, backend=backend
            )
        assert blocks.num_blocks == most_blocks(rows, experts, top_k, shared, block_rows)
        chosen_by(blocks, rows, experts)
        found.append(blocks)
    assert filled_blocks(found[0]) == filled_blocks(found[1])
    FLOAT.assert_close(found[1].weights, found[0].weights)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("rule", [PLAIN, GROUPED])
def test_routing_of_transformers(rule: RouterRule, backend: Backend) -> None:
    rows = 7
    config = Glm4MoeConfig(
        hidden_size=24,
        n_routed_experts=8,
        num_experts_per_tok=rule.top_k,
        n_group=rule.num_groups,
        topk_group=rule.topk_group,
        norm_topk_prob=rule.normalise,
        routed_scaling_factor=rule.scale,
    )
    router = glm.Glm4MoeTopkRouter(config).to(DEVICE)
    router.weight.data = rolled(8, 24, kind=FLOAT)
    router.e_score_correction_bias.copy_(0.3 * rolled(8, kind=FLOAT, seed=1))
    x = rolled(rows, 24, kind=FLOAT, seed=2)
    logits, weights, ids = router(x)
    FLOAT.assert_close(router_logits(x, router.weight, backend=backend), logits)
    bias = router.e_score_correction_bias
    blocks = assign(logits, bias, rule, shared=0, block_rows=16, backend=backend)
    chosen = chosen_by(blocks, rows, 8)
    for row in range(rows):
        theirs = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        ours = dict(zip(chosen[row], blocks.weights[row].tolist(), strict=True))
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("backend", Backend)
def test_ties_go_to_the_lower_expert(backend: Backend) -> None:
    logits = torch.zeros(3, 6, device=DEVICE)
    logits[1, 4] = 1.0
    bias = torch.zeros(6, device=DEVICE)
    blocks = assign(logits, bias, PLAIN, shared=0, block_rows=4, backend=backend)
    assert chosen_by(blocks, 3, 6) == [[0, 1], [4, 0], [0, 1]]


@pytest.mark.parametrize("backend", Backend)
def test_nan_stays_in_its_row(backend: Backend) -> None:
    """With NaN in some rows every pair still is in one block, and other rows do not change."""
    rule = GROUPED
    logits, bias = logits_of(6, 16), torch.zeros(16, device=DEVICE)
    sound = assign(logits, bias, rule, shared=1, block_rows=4, backend=Backend.TORCH)
    chosen = chosen_by(sound, 6, 16)
    logits[2], logits[4, 3] = torch.nan, torch.nan
    logits[5] = torch.inf
    blocks = assign(logits, bias, rule, shared=1, block_rows=4, backend=backend)
    assert filled_blocks(blocks) != filled_blocks(sound)
    ours = chosen_by(blocks, 6, 16)
    assert all(len(set(row)) == rule.top_k for row in ours)
    assert [ours[row] for row in (0, 1, 3)] == [chosen[row] for row in (0, 1, 3)]
    assert blocks.weights[2, : rule.top_k].isnan().all()
    assert not blocks.weights[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("rows", [2, 40])
def test_large_routings_use_torch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_triton, "MOST_CHOICES", 64)
    logits, bias = logits_of(rows, 8), torch.zeros(8, device=DEVICE)
    blocks, expected = (
        assign(logits, bias, PLAIN, shared=1, block_rows=16, backend=backend) for backend in Backend
    )
    assert filled_blocks(blocks) == filled_blocks(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "experts", "width"), [(5, 9, 100), (2, 17, 1100)])
def test_router_logits(kind: Kind, rows: int, experts: int, width: int) -> None:
    x, weight = rolled(rows, width, kind=kind), rolled(experts, width, kind=kind, seed=1)
    with poisoned_memory():
        logits = router_logits(x, weight, backend=Backend.TRITON)
    assert logits.dtype == torch.float32
    expected = router_logits(x, weight, backend=Backend.TORCH)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def weights_of(kind: Kind, experts: int, width: int, hidden: int) -> tuple[torch.Tensor, ...]:
    return (
        rolled(experts, 2 * width, hidden, kind=kind, seed=5, scale=0.2),
        rolled(experts, hidden, width, kind=kind, seed=6, scale=0.2),
    )


@settings(max_examples=8)
@given(
    rows=st.sampled_from([1, 3, 16, 21]),
    width=st.sampled_from([8, 20, 40]),
    hidden=st.sampled_from([16, 50]),
    shared=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_products_of_torch_and_kernel(
    rows: int, width: int, hidden: int, shared: int, seed: int
) -> None:
    for kind in KINDS:
        weights = weights_of(kind, 5 + shared, width, hidden)
        x = rolled(rows, hidden, kind=kind, seed=seed)
        blocks = assign(
            logits_of(rows, 5, seed),
            torch.zeros(5, device=DEVICE),
            PLAIN,
            shared=shared,
            block_rows=16,
            backend=Backend.TORCH,
        )
        with poisoned_memory():
            active = gate_up(x, weights[0], blocks, backend=Backend.TRITON)
            expected = gate_up(x, weights[0], blocks, backend=Backend.TORCH)
            kind.assert_close(active, expected)
            parts = down(expected, weights[1], blocks, backend=Backend.TRITON)
            kind.assert_close(parts, down(expected, weights[1], blocks, backend=Backend.TORCH))
            out = combine(parts, top_k=2, shared=shared, backend=Backend.TRITON)
        kind.assert_close(out, combine(parts, top_k=2, shared=shared, backend=Backend.TORCH))


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend) -> None:
    weights, shared = weights_of(FLOAT, 5, 8, 16), 1
    x, router = torch.empty(0, 16, device=DEVICE), rolled(5, 16, kind=FLOAT)
    logits, bias = router_logits(x, router, backend=backend), torch.zeros(5, device=DEVICE)
    blocks = assign(logits, bias, PLAIN, shared=shared, block_rows=16, backend=backend)
    assert blocks.num_blocks == 0
    parts = gate_up(x, weights[0], blocks, backend=backend)
    parts = down(parts, weights[1], blocks, backend=backend)
    assert combine(parts, top_k=2, shared=shared, backend=backend).shape == (0, 16)


@pytest.mark.parametrize("rows", [1, 20, 70, 600])
def test_block_rows_grow_with_the_rows(rows: int) -> None:
    block_rows = block_rows_for(rows)
    assert block_rows in (16, 32, 64, 128)
    for products, dtype in product(
        (experts_triton.GATE_UP, experts_triton.DOWN), (torch.float32, torch.bfloat16)
    ):
        tiling = experts_triton.tiling_for(products, block_rows, dtype)
        bytes_in_flight = tiling.stages * (tiling.tile + block_rows) * tiling.block * dtype.itemsize
        assert bytes_in_flight <= 128 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "rule: expected top_k experts"),
        ({"num_groups": 3}, "equal groups of 8"),
        ({"num_groups": 4, "topk_group": 5}, "rule: expected"),
    ],
)
def test_impossible_rules_are_refused(change: dict, message: str) -> None:
    rule = RouterRule(**{**vars(PLAIN), **change})
    with pytest.raises(TensorContractError, match=message):
        assign(
            logits_of(2, 8),
            torch.zeros(8, device=DEVICE),
            rule,
            shared=0,
            block_rows=16,
            backend=Backend.TORCH,
        )


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    rows, experts, width, hidden = 3, 4, 5, 6
    first, second = weights_of(FLOAT, experts + 1, width, hidden)
    x, logits = rolled(rows, hidden, kind=FLOAT), logits_of(rows, experts)
    check_strided_arguments(
        router_logits,
        {"x": x, "weight": rolled(experts, hidden, kind=FLOAT)},
        refused={"x": "x: expected row-contiguous", "weight": "expected contiguous"},
        backend=backend,
    )
    routed = {"rule": PLAIN, "shared": 1, "block_rows": 16, "backend": backend}
    check_strided_arguments(
        assigned,
        {"logits": logits, "bias": rolled(experts, kind=FLOAT, seed=1)},
        refused={"logits": "logits: expected contiguous torch.float32"},
        **routed,
    )
    blocks = assign(logits, torch.zeros(experts, device=DEVICE), **routed)
    apart = {f"blocks.{name}": f"blocks.{name}: expected contiguous" for name in vars(blocks)}
    weight = {"weight": "weight: expected contiguous torch.float32"}
    check_strided_arguments(
        gate_up,
        {"x": x, "weight": first, "blocks": blocks},
        refused={"x": "x: expected row-contiguous", **weight, **apart},
        backend=backend,
    )
    active = rolled(rows * 3, width, kind=FLOAT)
    check_strided_arguments(
        down,
        {"active": active, "weight": second, "blocks": blocks},
        refused={"active": "active: expected contiguous", **weight, **apart},
        backend=backend,
    )
    check_strided_arguments(
        combine,
        {"parts": rolled(rows * 3, hidden, kind=FLOAT)},
        refused={"parts": "parts: expected contiguous"},
        top_k=2,
        shared=1,
        backend=backend,
    )

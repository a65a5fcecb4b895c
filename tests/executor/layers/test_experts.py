"""The mixture of experts: story, transformers' modules, reference and kernels agree."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.experts import launch, reference
from mtp_plugin.executor.layers.experts.contract import Blocks, RouterRule, most_blocks
from tests.executor.layers import stories
from tests.executor.layers.closeness import FLOAT, HALF, KINDS, Kind, rolled
from tests.kernels.top_k.launches import poisoned_outputs
from tests.speculative.ops.on_device import DEVICE

PLAIN = RouterRule(top_k=2, num_groups=1, topk_group=1, normalise=True, scale=1.0)
GROUPED = RouterRule(top_k=3, num_groups=4, topk_group=2, normalise=False, scale=2.5)


def told(blocks: Blocks) -> list[tuple[int, list[int]]]:
    """The filled blocks, in their order."""
    filled = zip(blocks.expert.tolist(), blocks.filled.tolist(), blocks.pairs.tolist(), strict=True)
    return [(expert, pairs[:count]) for expert, count, pairs in filled if count]


def chosen_by(blocks: Blocks, num_rows: int, num_experts: int) -> list[list[int]]:
    """The routed experts of every row, best first."""
    chosen: dict[int, int] = {}
    for expert, pairs in told(blocks):
        chosen.update(dict.fromkeys(pairs, expert))
    slots = blocks.slots
    assert sorted(chosen) == list(range(num_rows * slots))
    rows = [[chosen[row * slots + slot] for slot in range(slots)] for row in range(num_rows)]
    return [[expert for expert in row if expert < num_experts] for row in rows]


def logits_of(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    return rolled(rows, experts, kind=FLOAT, seed=seed, scale=2.0)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 20),
    experts=st.sampled_from([4, 6, 8, 16]),
    top_k=st.integers(1, 4),
    groups=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    normalise=st.booleans(),
    shared=st.integers(0, 2),
    block_rows=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 999),
)
def test_routing_of_story_reference_and_kernel(
    rows: int,
    experts: int,
    top_k: int,
    groups: tuple[int, int],
    normalise: bool,
    shared: int,
    block_rows: int,
    seed: int,
) -> None:
    top_k = min(top_k, experts // groups[0] * groups[1])
    rule = RouterRule(top_k, *groups, normalise=normalise, scale=1.5)
    logits, bias = logits_of(rows, experts, seed), 0.3 * logits_of(1, experts, seed + 1)[0]
    story = [stories.route(row, bias.tolist(), rule) for row in logits.tolist()]
    chosen = [[expert for expert, _ in row] for row in story]
    weights = [[weight for _, weight in row] + [1.0] * shared for row in story]
    lists = stories.blocks(chosen, experts, shared, block_rows)
    most = most_blocks(rows, experts, top_k, shared, block_rows)
    assert len(lists) <= most
    expected = reference.assign(logits, bias, rule, shared=shared, block_rows=block_rows)
    ops = [expected]
    if block_rows & (block_rows - 1) == 0:
        with poisoned_outputs(launch):
            ops.append(launch.assign(logits, bias, rule, shared=shared, block_rows=block_rows))
    for blocks in ops:
        assert blocks.pairs.shape == (most, block_rows)
        assert told(blocks) == lists
        assert not blocks.filled[len(lists) :].any()
        FLOAT.assert_close(blocks.weights, torch.tensor(weights, device=DEVICE))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("rule", [PLAIN, GROUPED])
def test_routing_of_transformers(rule: RouterRule, rows: int) -> None:
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
    for op in (reference, launch):
        FLOAT.assert_close(op.router_logits(x, router.weight), logits)
        blocks = op.assign(logits, router.e_score_correction_bias, rule, shared=0, block_rows=16)
        chosen = chosen_by(blocks, rows, 8)
        for row in range(rows):
            theirs = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            ours = dict(zip(chosen[row], blocks.weights[row].tolist(), strict=True))
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_equal_choices_go_to_the_lower_expert() -> None:
    logits = torch.zeros(3, 6, device=DEVICE)
    logits[1, 4] = 1.0
    bias = torch.zeros(6, device=DEVICE)
    for op in (reference, launch):
        blocks = op.assign(logits, bias, PLAIN, shared=0, block_rows=4)
        assert chosen_by(blocks, 3, 6) == [[0, 1], [4, 0], [0, 1]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(1, 4, device=DEVICE)
    bias = torch.tensor([0.0, 0.5, -1.0, 0.7], device=DEVICE)
    for op in (reference, launch):
        blocks = op.assign(logits, bias, PLAIN, shared=0, block_rows=4)
        assert chosen_by(blocks, 1, 4) == [[3, 1]]
        FLOAT.assert_close(blocks.weights, torch.tensor([[0.5, 0.5]], device=DEVICE))


@pytest.mark.parametrize("rule", [PLAIN, GROUPED])
def test_rows_of_nan_stay_alone(rule: RouterRule) -> None:
    """Whatever NaN does to a row, every pair has one place and the other rows keep theirs."""
    logits, bias = logits_of(6, 16), torch.zeros(16, device=DEVICE)
    sound = told(reference.assign(logits, bias, rule, shared=1, block_rows=4))
    chosen = chosen_by(reference.assign(logits, bias, rule, shared=1, block_rows=4), 6, 16)
    logits[2], logits[4, 3] = torch.nan, torch.nan
    logits[5] = torch.inf
    for op in (reference, launch):
        blocks = op.assign(logits, bias, rule, shared=1, block_rows=4)
        assert told(blocks) != sound
        ours = chosen_by(blocks, 6, 16)
        assert all(len(set(row)) == rule.top_k for row in ours)
        assert [ours[row] for row in (0, 1, 3)] == [chosen[row] for row in (0, 1, 3)]
        assert blocks.weights[2, : rule.top_k].isnan().all()
        assert not blocks.weights[[0, 1, 3]].isnan().any()


def test_blocks_of_the_worst_routing_fit() -> None:
    """Every row to the same experts, and every row to others, fill no more than there are."""
    dice = random.Random(4)
    for _ in range(60):
        rows, experts, block_rows = dice.randint(1, 30), dice.randint(2, 9), dice.choice([1, 2, 8])
        top_k = dice.randint(1, min(3, experts))
        alike = [list(range(top_k))] * rows
        spread = [[(row * top_k + i) % experts for i in range(top_k)] for row in range(rows)]
        mixed = [dice.sample(range(experts), top_k) for _ in range(rows)]
        most = most_blocks(rows, experts, top_k, 1, block_rows)
        for chosen in (alike, spread, mixed):
            assert len(stories.blocks(chosen, experts, 1, block_rows)) <= most


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_large_routings_take_the_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_CHOICES", 64)
    logits, bias = logits_of(rows, 8), torch.zeros(8, device=DEVICE)
    blocks = launch.assign(logits, bias, PLAIN, shared=1, block_rows=16)
    expected = reference.assign(logits, bias, PLAIN, shared=1, block_rows=16)
    assert told(blocks) == told(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 4, 40), (5, 9, 100), (2, 17, 1100)])
def test_router_logits(kind: Kind, rows: int, experts: int, width: int) -> None:
    x, weight = rolled(rows, width, kind=kind), rolled(experts, width, kind=kind, seed=1)
    with poisoned_outputs(launch):
        logits = launch.router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.router_logits(x, weight), rtol=1e-4, atol=1e-4)


def test_many_router_logits_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_PRODUCTS", 7)
    x, weight = rolled(4, 10, kind=HALF), rolled(2, 10, kind=HALF, seed=1)
    assert torch.equal(launch.router_logits(x, weight), reference.router_logits(x, weight))


def weights_of(kind: Kind, experts: int, width: int, hidden: int) -> tuple[torch.Tensor, ...]:
    return (
        rolled(experts, 2 * width, hidden, kind=kind, seed=5, scale=0.2),
        rolled(experts, hidden, width, kind=kind, seed=6, scale=0.2),
    )


@settings(max_examples=12)
@given(
    rows=st.sampled_from([1, 3, 16, 21]),
    width=st.sampled_from([8, 20, 40]),
    hidden=st.sampled_from([16, 50]),
    shared=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_products_of_reference_and_kernel(
    rows: int, width: int, hidden: int, shared: int, seed: int
) -> None:
    tiling = launch.Tiling(tile=32, block=32, stages=2)
    for kind in KINDS:
        gate_up, down = weights_of(kind, 5 + shared, width, hidden)
        x = rolled(rows, hidden, kind=kind, seed=seed)
        blocks = reference.assign(
            logits_of(rows, 5, seed),
            torch.zeros(5, device=DEVICE),
            PLAIN,
            shared=shared,
            block_rows=16,
        )
        with poisoned_outputs(launch):
            active = launch.gate_up(x, gate_up, blocks, tiling=tiling)
            expected = reference.gate_up(x, gate_up, blocks)
            kind.assert_close(active, expected)
            parts = launch.down(expected, down, blocks, tiling=tiling)
            kind.assert_close(parts, reference.down(expected, down, blocks))
            out = launch.combine(parts, top_k=2, shared=shared)
        kind.assert_close(out, reference.combine(parts, top_k=2, shared=shared))


def test_products_of_the_story() -> None:
    rows, experts, width, hidden = 3, 4, 5, 6
    gate_up, down = weights_of(FLOAT, experts + 1, width, hidden)
    x, logits = rolled(rows, hidden, kind=FLOAT), logits_of(rows, experts)
    bias = torch.zeros(experts, device=DEVICE)
    rule = RouterRule(top_k=2, num_groups=1, topk_group=1, normalise=False, scale=0.7)
    expected = []
    for row, row_logits in zip(x.tolist(), logits.tolist(), strict=True):
        total = [0.0] * hidden
        for expert, weight in [*stories.route(row_logits, bias.tolist(), rule), (experts, 1.0)]:
            active = stories.silu_mul(stories.linear(row, gate_up[expert].tolist()))
            out = stories.linear(active, down[expert].tolist())
            total = [t + weight * o for t, o in zip(total, out, strict=True)]
        expected.append(total)
    for op in (reference, launch):
        blocks = op.assign(logits, bias, rule, shared=1, block_rows=16)
        parts = op.down(op.gate_up(x, gate_up, blocks), down, blocks)
        out = op.combine(parts, top_k=2, shared=1)
        FLOAT.assert_close(out, torch.tensor(expected, device=DEVICE))


@pytest.mark.parametrize("shared", [0, 1])
def test_no_rows(shared: int) -> None:
    gate_up, down = weights_of(FLOAT, 5, 8, 16)
    x, weight = torch.empty(0, 16, device=DEVICE), rolled(5, 16, kind=FLOAT)
    for op in (reference, launch):
        blocks = op.assign(
            op.router_logits(x, weight),
            torch.zeros(5, device=DEVICE),
            PLAIN,
            shared=shared,
            block_rows=16,
        )
        assert blocks.num_blocks == 0
        parts = op.down(op.gate_up(x, gate_up, blocks), down, blocks)
        assert op.combine(parts, top_k=2, shared=shared).shape == (0, 16)


@pytest.mark.parametrize("rows", [1, 20, 70, 600])
def test_block_rows_grow_with_the_rows(rows: int) -> None:
    block_rows = launch.block_rows_for(rows)
    assert block_rows in (16, 32, 64, 128)
    for products, dtype in product((launch.GATE_UP, launch.DOWN), (torch.float32, torch.bfloat16)):
        tiling = launch.tiling_for(products, block_rows, dtype)
        bytes_in_flight = tiling.stages * (tiling.tile + block_rows) * tiling.block * dtype.itemsize
        assert bytes_in_flight <= 128 * 1024


REFUSALS = [
    ({"top_k": 0}, "rule: expected top_k experts"),
    ({"top_k": 9}, "rule: expected top_k experts"),
    ({"num_groups": 3}, "equal groups of 8"),
    ({"num_groups": 4, "topk_group": 5}, "rule: expected"),
    ({"num_groups": 8, "topk_group": 1}, "rule: expected"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_rules_that_cannot_be_are_refused(change: dict, message: str) -> None:
    rule = RouterRule(**{**vars(PLAIN), **change})
    for op in (reference, launch):
        with pytest.raises(TensorContractError, match=message):
            op.assign(logits_of(2, 8), torch.zeros(8, device=DEVICE), rule, shared=0, block_rows=16)


def test_operands_that_do_not_fit_are_refused() -> None:
    bias, logits = torch.zeros(8, device=DEVICE), logits_of(2, 8)
    gate_up, down = weights_of(FLOAT, 8, 5, 6)
    blocks = reference.assign(logits, bias, PLAIN, shared=0, block_rows=16)
    with pytest.raises(TensorContractError, match="logits: expected contiguous fp32"):
        launch.assign(logits.double(), bias, PLAIN, shared=0, block_rows=16)
    with pytest.raises(TensorContractError, match=r"bias: expected fp32 \[8\], got"):
        launch.assign(logits, bias[:5], PLAIN, shared=0, block_rows=16)
    with pytest.raises(TensorContractError, match="block_rows: expected at least 1"):
        launch.assign(logits, bias, PLAIN, shared=0, block_rows=0)
    for op in (reference, launch):
        with pytest.raises(TensorContractError, match=r"x: expected \[2, 6\]"):
            op.gate_up(torch.ones(3, 6, device=DEVICE), gate_up, blocks)
        with pytest.raises(TensorContractError, match=r"active: expected \[4, 5\]"):
            op.down(torch.ones(2, 5, device=DEVICE), down, blocks)
        with pytest.raises(TensorContractError, match="weight: expected contiguous"):
            op.down(torch.ones(4, 5, device=DEVICE), down.transpose(1, 2), blocks)
    with pytest.raises(TensorContractError, match=r"parts: expected contiguous \[T \* 3"):
        launch.combine(torch.ones(4, 6, device=DEVICE), top_k=2, shared=1)

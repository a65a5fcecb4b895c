"""Draws: the story equals torch equals Triton; and the shares of steps that they give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import ConfigError, TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.speculative.ops.synthetic_acceptance import (
    SyntheticRule,
    forced_matches,
    launch,
    synthetic_rule,
)
from mtp_plugin.speculative.step import SlotRows, StepLayout
from tests.doors import check_strided_arguments, poisoned_memory, storage
from tests.kernels.top_k.launches import captured
from tests.speculative.ops.on_device import DEVICE, INDEX_DTYPES, POISON, forbid_launches, vector
from tests.speculative.ops.slots import column, slot_rows
from tests.speculative.ops.synthetic_acceptance import story

CERTAIN = 2**30
BEHIND = [SlotColumn("of_a_mode", float)]

seeds = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
shares = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0]), max_size=9).map(
    lambda rates: sorted(rates, reverse=True)
)


def rule_of(thresholds: list[int], seed: int) -> SyntheticRule:
    return SyntheticRule(vector(thresholds, torch.int32), vector([seed]))


def numbered(numbers: list[int], **layout: Any) -> SlotRows:
    """Requests with these numbers; nothing else in their slots is a number."""
    return slot_rows([{"number": number} for number in numbers], BEHIND, **layout)


def step(
    last_positions: torch.Tensor,
    k: int,
    *,
    chunk_lens: tuple[int, ...] = (),
    stride: int = 1,
) -> StepLayout:
    """A step whose generations stand at `last_positions` [G]; every other position is poison."""
    behind = torch.full((len(last_positions), k + 1), POISON, dtype=last_positions.dtype)
    behind = behind.to(DEVICE)
    behind[:, 0] = last_positions
    prompts = torch.full((sum(chunk_lens),), POISON, dtype=behind.dtype, device=DEVICE)
    flat = torch.cat([prompts, behind.reshape(-1)])
    wide = torch.full((len(flat), stride), POISON, dtype=flat.dtype, device=DEVICE)
    wide[:, 0] = flat
    lens = vector(chunk_lens, torch.int32)
    return StepLayout(chunk_lens, len(last_positions), k, lens, wide[:, 0])


@given(
    chunk_lens=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    positions=st.lists(st.integers(0, 2**31 - 20) | st.integers(0, 40), max_size=70),
    dtype=st.sampled_from(INDEX_DTYPES),
    stride=st.integers(1, 3),
    thresholds=st.lists(
        st.integers(0, CERTAIN) | st.sampled_from([0, CERTAIN, CERTAIN - 1]), max_size=9
    ),
    spare=st.integers(0, 3),
    seed=seeds,
    first_number=st.none() | st.integers(0, 2**31 - 80),
    gap=st.integers(0, 2),
    id_dtype=st.sampled_from(INDEX_DTYPES),
)
def test_story_torch_and_triton_agree(
    chunk_lens: tuple[int, ...],
    positions: list[int],
    dtype: torch.dtype,
    stride: int,
    thresholds: list[int],
    spare: int,
    seed: int,
    first_number: int | None,
    gap: int,
    id_dtype: torch.dtype,
) -> None:
    layout = step(vector(positions, dtype), len(thresholds), chunk_lens=chunk_lens, stride=stride)
    numbers, slots = [0] * len(positions), None
    if first_number is not None:
        numbers = [first_number + i for i in range(len(positions))]
        of_all = [5] * len(chunk_lens) + numbers
        slots = numbered(of_all, seed=seed, gap=gap, id_stride=stride, id_dtype=id_dtype)
        table = storage(slots.table)
    before = layout.positions.clone()
    told = [
        story.forced(position, thresholds, seed, number)
        for position, number in zip(positions, numbers, strict=True)
    ]
    # thresholds of a longer step count for nothing
    rule = rule_of(thresholds + [CERTAIN] * spare, seed)
    for backend in Backend:
        with poisoned_memory():
            forced = forced_matches(layout, rule, slots, backend=backend)
        assert forced.dtype == torch.int32
        assert forced.tolist() == told
        assert slots is None or torch.equal(storage(slots.table), table)
    assert torch.equal(layout.positions, before)


@pytest.mark.parametrize(
    ("seed", "draws"),
    [
        (0, [1053980816, 536506620, 100065276, 681475419]),
        (7, [558947160, 416179284, 180906342, 553857852]),
        (2**32 - 1, [543702670, 1054910314, 498578609, 849874168]),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_golden_draws(backend: Backend, seed: int, draws: list[int]) -> None:
    """A draw is found as the lowest threshold under which its draft stands."""
    assert story.mixed(1) == 0x514E28B7  # what Murmur3 gives for no bytes and seed 1
    assert [story.draw(seed, position) for position in range(1, 5)] == draws
    for position, draw in enumerate(draws, 1):
        for threshold, stands in ((draw, 0), (draw + 1, 1)):
            layout, rule = step(vector([position - 1]), 1), rule_of([threshold], seed)
            forced = forced_matches(layout, rule, backend=backend)
            assert forced.tolist() == [stands]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(
    "shares", [(0.8, 0.6, 0.4), (0.95, 0.95, 0.1, 0.1), (0.5,), (1.0, 0.3, 0.0), (0.9, 0.81, 0.729)]
)
def test_shares_of_steps_are_those_asked_for(backend: Backend, shares: tuple[float, ...]) -> None:
    """Over many positions; K = 1 to 4, some drafts certain, some hopeless."""
    steps = 20_000 if backend is Backend.TORCH else 4_000
    # far enough apart that no draw is read twice
    layout = step(torch.arange(steps, device=DEVICE) * 5, len(shares))
    for seed in (0, 1, 12345):
        rule = synthetic_rule(shares, seed, DEVICE)
        forced = forced_matches(layout, rule, backend=backend)
        for i, share in enumerate(shares):
            measured = float((forced > i).double().mean())
            deviation = math.sqrt(share * (1 - share) / steps)
            assert abs(measured - share) <= 4 * deviation, (seed, i)


def test_neighbours_are_independent() -> None:
    """Draws of one seed at p and p+1, and of two seeds at p, agree by chance alone."""
    steps = 40_000
    layout = step(torch.arange(steps, device=DEVICE), 1)
    half = {}
    for seed in (0, 1, 2):
        rule = synthetic_rule([0.5], seed, DEVICE)
        half[seed] = forced_matches(layout, rule, backend=Backend.TORCH).double()
    bound = 4 / math.sqrt(steps)
    for one, other in (
        (half[0][1:], half[0][:-1]),
        (half[0][2:], half[0][:-2]),
        (half[0], half[1]),
        (half[1], half[2]),
    ):
        assert abs(float(((one - 0.5) * (other - 0.5)).mean() * 4)) < bound


def test_requests_at_equal_positions_are_independent() -> None:
    """A batch of prompts of one length draws anew for each; neighbours agree by chance alone."""
    batch, steps, shares = 64, 400, (0.8, 0.6, 0.4)
    rule = synthetic_rule(shares, 3, DEVICE)
    positions = torch.arange(steps, device=DEVICE).repeat_interleave(batch) * 5
    slots = numbered(list(range(batch)))
    slots = replace(slots, slot_ids=slots.slot_ids[:batch].repeat(steps))
    layout = step(positions, len(shares))
    forced, same = (forced_matches(layout, rule, slots, backend=each) for each in Backend)
    assert torch.equal(forced, same)
    for i, share in enumerate(shares):
        measured = float((forced > i).double().mean())
        assert abs(measured - share) <= 4 * math.sqrt(share * (1 - share) / (batch * steps))
    first = (forced > 0).double().view(steps, batch) - shares[0]
    agreement = (first[:, 1:] * first[:, :-1]).mean() / (shares[0] * (1 - shares[0]))
    assert abs(float(agreement)) < 4 / math.sqrt(steps * (batch - 1))


def test_a_walk_reads_every_draw_once() -> None:
    """A request that steps on by its run and one meets the shares too."""
    shares, seed, steps = (0.8, 0.6, 0.4), 3, 20_000
    rule = synthetic_rule(shares, seed)
    thresholds = rule.thresholds.tolist()
    position, counts = 0, [0, 0, 0]
    for _ in range(steps):
        run = story.forced(position, thresholds, seed)
        for i in range(run):
            counts[i] += 1
        position += run + 1
    for share, count in zip(shares, counts, strict=True):
        assert abs(count / steps - share) <= 4 * math.sqrt(share * (1 - share) / steps)


def test_thresholds_are_conditional() -> None:
    rule = synthetic_rule([0.8, 0.6, 0.6, 0.0, 0.0], 5)
    assert rule.thresholds.tolist() == [round(0.8 * CERTAIN), round(0.75 * CERTAIN), CERTAIN, 0, 0]
    assert rule.seed.tolist() == [5]
    assert synthetic_rule([1.0, 1.0], 0).thresholds.tolist() == [CERTAIN, CERTAIN]


@given(shares=shares, seed=seeds)
def test_any_shares_give_thresholds(shares: list[float], seed: int) -> None:
    thresholds = synthetic_rule(shares, seed).thresholds
    assert thresholds.shape == (len(shares),)
    assert ((thresholds >= 0) & (thresholds <= CERTAIN)).all()


@pytest.mark.parametrize(
    ("shares", "seed", "message"),
    [
        ([0.5, 0.6], 0, r"expected shares from 0 to 1 that do not rise, got \[0.5, 0.6\]"),
        ([1.1], 0, "expected shares from 0 to 1"),
        ([-0.1], 0, "expected shares from 0 to 1"),
        ([math.nan], 0, "expected shares from 0 to 1"),
        ([0.5], -1, r"expected a seed from 0 to 2\*\*32 - 1, got -1"),
        ([0.5], 2**32, "expected a seed"),
    ],
)
def test_rules_that_cannot_be(shares: list[float], seed: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic_rule(shares, seed)


@pytest.mark.parametrize("backend", Backend)
def test_steps_without_positions(backend: Backend) -> None:
    layout = replace(step(vector([1, 2]), 1), positions=None)
    with pytest.raises(TensorContractError, match="synthetic acceptance: needs the step's pos"):
        forced_matches(layout, rule_of([1], 0), backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thresholds": torch.zeros(1).int()}, r"thresholds: expected torch.int32 \[>= 2\].*\[1\]"),
        ({"thresholds": torch.zeros(2)}, "thresholds: expected torch.int32 .*got torch.float32"),
        ({"thresholds": torch.zeros(2, 2).int()}, r"thresholds: .*got torch.int32 \[2, 2\]"),
        ({"thresholds": torch.zeros(2, device="meta").int()}, "thresholds: .* on meta"),
        ({"seed": torch.zeros(1).int()}, r"seed: expected torch.int64 \[1\].*got torch.int32"),
        ({"seed": torch.zeros(2).long()}, r"seed: expected torch.int64 \[1\].*\[2\]"),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_rules_that_do_not_fit(
    backend: Backend, change: dict[str, torch.Tensor], message: str
) -> None:
    moved = {name: t if t.is_meta else t.to(DEVICE) for name, t in change.items()}
    rule = replace(rule_of([1, 1], 0), **moved)
    with pytest.raises(TensorContractError, match=message):
        forced_matches(step(vector([1, 2]), 2), rule, backend=backend)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(9, 69)}, r"slot table: expected torch.int32 \[S, 69\].*float32"),
        ({"table": torch.zeros(9, 35).int()}, r"slot table: .*\[9, 35\]"),
        ({"table": torch.zeros(36, 9).int().t()}, "slot table: .*rows without gaps"),
        ({"table": torch.zeros(9, 36, device="meta").int()}, "slot table: .* on meta"),
        ({"slot_ids": torch.zeros(3)}, "slot_ids: expected integers .*torch.float32"),
        ({"slot_ids": torch.zeros(3).bool()}, "slot_ids: expected integers .*torch.bool"),
        ({"slot_ids": torch.zeros(2).long()}, r"slot_ids: expected integers \[>= 3\].*\[2\]"),
        ({"slot_ids": torch.zeros(3, 1).long()}, r"slot_ids: .*\[3, 1\]"),
        ({"slot_ids": torch.zeros(3, device="meta").long()}, "slot_ids: .* on meta"),
    ],
)
def test_slots_that_do_not_fit(
    backend: Backend, change: dict[str, torch.Tensor], message: str
) -> None:
    """The prompt's slot is asked for too, though nothing of it is read."""
    layout = step(vector([1, 2]), 1, chunk_lens=(2,))
    moved = {name: t if t.is_meta else t.to(DEVICE) for name, t in change.items()}
    slots = replace(numbered([1, 2, 3]), **moved)
    with pytest.raises(TensorContractError, match=message):
        forced_matches(layout, rule_of([1], 0), slots, backend=backend)


@pytest.mark.parametrize("backend", Backend)
def test_padding_rows_that_share_a_slot_draw_alike(backend: Backend) -> None:
    layout, rule = step(vector([5, 5, 5, 5]), 3), synthetic_rule([0.7, 0.5, 0.3], 11, DEVICE)
    slots = numbered([8, 2], slots=[0, 3])
    shared = replace(slots, slot_ids=vector([0, 3, 3, 3]))
    alone = forced_matches(step(vector([5, 5]), 3), rule, slots, backend=backend).tolist()
    forced = forced_matches(layout, rule, shared, backend=backend)
    assert forced.tolist() == [*alone, alone[1], alone[1]]


@pytest.mark.parametrize("backend", Backend)
def test_nothing_to_launch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
    layout = step(vector([]), 1, chunk_lens=(3,))
    assert forced_matches(layout, rule_of([1], 0), backend=backend).shape == (0,)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    half = [CERTAIN // 2, CERTAIN, CERTAIN // 2]
    arguments = {
        "layout": step(torch.arange(40, device=DEVICE), 3, chunk_lens=(2, 1)),
        "rule": rule_of(half, 5),
        "slots": numbered(list(range(42))),
    }
    refused = {"slots.table": "rows without gaps"}
    check_strided_arguments(forced_matches, arguments, refused=refused, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k"), [(1, 1), (64, 3), (1000, 16)])
def test_in_a_cuda_graph(batch: int, k: int) -> None:
    """Captured once, replayed at other positions, rates and seeds; the host is never asked."""
    layout = step(torch.arange(batch, device=DEVICE) * 3, k)
    slots = numbered(list(range(batch)))
    rule = synthetic_rule([0.9**i for i in range(1, k + 1)], 1, DEVICE)
    graph, forced = captured(lambda: forced_matches(layout, rule, slots, backend=Backend.TRITON))
    for seed, rate in ((7, 0.5), (2**32 - 1, 0.99)):
        other = synthetic_rule([rate**i for i in range(1, k + 1)], seed, DEVICE)
        layout.positions.add_(1717)
        column(slots, "number").add_(5)
        slots.slot_ids[:batch] = slots.slot_ids[:batch].flip(0)
        rule.thresholds.copy_(other.thresholds)
        rule.seed.copy_(other.seed)
        forced.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        expected = forced_matches(layout, other, slots, backend=Backend.TORCH)
        assert torch.equal(forced, expected)

"""Synthetic acceptance: example, torch reference and Triton agree; measured acceptance rates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.ops import synthetic_acceptance_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.ops.synthetic_acceptance import SyntheticRule, synthetic_rule
from mtp_plugin.ops.synthetic_acceptance import synthetic_acceptance as accept_at_random
from mtp_plugin.requests.columns import SlotColumn
from tests.op_arguments import check_arguments, poisoned_memory, storage
from tests.ops.on_device import DEVICE, INDEX_DTYPES, POISON, forbid_launches, vector
from tests.ops.slots import column, slot_rows
from tests.ops.synthetic_acceptance import example
from tests.ops.top_k.launches import captured

CERTAIN = 2**30
OF_METHOD = [SlotColumn("of_a_method", float)]

seeds = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
shares = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0]), max_size=9).map(
    lambda rates: sorted(rates, reverse=True)
)


def rule_of(thresholds: list[int], seed: int) -> SyntheticRule:
    return SyntheticRule(vector(thresholds, torch.int32), vector([seed]))


def numbered(numbers: list[int], **layout: Any) -> SlotRows:
    """Requests with these numbers; nothing else in their slots is a number."""
    return slot_rows([{"number": number} for number in numbers], OF_METHOD, **layout)


def synthetic_acceptance(
    layout: StepLayout, rule: SyntheticRule, slots: SlotRows | None = None, *, backend: Backend
) -> torch.Tensor:
    """Call the op for the generations of a step."""
    positions = layout.expect_positions("test")[layout.num_ctx_tokens :: layout.step_rows]
    if slots is not None:
        slots = slots.part(slice(layout.num_contexts, None))
    return accept_at_random(positions, layout.draft_len, rule, slots, backend=backend)


def step(
    last_positions: torch.Tensor,
    k: int,
    *,
    chunk_lens: tuple[int, ...] = (),
    stride: int = 1,
) -> StepLayout:
    """A step of generation requests at `last_positions` [G]; every other position is poison."""
    rows = torch.full((len(last_positions), k + 1), POISON, dtype=last_positions.dtype)
    rows = rows.to(DEVICE)
    rows[:, 0] = last_positions
    prompts = torch.full((sum(chunk_lens),), POISON, dtype=rows.dtype, device=DEVICE)
    flat = torch.cat([prompts, rows.reshape(-1)])
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
def test_example_torch_and_triton_agree(
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
    expected = [
        example.accepted(position, thresholds, seed, number)
        for position, number in zip(positions, numbers, strict=True)
    ]
    # thresholds of a longer step are not read
    rule = rule_of(thresholds + [CERTAIN] * spare, seed)
    for backend in Backend:
        with poisoned_memory():
            lengths = synthetic_acceptance(layout, rule, slots, backend=backend)
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == expected
        assert slots is None or torch.equal(storage(slots.table), table)
    assert torch.equal(layout.positions, before)


@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        (0, [1053980816, 536506620, 100065276, 681475419]),
        (7, [558947160, 416179284, 180906342, 553857852]),
        (2**32 - 1, [543702670, 1054910314, 498578609, 849874168]),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_golden_random_numbers(backend: Backend, seed: int, numbers: list[int]) -> None:
    """A random number is seen as the lowest threshold under which its draft is accepted."""
    assert example.mixed(1) == 0x514E28B7  # what Murmur3 gives for no bytes and seed 1
    assert [example.random_number(seed, position) for position in range(1, 5)] == numbers
    for position, number in enumerate(numbers, 1):
        for threshold, accepted in ((number, 0), (number + 1, 1)):
            layout, rule = step(vector([position - 1]), 1), rule_of([threshold], seed)
            lengths = synthetic_acceptance(layout, rule, backend=backend)
            assert lengths.tolist() == [accepted]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(
    "shares", [(0.8, 0.6, 0.4), (0.95, 0.95, 0.1, 0.1), (0.5,), (1.0, 0.3, 0.0), (0.9, 0.81, 0.729)]
)
def test_measured_rates_are_the_requested_ones(backend: Backend, shares: tuple[float, ...]) -> None:
    """Over many positions; K = 1 to 4, some rates 0 or 1."""
    steps = 20_000 if backend is Backend.TORCH else 4_000
    # far enough apart that no random number is read twice
    layout = step(torch.arange(steps, device=DEVICE) * 5, len(shares))
    for seed in (0, 1, 12345):
        rule = synthetic_rule(shares, seed, DEVICE)
        lengths = synthetic_acceptance(layout, rule, backend=backend)
        for i, share in enumerate(shares):
            measured = float((lengths > i).double().mean())
            deviation = math.sqrt(share * (1 - share) / steps)
            assert abs(measured - share) <= 4 * deviation, (seed, i)


def test_neighbours_are_independent() -> None:
    """Random numbers of one seed at p and p+1, and of two seeds at p, are uncorrelated."""
    steps = 40_000
    layout = step(torch.arange(steps, device=DEVICE), 1)
    half = {}
    for seed in (0, 1, 2):
        rule = synthetic_rule([0.5], seed, DEVICE)
        half[seed] = synthetic_acceptance(layout, rule, backend=Backend.TORCH).double()
    bound = 4 / math.sqrt(steps)
    for one, other in (
        (half[0][1:], half[0][:-1]),
        (half[0][2:], half[0][:-2]),
        (half[0], half[1]),
        (half[1], half[2]),
    ):
        assert abs(float(((one - 0.5) * (other - 0.5)).mean() * 4)) < bound


def test_requests_at_equal_positions_are_independent() -> None:
    """In a batch of prompts of one length, neighbours are uncorrelated."""
    batch, steps, shares = 64, 400, (0.8, 0.6, 0.4)
    rule = synthetic_rule(shares, 3, DEVICE)
    positions = torch.arange(steps, device=DEVICE).repeat_interleave(batch) * 5
    slots = numbered(list(range(batch)))
    slots = replace(slots, slot_ids=slots.slot_ids[:batch].repeat(steps))
    layout = step(positions, len(shares))
    lengths, same = (synthetic_acceptance(layout, rule, slots, backend=each) for each in Backend)
    assert torch.equal(lengths, same)
    for i, share in enumerate(shares):
        measured = float((lengths > i).double().mean())
        assert abs(measured - share) <= 4 * math.sqrt(share * (1 - share) / (batch * steps))
    first = (lengths > 0).double().view(steps, batch) - shares[0]
    agreement = (first[:, 1:] * first[:, :-1]).mean() / (shares[0] * (1 - shares[0]))
    assert abs(float(agreement)) < 4 / math.sqrt(steps * (batch - 1))


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


@pytest.mark.parametrize("backend", Backend)
def test_padding_rows_share_a_slot(backend: Backend) -> None:
    layout, rule = step(vector([5, 5, 5, 5]), 3), synthetic_rule([0.7, 0.5, 0.3], 11, DEVICE)
    slots = numbered([8, 2], slots=[0, 3])
    shared = replace(slots, slot_ids=vector([0, 3, 3, 3]))
    alone = synthetic_acceptance(step(vector([5, 5]), 3), rule, slots, backend=backend).tolist()
    lengths = synthetic_acceptance(layout, rule, shared, backend=backend)
    assert lengths.tolist() == [*alone, alone[1], alone[1]]


@pytest.mark.parametrize("backend", Backend)
def test_nothing_to_launch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, synthetic_acceptance_triton)
    layout = step(vector([]), 1, chunk_lens=(3,))
    assert synthetic_acceptance(layout, rule_of([1], 0), backend=backend).shape == (0,)


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    half = [CERTAIN // 2, CERTAIN, CERTAIN // 2]
    arguments = {
        "layout": step(torch.arange(40, device=DEVICE), 3, chunk_lens=(2, 1)),
        "rule": rule_of(half, 5),
        "slots": numbered(list(range(42))),
    }
    refused = {"slots.table": "row-contiguous"}
    free = {"layout.context_lens", "slots.table: shorter", "slots.slot_ids: shorter"}
    check_arguments(synthetic_acceptance, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k"), [(1, 1), (64, 3), (1000, 16)])
def test_in_a_cuda_graph(batch: int, k: int) -> None:
    """Captured once, replayed at other positions, rates and seeds, without a host sync."""
    layout = step(torch.arange(batch, device=DEVICE) * 3, k)
    slots = numbered(list(range(batch)))
    rule = synthetic_rule([0.9**i for i in range(1, k + 1)], 1, DEVICE)
    graph, lengths = captured(
        lambda: synthetic_acceptance(layout, rule, slots, backend=Backend.TRITON)
    )
    for seed, rate in ((7, 0.5), (2**32 - 1, 0.99)):
        other = synthetic_rule([rate**i for i in range(1, k + 1)], seed, DEVICE)
        layout.positions.add_(1717)
        column(slots, "number").add_(5)
        slots.slot_ids[:batch] = slots.slot_ids[:batch].flip(0)
        rule.thresholds.copy_(other.thresholds)
        rule.seed.copy_(other.seed)
        lengths.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        expected = synthetic_acceptance(layout, other, slots, backend=Backend.TORCH)
        assert torch.equal(lengths, expected)

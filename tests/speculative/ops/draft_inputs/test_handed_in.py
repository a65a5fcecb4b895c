"""Outputs handed in: what a first pass writes to them, where states may stay, what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.speculative.ops import first_pass as reference
from mtp_plugin.speculative.ops.draft_inputs import launch
from mtp_plugin.speculative.step import FirstPass
from tests.kernels.top_k.launches import poison
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft_inputs.test_kernel import (
    FLOATS,
    Request,
    Step,
    assert_same_first,
    int32,
    make_step,
    real_step,
    steps,
)
from tests.speculative.ops.on_device import DEVICE, replay_in_graph

both = pytest.mark.parametrize("ops", [reference, launch], ids=["reference", "kernel"])


def num_rows(step: Step, window: int) -> int:
    history = sum(request.history for request in step.contexts)
    return sum(step.lens) + history + len(step.generations) * window


def vanilla_out(
    step: Step, window: int, spare_rows: int = 0, states: torch.Tensor | None = None
) -> FirstPass:
    """Poisoned tensors for the step's result; given states stay as they are."""
    rows, requests = num_rows(step, window), len(step.contexts) + len(step.generations)
    if states is None:
        states = torch.empty(rows + spare_rows, step.hidden, dtype=step.dtype, device=DEVICE)
        poison(states)
    out = FirstPass.unwritten(rows + step.k - 1, rows, requests, states, step.kv_lens)
    for tensor in (out.ids, out.positions, out.last_rows, out.kv_lens):
        poison(tensor)
    return out


def eagle_out(step: Step) -> FirstPass:
    inputs = step.inputs
    out = FirstPass.beside_step(
        inputs["positions"], inputs["hidden_states"], len(step.kv_lens), step.kv_lens
    )
    for tensor in (out.ids, out.last_rows, out.next_positions, out.kv_lens):
        poison(tensor)
    return out


def assert_given_back(first: FirstPass, out: FirstPass, ops: ModuleType) -> None:
    """Every tensor of the result is the one handed in."""
    for field in fields(FirstPass):
        if field.name == "kv_lens" and ops is reference:
            assert first.kv_lens is None  # the draft loop computes them
        else:
            assert getattr(first, field.name) is getattr(out, field.name), field.name


@both
@settings(max_examples=10)
@given(step=steps, exact=st.booleans(), spare_rows=st.integers(0, 2))
def test_vanilla_outputs_take_the_result(
    ops: ModuleType, step: Step, exact: bool, spare_rows: int
) -> None:
    window = step.k + int(exact)
    rows = num_rows(step, window)
    expected, expected_pools = step.vanilla(ops, window)
    out = vanilla_out(step, window, spare_rows)
    first, pools = step.vanilla(ops, window, spare_rows=spare_rows, out=out)
    assert_given_back(first, out, ops)
    assert_same_first(replace(first, states=first.states[:rows]), expected)
    if ops is launch:
        assert same_bits(first.kv_lens, expected.kv_lens)
    for pool, told in zip(pools, expected_pools, strict=True):
        assert same_bits(pool, told)


@both
@settings(max_examples=15)
@given(step=steps, max_position=st.sampled_from([None, 6]))
def test_eagle_outputs_take_the_result(
    ops: ModuleType, step: Step, max_position: int | None
) -> None:
    """Positions and states are the step's own, and are not written."""
    before = {name: value.clone() for name, value in step.inputs.items()}
    expected = step.eagle(ops, max_position)
    out = eagle_out(step)
    first = step.eagle(ops, max_position, out=out)
    assert_given_back(first, out, ops)
    assert_same_first(first, expected)
    assert same_bits(first.next_positions, expected.next_positions)
    if ops is launch:
        assert same_bits(first.kv_lens, expected.kv_lens)
    for name, value in before.items():
        assert same_bits(step.inputs[name], value)


@both
@settings(max_examples=20)
@given(
    k=st.integers(1, 5),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    hidden=st.sampled_from([1, 16, 130]),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_states_may_stay_in_place(
    ops: ModuleType,
    k: int,
    num_contexts: int,
    num_generations: int,
    hidden: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    seed: int,
) -> None:
    """The same rows and pools as the copy, which leaves the step's states alone."""
    if num_contexts + num_generations == 0:
        num_generations = 1
    options: dict[str, Any] = {"dtype": dtype, "pool_dtype": pool_dtype, "remembers": False}
    step = make_step(seed, k, num_contexts, num_generations, hidden, **options)
    states = step.inputs["hidden_states"]
    before = states.clone()
    expected, expected_pools = step.vanilla(ops, k + 1)
    assert same_bits(states, before)
    out = vanilla_out(step, k + 1, states=states)
    first, pools = step.vanilla(ops, k + 1, out=out)
    assert_given_back(first, out, ops)
    # where the step's states are, the expected ones may be a view of them
    told = replace(expected, states=torch.cat([before[: sum(step.lens)], windows_of(step, before)]))
    assert_same_first(first, told)
    for pool, moved in zip(pools, expected_pools, strict=True):
        assert same_bits(pool, moved)
    assert same_bits(states[: sum(step.lens)], before[: sum(step.lens)])


def windows_of(step: Step, states: torch.Tensor) -> torch.Tensor:
    """States of the generations' rows from pools and step: the last K+1 before the newest token."""
    rows, start = [], sum(step.lens)
    for g, request in enumerate(step.generations):
        slot = step.slots[len(step.contexts) + g]
        own = states[start + g * (step.k + 1) :][: step.k + 1]
        entries = torch.cat([step.states_pool[slot].to(own.dtype), own])
        first = len(request.emitted) - 1
        rows.append(entries[first : first + step.k + 1])
    return torch.cat([states[:0], *rows])


def test_prompts_alone_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place the states of a step without generations are read, and no more."""
    step = make_step(2, 3, 3, 0, 16, remembers=False)
    states = step.inputs["hidden_states"]
    out, version = vanilla_out(step, 4, states=states), states._version
    step.vanilla(reference, 4, out=out)
    assert states._version == version

    kernel, copies = launch.context_rows_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                copies.append(options["COPY_STATES"])
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(launch, "context_rows_kernel", Watched())
    step.vanilla(launch, 4, out=out)
    step.vanilla(launch, 4, out=vanilla_out(step, 4))
    assert copies == [False, True]


@both
def test_states_of_a_larger_buffer_stay_in_place(ops: ModuleType) -> None:
    """The step's states are the front of a buffer with spare rows."""
    step = make_step(3, 2, 1, 2, 8, remembers=False)
    expected, _ = step.vanilla(ops, 3)
    states = step.inputs["hidden_states"]
    buffer = torch.full((len(states) + 1, 8), torch.nan, device=DEVICE)
    buffer[:-1] = states
    step.inputs["hidden_states"] = buffer[:-1]
    first, _ = step.vanilla(ops, 3, spare_rows=1, out=vanilla_out(step, 3, states=buffer))
    assert first.states is buffer
    assert same_bits(buffer[:-1], expected.states)


def refused(
    step: Step, ops: ModuleType, window: int, out: FirstPass, message: str, **options: Any
) -> None:
    """The call raises, and moves no pool."""
    pools = step.pools()
    step.pools = lambda: pools
    before = [pool.clone() for pool in pools]
    with pytest.raises(TensorContractError, match=message):
        step.vanilla(ops, window, out=out, **options)
    assert all(same_bits(pool, same) for pool, same in zip(pools, before, strict=True))


@both
def test_in_place_is_refused_where_rows_move(ops: ModuleType) -> None:
    step = make_step(3, 3, 0, 2, 8)
    states = step.inputs["hidden_states"]
    refused(step, ops, 3, vanilla_out(step, 3, states=states[:6]), "windows of 3")
    out = vanilla_out(step, 4, states=states)
    refused(step, ops, 4, out, "the step's 2 rows, .* windows of 4", step_rows=2)

    step = Step(3, [Request([1, 2, 3, 4], 2, [], 5, history=2)], [], hidden=8)
    buffer = torch.zeros(4, 8, device=DEVICE)
    step.inputs["hidden_states"] = buffer[:2]
    refused(step, ops, 4, vanilla_out(step, 4, states=buffer), "2 history rows")


@both
@pytest.mark.parametrize("kind", ["shifted", "wide"])
def test_states_that_overlap_otherwise_are_refused(ops: ModuleType, kind: str) -> None:
    step = make_step(3, 3, 0, 2, 8)
    buffer = torch.zeros(2 * 8 + 1, 8, device=DEVICE)
    if kind == "shifted":
        step.inputs["hidden_states"] = buffer[1:9]
    else:
        step.inputs["hidden_states"] = buffer[:16].view(8, 16)[:, :8]
    refused(step, ops, 4, vanilla_out(step, 4, states=buffer[:8]), "overlap them elsewhere")


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": int32([0] * 9)}, r"pass, ids: expected contiguous torch.int32 \[10\] .* \[9\]"),
        ({"ids": torch.zeros(10, device=DEVICE)}, "pass, ids: .*got torch.float32"),
        ({"positions": int32([0] * 8)}, r"pass, positions: .*torch.int64 \[8\]"),
        ({"states": torch.zeros(8, 3, device=DEVICE)}, r"pass, states: .*\[8, 16\] .*\[8, 3\]"),
        ({"states": torch.zeros(8, 32, device=DEVICE)[:, ::2]}, r"states: .*strides \[32, 2\]"),
        ({"states": torch.zeros(8, 16, device="meta")}, "states: expected .*got .*on meta"),
        ({"last_rows": torch.zeros(3).long()}, r"pass, last_rows: .*torch.int64 \[2\]"),
        ({"kv_lens": torch.zeros(2).long()}, r"pass, kv_lens: .*torch.int32 \[2\] .*int64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_vanilla_outputs_that_do_not_fit(
    ops: ModuleType, change: dict[str, Any], message: str
) -> None:
    step = make_step(3, 3, 0, 2, 16)
    refused(step, ops, 4, replace(vanilla_out(step, 4), **change), message)


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": int32([0] * 9)}, r"pass, ids: expected contiguous torch.int32 \[8\] .* \[9\]"),
        ({"positions": torch.zeros(8).long()}, "positions: expected the step's own"),
        ({"states": torch.zeros(8, 16)}, "states: expected the step's own"),
        ({"last_rows": int32([0, 0])}, r"pass, last_rows: .*torch.int64 \[2\]"),
        ({"next_positions": None}, r"pass, next_positions: .*got None"),
        ({"kv_lens": int32([0])}, r"pass, kv_lens: .*torch.int32 \[2\] .*\[1\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_eagle_outputs_that_do_not_fit(
    ops: ModuleType, change: dict[str, Any], message: str
) -> None:
    step = make_step(3, 3, 0, 2, 16)
    with pytest.raises(TensorContractError, match=message):
        step.eagle(ops, out=replace(eagle_out(step), **change))


@both
def test_kv_lengths_are_taken_where_the_step_has_some(ops: ModuleType) -> None:
    step = make_step(3, 3, 1, 2, 16, remembers=False)
    for out in (vanilla_out(step, 4), eagle_out(step)):
        vanilla = out.next_positions is None
        spare = replace(out, kv_lens=None)
        first = step.vanilla(ops, 4, out=spare)[0] if vanilla else step.eagle(ops, out=spare)
        assert first.kv_lens is None
    outs = vanilla_out(step, 4), eagle_out(step)
    step.kv_lens = None
    message = r"kv_lens: expected None where the step has no KV lengths, got torch.int32 \[3\]"
    refused(step, ops, 4, outs[0], message)
    with pytest.raises(TensorContractError, match=message):
        step.eagle(ops, out=outs[1])


def test_an_empty_batch_is_not_in_place() -> None:
    """Tensors without elements may all have one address, which says nothing."""
    tokens_pool, states_pool = make_step(1, 3, 0, 1, 8).pools()
    none, states = int32([]), torch.zeros(0, 8, device=DEVICE)
    first = launch.vanilla_first_pass(
        tokens_pool,
        states_pool,
        none.long(),
        none,
        none.long(),
        states,
        none,
        none,
        None,
        none,
        chunk_lens=[],
        history_lens=[],
        window=3,
        out=FirstPass.unwritten(2, 0, 0, states),
    )
    assert first.states is states


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vanilla", "eagle", "in-place"])
@pytest.mark.parametrize(("batch", "k", "hidden"), [(1, 3, 7168), (64, 3, 7168), (33, 7, 4096)])
def test_nothing_is_allocated(batch: int, k: int, hidden: int, kind: str) -> None:
    """Captured once with its outputs, replayed with other requests in other slots."""
    mine, other = (real_step(seed, 0, batch, k, hidden) for seed in (1, 10))
    for step in (mine, other):
        step.inputs["hidden_states"] = step.inputs["hidden_states"].contiguous()
    pools, slots = mine.pools(), torch.tensor(mine.slots, device=DEVICE)
    other_slots = torch.tensor(other.slots, device=DEVICE)
    in_place = mine.inputs["hidden_states"] if kind == "in-place" else None
    out = eagle_out(mine) if kind == "eagle" else vanilla_out(mine, k + 1, states=in_place)

    def step() -> None:
        shared: dict[str, Any] = {"kv_lens": mine.kv_lens, "out": out}
        inputs, lens = mine.inputs.values(), mine.context_lens
        if kind == "eagle":
            shared |= {"num_contexts": 0, "num_ctx_tokens": 0, "max_position": 9}
            counts = mine.num_accepted
            launch.eagle_first_pass(*inputs, mine.accepted, counts, None, lens, **shared)
        else:
            shared |= {"chunk_lens": [], "history_lens": [], "window": k + 1}
            counts = mine.num_accepted, mine.last_tokens
            launch.vanilla_first_pass(*pools, slots, *inputs, *counts, None, lens, **shared)

    def change() -> None:
        for name, value in mine.inputs.items():
            value.copy_(other.inputs[name])
        for name in ("accepted", "num_accepted", "last_tokens", "kv_lens"):
            getattr(mine, name).copy_(getattr(other, name))
        for pool, fresh in zip(pools, other.pools(), strict=True):
            pool.copy_(fresh)
        slots.copy_(other_slots)

    replay_in_graph(step, change)
    if kind == "eagle":
        expected = other.eagle(reference, 9)
        assert same_bits(out.next_positions, expected.next_positions)
    else:
        expected, expected_pools = other.vanilla(reference, k + 1)
        for pool, told in zip(pools, expected_pools, strict=True):
            assert same_bits(pool, told)
    assert_same_first(out, expected)

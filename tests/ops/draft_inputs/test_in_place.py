"""When the first pass uses the memory of the step's states, and which copies that saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import draft_inputs_triton
from tests.ops.bits import same_bits
from tests.ops.draft_inputs.batches import (
    FLOATS,
    Batch,
    assert_same_first,
    make_batch,
)

both = pytest.mark.parametrize("backend", Backend)


@both
@settings(max_examples=25)
@given(
    k=st.integers(1, 5),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    hidden=st.sampled_from([1, 16, 130]),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_the_same_rows_and_pools(
    backend: Backend,
    k: int,
    num_contexts: int,
    num_generations: int,
    hidden: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    seed: int,
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "pool_dtype": pool_dtype, "remembers": False}
    batch = make_batch(seed, k, num_contexts, num_generations, hidden, **options)
    before = batch.hidden_states.clone()
    expected, expected_pools = batch.vanilla(Backend.TORCH, k + 1)
    # where nothing is written the expected states may be the step's own
    expected = replace(expected, states=expected.states.clone())
    first, pools = batch.vanilla(backend, k + 1, may_overwrite_states=True)
    if backend is Backend.TRITON:
        assert (first.states is batch.hidden_states) == (num_contexts > 0)
    assert_same_first(first, expected)
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert same_bits(pool, expected)
    prompts = sum(batch.lens)
    assert same_bits(batch.hidden_states[:prompts], before[:prompts])


def prompts_and_generations(**options: Any) -> Batch:
    return make_batch(3, 3, 2, 2, 8, remembers=False, **options)


def prompts_with_history() -> Batch:
    batch = next(
        batch for seed in range(99) if any((batch := make_batch(seed, 3, 2, 0, 8)).history_lens)
    )
    assert not batch.generations
    return batch


@both
@pytest.mark.parametrize(
    ("batch", "window", "options"),
    [
        (make_batch(3, 3, 0, 2, 8), 4, {"may_overwrite_states": True}),
        (prompts_with_history(), 4, {"may_overwrite_states": True}),
        (prompts_and_generations(), 3, {"may_overwrite_states": True}),
        (prompts_and_generations(draft_len=2), 4, {"may_overwrite_states": True}),
        (prompts_and_generations(), 4, {"may_overwrite_states": True, "spare_rows": 1}),
        (prompts_and_generations(spare=1), 4, {"may_overwrite_states": True}),
        (prompts_and_generations(), 4, {}),
    ],
    ids=[
        "no prompts to leave",
        "history rows",
        "narrow window",
        "wide window",
        "spare rows",
        "gaps",
        "still read",
    ],
)
def test_elsewhere_the_states_are_left_alone(
    backend: Backend, batch: Batch, window: int, options: dict[str, Any]
) -> None:
    before = batch.hidden_states.clone()
    first, _ = batch.vanilla(backend, window, **options)
    assert same_bits(batch.hidden_states, before)
    assert first.states.data_ptr() != batch.hidden_states.data_ptr()


@pytest.mark.parametrize("may_overwrite", [False, True])
def test_prompts_alone_are_not_written(
    monkeypatch: pytest.MonkeyPatch, may_overwrite: bool
) -> None:
    """Without generations nothing is overwritten, so it needs no permission; nothing is copied."""
    batch = make_batch(2, 3, 3, 0, 16, remembers=False)
    kernel, copies = draft_inputs_triton.context_rows_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                copies.append(options["COPY_STATES"])
                kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(draft_inputs_triton, "context_rows_kernel", Watched())
    first, _ = batch.vanilla(Backend.TRITON, 4, may_overwrite_states=may_overwrite)
    assert first.states is batch.hidden_states
    batch.vanilla(Backend.TRITON, 4, spare_rows=1)
    assert copies == [False, True]


def test_prompts_alone_in_torch_stay_where_they_are() -> None:
    batch = make_batch(2, 3, 3, 0, 16, remembers=False)
    states, version = batch.hidden_states, batch.hidden_states._version
    first, _ = batch.vanilla(Backend.TORCH, 4)
    assert first.states.data_ptr() == states.data_ptr()
    assert states._version == version

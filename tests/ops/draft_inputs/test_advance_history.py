"""The history alone: example, torch reference and Triton agree, other slots do not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import History, TargetRows, advance_history
from mtp_plugin.ops.step import StepLayout
from tests.op_arguments import poisoned_memory
from tests.ops.bits import same_bits
from tests.ops.draft_inputs.batches import Batch, batches, int32
from tests.ops.on_device import DEVICE, poisoned
from tests.ops.top_k.launches import captured

both = pytest.mark.parametrize("backend", Backend)


@both
@settings(max_examples=40)
@given(batch=batches, sharing=st.integers(0, 2))
def test_history_matches_the_example(backend: Backend, batch: Batch, sharing: int) -> None:
    """Requests in any slots, padding rows that share the last one, all other slots unchanged."""
    sharing = min(sharing, len(batch.generations))
    batch = replace(batch, sharing=sharing)
    before = {name: value.clone() for name, value in batch.inputs().items()}
    batch.assert_history(batch.advanced(backend))
    for name, value in batch.inputs().items():
        assert same_bits(value, before[name]), name


# --- kernels and torch on random bits ---


class Step:
    """Random pools and inputs; states are random bits that the pools' type can hold."""

    def __init__(
        self,
        seed: int,
        k: int,
        chunks: list[int],
        num_generations: int,
        hidden: int,
        *,
        sharing: int = 0,
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype = torch.float32,
        exact: bool = True,
        spare: int = 0,
        id_dtype: torch.dtype = torch.int32,
    ) -> None:
        rng, r = torch.Generator().manual_seed(seed), random.Random(seed)
        requests = len(chunks) + num_generations
        self.sentinel = requests + 2
        slots = r.sample(range(self.sentinel), requests - sharing) + [self.sentinel] * sharing
        rows = sum(chunks) + num_generations * (k + 1)

        def noise(*shape: int, to: torch.dtype) -> torch.Tensor:
            values = torch.randn(shape, generator=rng)
            return (values.bfloat16() if exact else values).to(to)

        def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=rng)

        self.tokens_pool = numbers(0, 999, self.sentinel + 1, k).int().to(DEVICE)
        self.states_pool = noise(self.sentinel + 1, k, hidden, to=pool_dtype).to(DEVICE)
        wide = torch.full((rows, hidden + spare), torch.nan, dtype=dtype)
        wide[:, :hidden] = noise(rows, hidden, to=dtype)
        self.slots = torch.tensor(slots, device=DEVICE).long()
        self.input_ids = numbers(0, 999, rows).to(DEVICE, id_dtype)
        self.states = wide.to(DEVICE)[:, :hidden]
        self.counts = numbers(0, k + 2, requests).int().to(DEVICE)
        self.layout = StepLayout(tuple(chunks), num_generations, k, int32(chunks))

    def advance(self, backend: Backend, *pools: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """On these pools, or on copies."""
        pools = pools or (self.tokens_pool.clone(), self.states_pool.clone())
        with poisoned_memory():
            advance_history(
                self.layout,
                History(*pools, self.slots),
                TargetRows(self.input_ids, self.states),
                self.counts,
                backend=backend,
            )
        return pools

    def assert_same(self) -> tuple[torch.Tensor, ...]:
        """Kernels and torch leave the same in every slot but the shared one."""
        pools = self.advance(Backend.TRITON)
        expected = self.advance(Backend.TORCH)
        for pool, other in zip(pools, expected, strict=True):
            assert same_bits(pool[: self.sentinel], other[: self.sentinel])
        return pools


@pytest.mark.gpu
def test_states_are_rounded_into_a_narrow_pool() -> None:
    """To the nearest; Triton's interpreter truncates, so this needs a device."""
    Step(
        1, 3, [2, 6], 3, 40, dtype=torch.float32, pool_dtype=torch.bfloat16, exact=False
    ).assert_same()


@pytest.mark.parametrize(("chunks", "generations"), [([1], 0), ([], 1)], ids=["prompt", "decode"])
def test_a_wide_pool_keeps_its_bits(chunks: list[int], generations: int) -> None:
    """An fp32 pool with bf16 states: entries that stay in the history keep their precision."""
    step = Step(
        1, 3, chunks, generations, 40, dtype=torch.bfloat16, pool_dtype=torch.float32, exact=False
    )
    step.counts.fill_(1)
    step.assert_same()


REAL = [
    pytest.param([], 4, 3, 4096, id="4x4096-k3"),
    pytest.param([1, 2, 700, 5], 64, 7, 7168, id="4+64x7168-k7"),
    pytest.param([], 256, 3, 7168, id="256x7168-k3"),
    pytest.param([3] * 8, 1024, 1, 4096, id="8+1024x4096-k1"),
]
BRAINS = {"dtype": torch.bfloat16, "pool_dtype": torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize(("chunks", "generations", "k", "hidden"), REAL)
def test_in_a_cuda_graph(chunks: list[int], generations: int, k: int, hidden: int) -> None:
    """Replayed with other slots, counts, tokens and states."""
    mine = Step(1, k, chunks, generations, hidden, **BRAINS)
    pools = mine.tokens_pool.clone(), mine.states_pool.clone()
    graph, _ = captured(lambda: mine.advance(Backend.TRITON, *pools))
    for seed in (2, 3):
        other = Step(seed, k, chunks, generations, hidden, **BRAINS)
        for name in ("slots", "input_ids", "states", "counts"):
            getattr(mine, name).copy_(getattr(other, name))
        pools[0].copy_(other.tokens_pool)
        pools[1].copy_(other.states_pool)
        graph.replay()
        torch.cuda.synchronize()
        for pool, expected in zip(pools, other.advance(Backend.TORCH), strict=True):
            assert same_bits(pool, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    device_memory(12)
    k, hidden = 3, 7168
    near = Step(1, k, [2, 5], 3, hidden, **BRAINS)
    slots = 2**31 // (k * hidden) + 16
    shift = slots - near.tokens_pool.shape[0]
    tokens = poisoned(slots, k, dtype=torch.int32)
    states = torch.empty(slots, k, hidden, dtype=torch.bfloat16, device=DEVICE)
    tokens[shift:] = near.tokens_pool
    states[shift:] = near.states_pool
    expected = near.advance(Backend.TORCH)
    near.slots += shift
    assert int(near.slots.max()) * k * hidden > 2**31
    near.advance(Backend.TRITON, tokens, states)
    assert same_bits(tokens[shift:], expected[0])
    assert same_bits(states[shift:], expected[1])

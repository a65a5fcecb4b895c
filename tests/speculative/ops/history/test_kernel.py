"""The history's kernels on their own: the reference, the story, and slots of nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.speculative.ops.draft_inputs import launch
from mtp_plugin.speculative.ops.history import reference
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.history import story
from tests.speculative.ops.history.story import Pair
from tests.speculative.ops.letters import ids
from tests.speculative.ops.on_device import DEVICE, poisoned

FLOATS = (torch.float32, torch.bfloat16)


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
        behind: int = 0,
        id_dtype: torch.dtype = torch.int32,
        spare_slots: int = 2,
    ) -> None:
        dice, r = torch.Generator().manual_seed(seed), random.Random(seed)
        requests = len(chunks) + num_generations
        self.k, self.chunks, self.behind = k, chunks, behind
        self.sentinel = requests + spare_slots
        slots = r.sample(range(self.sentinel), requests - sharing) + [self.sentinel] * sharing
        rows = sum(chunks) + num_generations * (k + 1)

        def noise(*shape: int, to: torch.dtype) -> torch.Tensor:
            values = torch.randn(shape, generator=dice)
            return (values.bfloat16() if exact else values).to(to)

        def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=dice)

        self.tokens_pool = numbers(0, 999, self.sentinel + 1, k).int().to(DEVICE)
        self.states_pool = noise(self.sentinel + 1, k, hidden, to=pool_dtype).to(DEVICE)
        wide = torch.full((rows, hidden + behind), torch.nan, dtype=dtype)
        wide[:, :hidden] = noise(rows, hidden, to=dtype)
        self.slots = torch.tensor(slots, device=DEVICE)
        self.input_ids = numbers(0, 999, rows).to(DEVICE, id_dtype)
        self.states = wide.to(DEVICE)[:, :hidden]
        self.counts = numbers(0, k + 2, requests).int().to(DEVICE)
        self.context_lens = torch.tensor(chunks, dtype=torch.int32, device=DEVICE)

    def advance(self, module: Any, *pools: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """On these pools, or on copies."""
        pools = pools or (self.tokens_pool.clone(), self.states_pool.clone())
        with poisoned_outputs(launch):
            module.advance_history(
                *pools,
                self.slots,
                self.input_ids,
                self.states,
                self.counts,
                self.context_lens,
                num_contexts=len(self.chunks),
                num_ctx_tokens=sum(self.chunks),
                step_rows=self.k + 1,
            )
        return pools

    def assert_same(self) -> tuple[torch.Tensor, ...]:
        """Kernel and reference leave the same in every slot but the shared one."""
        pools = self.advance(launch)
        expected = self.advance(reference)
        for pool, told in zip(pools, expected, strict=True):
            assert same_bits(pool[: self.sentinel], told[: self.sentinel])
        return pools


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 7),
    chunks=st.lists(st.integers(1, 9), max_size=3),
    num_generations=st.integers(0, 4),
    sharing=st.integers(0, 2),
    hidden=st.sampled_from([1, 3, 16, 130]),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(FLOATS),
    behind=st.integers(0, 3),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_batch(seed, num_generations, sharing, **options: Any) -> None:
    generations = num_generations + sharing
    if not options["chunks"] and not generations:
        generations = 1
    step = Step(seed, num_generations=generations, sharing=sharing, **options)
    before = step.input_ids.clone(), step.states.clone()
    tokens, states = step.assert_same()
    for slot in set(range(step.sentinel)) - set(step.slots.tolist()):
        assert same_bits(tokens[slot], step.tokens_pool[slot])
        assert same_bits(states[slot], step.states_pool[slot])
    assert same_bits(step.input_ids, before[0])
    assert same_bits(step.states, before[1])


@pytest.mark.parametrize("num_accepted", range(5))
def test_letters_of_a_generation(num_accepted: int) -> None:
    """K = 3, pool `a b c`, inputs `t u v w`: R42's counts 0..K and the bonus."""
    pool, inputs = ids("abc"), ids("tuvw")
    tokens = torch.tensor([pool], dtype=torch.int32, device=DEVICE)
    states = tokens.float().unsqueeze(2).repeat(1, 1, 5)
    read = torch.tensor(inputs, dtype=torch.int32, device=DEVICE)
    launch.advance_history(
        tokens,
        states,
        torch.tensor([0], device=DEVICE),
        read,
        read.float().unsqueeze(1).repeat(1, 5),
        torch.tensor([num_accepted], dtype=torch.int32, device=DEVICE),
        torch.empty(0, dtype=torch.int32, device=DEVICE),
        num_contexts=0,
        num_ctx_tokens=0,
        step_rows=4,
    )
    kept = story.after_generation(
        [Pair(t, float(t)) for t in pool], [Pair(t, float(t)) for t in inputs], num_accepted
    )
    assert tokens.tolist() == [[pair.token for pair in kept]]
    assert states[0].tolist() == [[pair.state] * 5 for pair in kept]


def test_prompts_shorter_than_the_history() -> None:
    """Chunks of 1..K+2 tokens: what the pool held moves up, the chunk follows."""
    k = 4
    step = Step(3, k, [1, 2, 3, 4, 5, 6], 0, 20)
    tokens, states = step.assert_same()
    ends = step.context_lens.cumsum(0).tolist()
    for slot, end, length in zip(step.slots.tolist(), ends, step.chunks, strict=True):
        span = slice(end - length, end)
        old = map(Pair, step.tokens_pool[slot].tolist(), step.states_pool[slot, :, 7].tolist())
        new = map(Pair, step.input_ids[span].tolist(), step.states[span, 7].tolist())
        kept = story.after_prompt(list(old), list(new))
        assert tokens[slot].tolist() == [pair.token for pair in kept]
        assert states[slot, :, 7].tolist() == [pair.state for pair in kept]


@pytest.mark.gpu
def test_states_are_rounded_into_a_narrow_pool() -> None:
    """To the nearest; Triton's interpreter cuts bits off instead, so only a device can tell."""
    Step(
        1, 3, [2, 6], 3, 40, dtype=torch.float32, pool_dtype=torch.bfloat16, exact=False
    ).assert_same()


@pytest.mark.parametrize(("chunks", "generations"), [([1], 0), ([], 1)], ids=["prompt", "decode"])
def test_a_wide_pool_keeps_its_bits(chunks: list[int], generations: int) -> None:
    """An fp32 pool beside bf16 states: what stays in the history stays as it is."""
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
def test_real_shapes(chunks: list[int], generations: int, k: int, hidden: int) -> None:
    step = Step(1, k, chunks, generations, hidden, sharing=3, behind=64, **BRAINS)
    for _ in range(3):
        step.assert_same()


@pytest.mark.gpu
@pytest.mark.parametrize(("chunks", "generations", "k", "hidden"), REAL)
def test_in_a_cuda_graph(chunks: list[int], generations: int, k: int, hidden: int) -> None:
    """Replayed with other slots, counts, tokens and states."""
    mine = Step(1, k, chunks, generations, hidden, **BRAINS)
    pools = mine.tokens_pool.clone(), mine.states_pool.clone()
    graph, _ = captured(lambda: mine.advance(launch, *pools))
    for seed in (2, 3):
        other = Step(seed, k, chunks, generations, hidden, **BRAINS)
        for name in ("slots", "input_ids", "states", "counts"):
            getattr(mine, name).copy_(getattr(other, name))
        pools[0].copy_(other.tokens_pool)
        pools[1].copy_(other.states_pool)
        graph.replay()
        torch.cuda.synchronize()
        for pool, told in zip(pools, other.advance(reference), strict=True):
            assert same_bits(pool, told)


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
    expected = near.advance(reference)
    near.slots += shift
    assert int(near.slots.max()) * k * hidden > 2**31
    near.advance(launch, tokens, states)
    assert same_bits(tokens[shift:], expected[0])
    assert same_bits(states[shift:], expected[1])

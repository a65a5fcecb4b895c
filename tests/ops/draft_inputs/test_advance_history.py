"""The history alone: example, torch reference and Triton agree, other slots do not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import History, TargetRows, advance_history
from mtp_plugin.ops.step import StepLayout
from tests.op_arguments import poisoned_memory
from tests.ops.bits import same_bits
from tests.ops.draft_inputs import example
from tests.ops.draft_inputs.batches import FLOATS, int32
from tests.ops.draft_inputs.example import Pair
from tests.ops.letters import ids
from tests.ops.on_device import DEVICE, poisoned
from tests.ops.top_k.launches import captured

both = pytest.mark.parametrize("backend", Backend)
H = 3


# --- examples in letters ---


def pairs(letters: str) -> list[Pair]:
    return [Pair(token, 10.0 + token) for token in ids(letters)]


def states_of(rows: list[Pair], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A state is its name in every column, moved on by the column."""
    names = torch.tensor([row.state for row in rows], dtype=torch.float32).reshape(-1, 1)
    return (names + 0.25 * torch.arange(H)).to(DEVICE, dtype)


def tokens_of(rows: list[Pair]) -> torch.Tensor:
    return int32([row.token for row in rows])


class Pools:
    """S slots of K pairs; slots that no request of the story has hold NaN and a foreign number."""

    def __init__(
        self,
        slots: dict[int, list[Pair]],
        num_slots: int,
        k: int,
        backend: Backend,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backend, self.dtype = backend, dtype
        self.tokens = poisoned(num_slots, k, dtype=torch.int32)
        self.states = torch.full((num_slots, k, H), torch.nan, dtype=dtype, device=DEVICE)
        for slot, rows in slots.items():
            self.tokens[slot] = tokens_of(rows)
            self.states[slot] = states_of(rows, dtype)
        self.before = self.tokens.clone(), self.states.clone()

    def advance(
        self,
        slot_ids: list[int],
        contexts: list[list[Pair]],
        generations: list[list[Pair]],
        num_accepted: list[int],
        *,
        draft_len: int | None = None,
        input_dtype: torch.dtype = torch.int32,
    ) -> None:
        chunks = [row for chunk in contexts for row in chunk]
        flat = chunks + [row for step in generations for row in step]
        layout = StepLayout(
            chunk_lens=tuple(len(chunk) for chunk in contexts),
            num_generations=len(generations),
            draft_len=self.tokens.shape[1] if draft_len is None else draft_len,
            context_lens=int32([len(chunk) for chunk in contexts]),
        )
        advance_history(
            layout,
            History(self.tokens, self.states, torch.tensor(slot_ids).long().to(DEVICE)),
            TargetRows(
                tokens_of(flat).to(input_dtype), states_of(flat, self.dtype).reshape(len(flat), H)
            ),
            int32([1] * len(contexts) + num_accepted),
            backend=self.backend,
        )

    def assert_slot(self, slot: int, rows: list[Pair]) -> None:
        assert torch.equal(self.tokens[slot], tokens_of(rows))
        assert torch.equal(self.states[slot], states_of(rows, self.dtype))

    def assert_untouched(self, slot: int) -> None:
        assert same_bits(self.tokens[slot], self.before[0][slot])
        assert same_bits(self.states[slot], self.before[1][slot])


@both
def test_letters(backend: Backend) -> None:
    """K = 3: `p q r s` emits `t`; `t u v w` emits `u v x`; `x` and wrong drafts emit `y`."""
    pools = Pools({1: [Pair(0, 0.0)] * 3}, 3, 3, backend)
    pools.advance([1], [pairs("pqrs")], [], [])
    pools.assert_slot(1, pairs("qrs"))
    pools.advance([1], [], [pairs("tuvw")], [3])
    pools.assert_slot(1, pairs("tuv"))
    pools.advance([1], [], [pairs("xabc")], [1])
    pools.assert_slot(1, pairs("uvx"))
    pools.assert_untouched(0)
    pools.assert_untouched(2)


@both
@pytest.mark.parametrize(
    ("step", "num_accepted", "kept"),
    [
        ("tuvw", 0, "abc"),
        ("tuvw", 1, "bct"),
        ("tuvw", 2, "ctu"),
        ("tuvw", 3, "tuv"),
        ("tuvw", 4, "uvw"),
        ("tu", 2, "ctu"),
        ("t", 0, "abc"),
        ("t", 1, "bct"),
    ],
)
def test_every_count_of_a_generation(
    backend: Backend, step: str, num_accepted: int, kept: str
) -> None:
    """Of K drafts and of fewer."""
    pools = Pools({0: pairs("abc")}, 1, 3, backend)
    pools.advance([0], [], [pairs(step)], [num_accepted], draft_len=len(step) - 1)
    pools.assert_slot(0, pairs(kept))
    assert example.after_generation(pairs("abc"), pairs(step), num_accepted) == pairs(kept)


@both
@pytest.mark.parametrize(
    ("chunk", "kept"), [("s", "bcs"), ("st", "cst"), ("stu", "stu"), ("stuv", "tuv")]
)
def test_every_length_of_a_chunk(backend: Backend, chunk: str, kept: str) -> None:
    pools = Pools({0: pairs("abc")}, 1, 3, backend)
    pools.advance([0], [pairs(chunk)], [], [])
    pools.assert_slot(0, pairs(kept))
    assert example.after_prompt(pairs("abc"), pairs(chunk)) == pairs(kept)


@both
def test_chunks_leave_what_the_whole_prompt_leaves(backend: Backend) -> None:
    fresh = {0: [Pair(0, 0.0)] * 4}
    whole = Pools(fresh, 1, 4, backend)
    whole.advance([0], [pairs("abcdefg")], [], [])
    for cut in range(1, 7):
        pieces = Pools(fresh, 1, 4, backend)
        pieces.advance([0], [pairs("abcdefg")[:cut]], [], [])
        pieces.advance([0], [pairs("abcdefg")[cut:]], [], [])
        pieces.assert_slot(0, pairs("defg"))
        assert same_bits(pieces.states, whole.states)


@both
@settings(max_examples=40)
@given(
    k=st.integers(1, 7),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    num_dummies=st.integers(0, 3),
    fewer=st.integers(0, 7),
    dtype=st.sampled_from(FLOATS),
    input_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_the_story_of_any_batch(
    backend: Backend,
    k: int,
    num_contexts: int,
    num_generations: int,
    num_dummies: int,
    fewer: int,
    dtype: torch.dtype,
    input_dtype: torch.dtype,
    seed: int,
) -> None:
    """Requests in any slots, padding rows that share the last one, everything else left alone."""
    rng = random.Random(seed)
    requests = num_contexts + num_generations
    num_slots = requests + 3
    sentinel = num_slots - 1
    slots = rng.sample(range(sentinel), requests)
    draft_len = max(k - fewer, 0)

    def make(count: int) -> list[Pair]:
        return [Pair(rng.randrange(100), float(rng.randrange(64))) for _ in range(count)]

    past = {slot: make(k) for slot in slots}
    pools = Pools(past, num_slots, k, backend, dtype)
    contexts = [make(rng.randint(1, 2 * k + 1)) for _ in range(num_contexts)]
    steps = [make(draft_len + 1) for _ in range(num_generations + num_dummies)]
    counts = [rng.randint(0, draft_len + 1) for _ in range(num_generations + num_dummies)]
    pools.advance(
        slots + [sentinel] * num_dummies,
        contexts,
        steps,
        counts,
        draft_len=draft_len,
        input_dtype=input_dtype,
    )
    for slot, chunk in zip(slots, contexts, strict=False):
        pools.assert_slot(slot, example.after_prompt(past[slot], chunk))
    for slot, step, n in zip(slots[num_contexts:], steps, counts, strict=False):
        pools.assert_slot(slot, example.after_generation(past[slot], step, n))
    for slot in set(range(sentinel)) - set(slots):
        pools.assert_untouched(slot)


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
    spare=st.integers(0, 3),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_batch(seed: int, num_generations: int, sharing: int, **options: Any) -> None:
    step = Step(seed, num_generations=num_generations + sharing, sharing=sharing, **options)
    before = step.input_ids.clone(), step.states.clone()
    tokens, states = step.assert_same()
    for slot in set(range(step.sentinel)) - set(step.slots.tolist()):
        assert same_bits(tokens[slot], step.tokens_pool[slot])
        assert same_bits(states[slot], step.states_pool[slot])
    assert same_bits(step.input_ids, before[0])
    assert same_bits(step.states, before[1])


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
def test_real_shapes(chunks: list[int], generations: int, k: int, hidden: int) -> None:
    step = Step(1, k, chunks, generations, hidden, sharing=3, spare=64, **BRAINS)
    for _ in range(3):
        step.assert_same()


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

"""The first pass from the kernels: rows of reference and story, every element written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.speculative import step as step_batch
from mtp_plugin.speculative.ops import first_pass as reference
from mtp_plugin.speculative.ops.draft_inputs import launch
from mtp_plugin.speculative.step import FirstPass
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft_inputs import story
from tests.speculative.ops.history import story as remembering
from tests.speculative.ops.history.story import Pair
from tests.speculative.ops.letters import ids
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned, read_back_forbidden

FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """A request's committed tokens and inputs, and what this step emits behind them."""

    tokens: list[int]  # prompt so far, or committed tokens and the K+1 inputs of the step
    start: int  # first position of this step
    emitted: list[int]  # of a generation
    successor: int  # behind a chunk
    history: int  # rows in front of a chunk


@dataclass
class Step:
    """A batch on the device. The state of position p of request r is a number that says so."""

    k: int
    contexts: list[Request]
    generations: list[Request]
    hidden: int
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    behind: int = 0  # columns behind H
    sharing: int = 0  # generations at the end that share the last slot, as padding does
    seed: int = 0

    def __post_init__(self) -> None:
        everyone = self.contexts + self.generations
        r = random.Random(self.seed)
        real = len(everyone) - self.sharing
        self.num_slots = len(everyone) + 2
        self.slots = r.sample(range(self.num_slots - 1), real) + [self.num_slots - 1] * self.sharing
        k, shape = self.k, (self.num_slots, self.k)
        self.tokens_pool = poisoned(*shape, dtype=torch.int32)
        self.states_pool = torch.full(
            (*shape, self.hidden), torch.nan, dtype=self.pool_dtype, device=DEVICE
        )
        for name, (slot, request) in enumerate(zip(self.slots, everyone, strict=True)):
            past = self.past(request)
            self.tokens_pool[slot] = torch.tensor([pair.token for pair in past], dtype=torch.int32)
            self.states_pool[slot] = self.states(name, [pair.state for pair in past])
        flat = [token for request in everyone for token in request.tokens[request.start :]]
        rows = [
            self.states(name, [float(p) for p in range(request.start, len(request.tokens))])
            for name, request in enumerate(everyone)
        ]
        wide = torch.full((len(flat), self.hidden + self.behind), torch.nan, dtype=self.dtype)
        wide[:, : self.hidden] = torch.cat(rows).to(self.dtype)
        positions = [p for r in everyone for p in range(r.start, len(r.tokens))]
        counts = [1] * len(self.contexts) + [len(r.emitted) for r in self.generations]
        accepted = [(r.emitted + [-1] * (k + 1))[: k + 1] for r in self.generations]
        self.accepted = int32([[r.successor] + [-1] * k for r in self.contexts] + accepted)
        self.accepted = self.accepted.reshape(-1, k + 1)
        following = poisoned(len(everyone), k + 2, dtype=torch.int32)
        last = [r.successor for r in self.contexts]
        last += [r.emitted[-1] if r.emitted else 0 for r in self.generations]
        following[:, 0] = int32(last)
        self.lens = [len(r.tokens) - r.start for r in self.contexts]
        self.inputs = {
            "input_ids": torch.tensor(flat, dtype=self.id_dtype, device=DEVICE),
            "positions": torch.tensor(positions, dtype=torch.int64, device=DEVICE),
            "hidden_states": wide.to(DEVICE)[:, : self.hidden],
        }
        self.num_accepted = int32(counts)
        self.last_tokens = following[:, 0]
        # emitted tokens come as a column of the next inputs
        self.successors = following[: len(self.contexts), 0] if self.contexts else None
        self.context_lens = int32(self.lens)
        self.kv_lens = int32([len(r.tokens) for r in everyone])

    def past(self, request: Request) -> list[Pair]:
        """The K pairs before this step; zeros stand before the first token."""
        first = range(request.start - self.k, request.start)
        return [Pair(request.tokens[p], float(p)) if p >= 0 else Pair(0, -1.0) for p in first]

    def states(self, name: int, positions: list[float]) -> torch.Tensor:
        """[N, H], exact in every type; a power of two tells columns apart."""
        numbers = torch.tensor(positions).reshape(-1, 1) + 1 + 32 * (name % 7)
        return (numbers * 2.0 ** (torch.arange(self.hidden) % 7 - 3)).to(DEVICE)

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens_pool.clone(), self.states_pool.clone()

    def vanilla(
        self, module: Any, window: int, floor: int | None = None, **options: Any
    ) -> tuple[FirstPass, tuple[torch.Tensor, torch.Tensor]]:
        """On pools of its own, which come back as well."""
        pools = self.pools()
        slots = torch.tensor(self.slots, device=DEVICE)
        with poisoned_outputs(launch, step_batch):
            first = module.vanilla_first_pass(
                *pools,
                slots,
                *self.inputs.values(),
                self.num_accepted,
                self.last_tokens,
                self.successors,
                self.context_lens,
                chunk_lens=self.lens,
                history_lens=[request.history for request in self.contexts],
                window=window,
                kv_lens=self.kv_lens,
                kv_floor=floor,
                **options,
            )
        return first, pools

    def eagle(
        self,
        module: Any,
        max_position: int | None = None,
        floor: int | None = None,
        out: FirstPass | None = None,
    ) -> FirstPass:
        with poisoned_outputs(launch, step_batch):
            return module.eagle_first_pass(
                *self.inputs.values(),
                self.accepted,
                self.num_accepted,
                self.successors,
                self.context_lens,
                num_contexts=len(self.contexts),
                num_ctx_tokens=sum(self.lens),
                max_position=max_position,
                kv_lens=self.kv_lens,
                kv_floor=floor,
                out=out,
            )

    def told(self, window: int) -> list[list[story.Row]]:
        """The rows of every request for vanilla."""
        rows = [
            story.chunk([*r.tokens, r.successor], r.start, len(r.tokens), r.history)
            for r in self.contexts
        ]
        return rows + [
            story.window(r.tokens[: r.start + len(r.emitted)] + r.emitted[-1:], window)
            for r in self.generations
        ]

    def assert_rows(self, first: FirstPass, told: list[list[story.Row]]) -> None:
        flat = [row for rows in told for row in rows]
        assert first.ids[: len(flat)].tolist() == [row.token for row in flat]
        assert first.positions.tolist() == [row.position for row in flat]
        at = 0
        for name, rows in enumerate(told):
            for row in rows:
                if row.state is not None:
                    state = self.states(name, [float(row.state)])[0].to(self.dtype)
                    assert torch.equal(first.states[at], state)
                at += 1

    def assert_history(self, pools: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Every slot of one request moved on, every other slot as it was."""
        before = self.pools()
        for name, request in enumerate(self.contexts + self.generations):
            slot = self.slots[name]
            if slot == self.num_slots - 1:
                continue
            span = range(request.start, len(request.tokens))
            read = [Pair(request.tokens[p], float(p)) for p in span]
            if name < len(self.contexts):
                kept = remembering.after_prompt(self.past(request), read)
            else:
                n = len(request.emitted)
                kept = remembering.after_generation(self.past(request), read, n)
            assert pools[0][slot].tolist() == [pair.token for pair in kept]
            states = self.states(name, [pair.state for pair in kept]).to(self.pool_dtype)
            assert torch.equal(pools[1][slot], states)
        for slot in set(range(self.num_slots - 1)) - set(self.slots):
            assert same_bits(pools[0][slot], before[0][slot])
            assert same_bits(pools[1][slot], before[1][slot])


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_step(
    seed: int, k: int, num_contexts: int, num_generations: int, hidden: int, **options: Any
) -> Step:
    """Prompts shorter and longer than K, first chunks and later ones, any count of tokens."""
    r = random.Random(seed)
    stop, remembers = options.pop("stops", False), options.pop("remembers", True)

    def some(count: int) -> list[int]:
        return [r.randrange(1, 999) for _ in range(count)]

    contexts = []
    for _ in range(num_contexts):
        start, length = r.choice([0, r.randint(0, 2 * k)]), r.randint(1, k + 3)
        history = min(k, start) if remembers and r.random() < 0.6 else 0
        contexts.append(Request(some(start + length), start, [], r.randrange(999), history))
    generations = []
    for _ in range(num_generations):
        start = r.randint(1, 2 * k + 2)
        tokens = some(start + k + 1)
        n = r.randint(0 if stop else 1, k + 1)
        # accepted drafts are the inputs behind the first, the last token is new
        emitted = [*tokens[start + 1 : start + n], r.randrange(1, 999)] if n else []
        generations.append(Request(tokens, start, emitted, 0, 0))
    return Step(k, contexts, generations, hidden, seed=seed, **options)


steps = st.builds(
    make_step,
    seed=st.integers(0, 2**31),
    k=st.integers(1, 7),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(1, 4),
    hidden=st.sampled_from([1, 3, 16, 130]),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(FLOATS),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    behind=st.integers(0, 3),
)


def assert_same_first(mine: FirstPass, theirs: FirstPass, rows: Any = slice(None)) -> None:
    """All but the room behind the ids, which the loop writes before it reads."""
    count = theirs.positions.shape[0]
    assert mine.ids.shape == theirs.ids.shape
    for name, kernel, expected in (
        ("ids", mine.ids[:count], theirs.ids[:count]),
        ("positions", mine.positions, theirs.positions),
        ("states", mine.states, theirs.states),
    ):
        assert same_bits(kernel[rows], expected[rows]), name
    assert same_bits(mine.last_rows, theirs.last_rows)


def test_window_letters() -> None:
    """K = 3: the prompt `p q r | s` emitted `t`; the step read `t u v w` and emitted `u x`."""
    generation = Request(ids("pqrs" + "tuvw"), 4, ids("ux"), 0, 0)
    context = Request(ids("pqr" + "s"), 3, [], ids("t")[0], 2)
    step = Step(3, [context], [generation], hidden=2)
    first, _ = step.vanilla(launch, window=4)
    assert first.ids[:7].tolist() == ids("rst" + "stux")
    assert first.positions.tolist() == [1, 2, 3, 2, 3, 4, 5]
    assert first.last_rows.tolist() == [2, 6]
    eagle = step.eagle(launch)
    assert eagle.ids.tolist() == ids("t" + "uxxx")
    assert eagle.last_rows.tolist() == [0, 2]
    assert eagle.next_positions.tolist() == [4, 6]


@settings(max_examples=60)
@given(step=steps, exact=st.booleans(), floor=st.sampled_from([None, 9]))
def test_vanilla_is_the_reference_and_the_story(step: Step, exact: bool, floor: int | None) -> None:
    window = step.k + int(exact)
    before = {name: value.clone() for name, value in step.inputs.items()}
    first, pools = step.vanilla(launch, window, floor)
    expected, expected_pools = step.vanilla(reference, window)
    assert_same_first(first, expected)
    assert first.ids.dtype == torch.int32
    for pool, told in zip(pools, expected_pools, strict=True):
        assert same_bits(pool, told)
    told = step.told(window)
    step.assert_rows(first, told)
    step.assert_history(pools)
    lens = torch.tensor([len(rows) for rows in told])
    assert first.last_rows.tolist() == (lens.cumsum(0) - 1).tolist()
    assert (first.ids[lens.sum() :] == POISON).all()
    for name, value in before.items():
        assert same_bits(step.inputs[name], value)
    # cached by then: all of a prompt, of a generation what stands before the newest token
    cached = [len(r.tokens) for r in step.contexts]
    cached += [max(r.start + len(r.emitted), floor or 0) for r in step.generations]
    assert first.kv_lens.tolist() == cached


@settings(max_examples=40)
@given(step=steps, max_position=st.sampled_from([None, 6]), floor=st.sampled_from([None, 9]))
def test_eagle_is_the_reference_and_the_story(
    step: Step, max_position: int | None, floor: int | None
) -> None:
    first = step.eagle(launch, max_position, floor)
    expected = step.eagle(reference, max_position)
    assert_same_first(first, expected)
    assert same_bits(first.next_positions, expected.next_positions)
    told = [story.chunk([*r.tokens, r.successor], r.start, len(r.tokens), 0) for r in step.contexts]
    told += [story.accepted(r.emitted, step.k + 1, r.start) for r in step.generations]
    step.assert_rows(first, told)
    ends = [len(r.tokens) for r in step.contexts]
    ends += [r.start + len(r.emitted) for r in step.generations]
    capped = [end if max_position is None else min(end, max_position) for end in ends]
    assert first.next_positions.tolist() == capped
    num_contexts = len(step.contexts)
    cached = [end + 1 for end in ends[:num_contexts]]
    cached += [max(end + 1, floor or 0) for end in ends[num_contexts:]]
    assert first.kv_lens.tolist() == cached


@pytest.mark.parametrize("window", [3, 4])
def test_requests_that_emitted_nothing(window: int) -> None:
    """A row of dead logits emits nothing: the request fails, its rows are still valid inputs."""
    step = make_step(3, 3, 1, 6, 8, stops=True)
    assert any(not request.emitted for request in step.generations)
    first, pools = step.vanilla(launch, window)
    expected, expected_pools = step.vanilla(reference, window)
    for pool, told in zip(pools, expected_pools, strict=True):
        assert same_bits(pool, told)
    if window == 3:
        assert_same_first(first, expected)
    step.assert_history(pools)
    assert (first.ids[: first.positions.shape[0]] >= 0).all()
    assert (first.positions >= 0).all()
    assert torch.isfinite(first.states).all()
    eagle = step.eagle(launch)
    assert_same_first(eagle, step.eagle(reference))
    assert same_bits(eagle.next_positions, step.eagle(reference).next_positions)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padding_rows_may_share_a_slot(dtype: torch.dtype) -> None:
    for seed in range(4):
        step = make_step(seed, 3, seed % 2, 5, 24, sharing=3, dtype=dtype)
        first, pools = step.vanilla(launch, 4)
        expected, _ = step.vanilla(reference, 4)
        assert_same_first(first, expected, slice(0, first.positions.shape[0] - 3 * 4))
        assert torch.equal(first.last_rows, expected.last_rows)
        assert (first.ids[: first.positions.shape[0]] != POISON).all()
        step.assert_history(pools)


@pytest.mark.parametrize(
    "pool_dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],  # as in history
    ids=str,
)
def test_states_are_rounded_once(pool_dtype: torch.dtype) -> None:
    """Values of many bits into a pool of another type, and out of it again."""
    dtype = torch.bfloat16 if pool_dtype == torch.float32 else torch.float32
    step = make_step(5, 3, 2, 3, 40, dtype=dtype, pool_dtype=pool_dtype)
    dice = torch.Generator().manual_seed(1)
    for tensor in (step.inputs["hidden_states"], step.states_pool):
        noise = torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
        tensor.copy_(noise.to(torch.bfloat16) if tensor is step.states_pool else noise)
    first, pools = step.vanilla(launch, 4)
    expected, expected_pools = step.vanilla(reference, 4)
    assert_same_first(first, expected)
    assert same_bits(pools[1], expected_pools[1])


# --- on a device, with real shapes ---

REAL = [
    pytest.param(0, 4, 3, 4096, id="4x4096-k3"),
    pytest.param(3, 64, 7, 7168, id="3+64x7168-k7"),
    pytest.param(8, 256, 3, 7168, id="8+256x7168-k3"),
    pytest.param(0, 1024, 1, 4096, id="1024x4096-k1"),
]


def real_step(seed: int, contexts: int, batch: int, k: int, hidden: int) -> Step:
    options = {"dtype": torch.bfloat16, "pool_dtype": torch.bfloat16, "behind": 64}
    step = make_step(seed, k, contexts, batch, hidden, **options)
    step.inputs["hidden_states"].normal_()
    step.states_pool.normal_()
    return step


@pytest.mark.gpu
@pytest.mark.parametrize(("contexts", "batch", "k", "hidden"), REAL)
@pytest.mark.parametrize("exact", [False, True], ids=["trtllm", "exact"])
def test_real_shapes(contexts: int, batch: int, k: int, hidden: int, exact: bool) -> None:
    step = real_step(7, contexts, batch, k, hidden)
    expected, expected_pools = step.vanilla(reference, k + exact)
    for _ in range(3):
        first, pools = step.vanilla(launch, k + exact)
        assert_same_first(first, expected)
        assert same_bits(pools[0], expected_pools[0])
        assert same_bits(pools[1], expected_pools[1])
    eagle, told = step.eagle(launch, 9), step.eagle(reference, 9)
    assert_same_first(eagle, told)
    assert same_bits(eagle.next_positions, told.next_positions)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """Prompts, history in front of chunks and generations in one step."""
    step = real_step(2, 4, 16, 3, 4096)
    assert any(request.history for request in step.contexts)
    slots, pools = torch.tensor(step.slots, device=DEVICE), step.pools()
    for _ in range(2):  # the first call compiles
        with read_back_forbidden():
            launch.vanilla_first_pass(
                *pools,
                slots,
                *step.inputs.values(),
                step.num_accepted,
                step.last_tokens,
                step.successors,
                step.context_lens,
                chunk_lens=step.lens,
                history_lens=[request.history for request in step.contexts],
                window=4,
                kv_lens=step.kv_lens,
            )
            step.eagle(launch, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize(("batch", "k", "hidden"), [(1, 3, 7168), (256, 3, 4096), (33, 7, 7168)])
def test_in_a_cuda_graph(batch: int, k: int, hidden: int, vanilla: bool) -> None:
    """Captured once, replayed with other requests in other slots."""
    mine = real_step(1, 0, batch, k, hidden)
    pools, slots = mine.pools(), torch.tensor(mine.slots, device=DEVICE)

    def step() -> FirstPass:
        if not vanilla:
            return mine.eagle(launch, 9)
        return launch.vanilla_first_pass(
            *pools,
            slots,
            *mine.inputs.values(),
            mine.num_accepted,
            mine.last_tokens,
            None,
            mine.context_lens,
            chunk_lens=[],
            history_lens=[],
            window=k + 1,
            kv_lens=mine.kv_lens,
        )

    graph, outputs = captured(step)
    for seed in (10, 20):
        other = real_step(seed, 0, batch, k, hidden)
        for name, value in mine.inputs.items():
            value.copy_(other.inputs[name])
        for name in ("accepted", "num_accepted", "last_tokens", "kv_lens"):
            getattr(mine, name).copy_(getattr(other, name))
        for pool, fresh in zip(pools, other.pools(), strict=True):
            pool.copy_(fresh)
        slots.copy_(torch.tensor(other.slots))
        graph.replay()
        torch.cuda.synchronize()
        if vanilla:
            expected, expected_pools = other.vanilla(reference, k + 1)
            assert same_bits(pools[0], expected_pools[0])
            assert same_bits(pools[1], expected_pools[1])
        else:
            expected = other.eagle(reference, 9)
            assert same_bits(outputs.next_positions, expected.next_positions)
        assert_same_first(outputs, expected)
        grown = [r.start + len(r.emitted) + int(not vanilla) for r in other.generations]
        assert outputs.kv_lens.tolist() == grown


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    """Pools and states so large that their last rows lie behind 2**31 elements."""
    device_memory(24)
    k, hidden = 3, 7168
    near = real_step(4, 2, 3, k, hidden)
    far = replace(near)
    rows = near.inputs["hidden_states"].shape[0]
    stride = 2**31 // (rows - 2) + 8
    wide = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    states = wide.as_strided((rows, hidden), (stride, 1))
    states.copy_(near.inputs["hidden_states"])
    far.inputs = {**near.inputs, "hidden_states": states}
    num_slots = 2**31 // (k * hidden) + 16
    shift = num_slots - near.num_slots
    tokens = poisoned(num_slots, k, dtype=torch.int32)
    pool = torch.empty(num_slots, k, hidden, dtype=torch.bfloat16, device=DEVICE)
    tokens[shift:], pool[shift:] = near.pools()
    far.tokens_pool, far.states_pool = tokens, pool
    far.slots = [slot + shift for slot in near.slots]
    assert shift * k * hidden > 2**30
    assert (num_slots - 1) * k * hidden > 2**31
    far.pools = lambda: (tokens, pool)
    first, pools = far.vanilla(launch, 4)
    expected, expected_pools = near.vanilla(reference, 4)
    assert_same_first(first, expected)
    assert same_bits(pools[0][shift:], expected_pools[0])
    assert same_bits(pools[1][shift:], expected_pools[1])

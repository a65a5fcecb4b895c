"""Batches with known states: that of position p of request r is a number of p and r."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
    advance_and_build_inputs,
    advance_history,
    build_reused_inputs,
)
from mtp_plugin.ops.step import DrafterInputs, StepLayout
from tests.op_arguments import poisoned_memory
from tests.ops.bits import same_bits
from tests.ops.draft_inputs import example
from tests.ops.draft_inputs.example import Pair
from tests.ops.on_device import DEVICE, POISON, poisoned

FLOATS = (torch.float32, torch.bfloat16)
Pools = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """A request's committed tokens and inputs, and the output tokens of this step."""

    tokens: list[int]  # prompt so far, or committed tokens and the inputs of the step
    start: int  # first position of this step
    emitted: list[int]  # of a generation
    successor: int  # the token after a chunk
    history: int  # rows before a chunk


@dataclass
class Batch:
    """A batch on the device."""

    k: int  # of the pools
    contexts: list[Request]
    generations: list[Request]
    hidden: int
    draft_len: int | None = None  # of the step; None: K
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    spare: int = 0  # columns after H
    sharing: int = 0  # generations at the end that share the last slot, as padding does
    seed: int = 0

    def __post_init__(self) -> None:
        everyone = self.contexts + self.generations
        r = random.Random(self.seed)
        real = len(everyone) - self.sharing
        self.num_slots = len(everyone) + 2
        self.slots = r.sample(range(self.num_slots - 1), real) + [self.num_slots - 1] * self.sharing
        self.slot_ids = torch.tensor(self.slots, dtype=torch.int64, device=DEVICE)
        k, shape = self.k, (self.num_slots, self.k)
        self.draft_len = k if self.draft_len is None else self.draft_len
        self.step_rows = self.draft_len + 1
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
        wide = torch.full((len(flat), self.hidden + self.spare), torch.nan, dtype=self.dtype)
        if rows:
            wide[:, : self.hidden] = torch.cat(rows).to(self.dtype)
        positions = [p for r in everyone for p in range(r.start, len(r.tokens))]
        self.input_ids = torch.tensor(flat, dtype=self.id_dtype, device=DEVICE)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=DEVICE)
        self.hidden_states = wide.to(DEVICE)[:, : self.hidden]
        width = self.step_rows
        padding = [-1] * width
        accepted = [[request.successor, *padding][:width] for request in self.contexts]
        accepted += [[*request.emitted, *padding][:width] for request in self.generations]
        self.accepted = int32(accepted).reshape(-1, width)
        self.num_accepted = int32(
            [1] * len(self.contexts) + [len(r.emitted) for r in self.generations]
        )
        last = [r.successor for r in self.contexts]
        last += [r.emitted[-1] if r.emitted else 0 for r in self.generations]
        # emitted tokens come as a column of the next inputs
        following = poisoned(len(everyone), width + 1, dtype=torch.int32)
        following[:, 0] = int32(last)
        self.last_tokens = following[:, 0]
        self.successors = following[: len(self.contexts), 0] if self.contexts else None
        self.lens = [len(r.tokens) - r.start for r in self.contexts]
        self.context_lens = int32(self.lens)
        # of more requests than the step has
        self.kv_lens = int32([len(r.tokens) for r in everyone] + [POISON] * 2)

    def past(self, request: Request) -> list[Pair]:
        """The K pairs before this step; zeros before the first token."""
        first = range(request.start - self.k, request.start)
        return [Pair(request.tokens[p], float(p)) if p >= 0 else Pair(0, -1.0) for p in first]

    def states(self, name: int, positions: list[float]) -> torch.Tensor:
        """[N, H], exact in every type, with another power of two per column."""
        numbers = torch.tensor(positions).reshape(-1, 1) + 1 + 32 * (name % 7)
        return (numbers * 2.0 ** (torch.arange(self.hidden) % 7 - 3)).to(DEVICE)

    def pools(self) -> Pools:
        return self.tokens_pool.clone(), self.states_pool.clone()

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            chunk_lens=tuple(self.lens),
            num_generations=len(self.generations),
            draft_len=self.step_rows - 1,
            context_lens=self.context_lens,
            positions=self.positions,
        )

    @property
    def rows(self) -> TargetRows:
        return TargetRows(self.input_ids, self.hidden_states, self.successors)

    @property
    def history_lens(self) -> list[int]:
        return [request.history for request in self.contexts]

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a step reads, by name."""
        names = "input_ids positions hidden_states accepted num_accepted last_tokens kv_lens"
        return {name: getattr(self, name) for name in names.split()}

    def vanilla(
        self,
        backend: Backend,
        window: int,
        floor: int | None = None,
        pools: Pools | None = None,
        **options: Any,
    ) -> tuple[DrafterInputs, Pools]:
        """On copies of the pools, or on those given, which come back as well."""
        pools = self.pools() if pools is None else pools
        with poisoned_memory():
            first = advance_and_build_inputs(
                self.layout,
                History(*pools, self.slot_ids),
                self.rows,
                self.num_accepted,
                self.last_tokens,
                DraftWindows(window, self.history_lens, **options),
                kv=DraftKVLengths(self.kv_lens, floor),
                backend=backend,
            )
        return first, pools

    def advanced(self, backend: Backend) -> Pools:
        """The pools after the history alone has advanced."""
        pools = self.pools()
        with poisoned_memory():
            advance_history(
                self.layout,
                History(*pools, self.slot_ids),
                self.rows,
                self.num_accepted,
                backend=backend,
            )
        return pools

    def reused(
        self, backend: Backend, max_position: int | None = None, floor: int | None = None
    ) -> DrafterInputs:
        with poisoned_memory():
            return build_reused_inputs(
                self.layout,
                self.rows,
                self.accepted,
                self.num_accepted,
                max_position=max_position,
                kv=DraftKVLengths(self.kv_lens, floor),
                backend=backend,
            )

    def expected(self, window: int) -> list[list[example.Row]]:
        """The rows of every request over K layers."""
        rows = [
            example.chunk([*r.tokens, r.successor], r.start, len(r.tokens), r.history)
            for r in self.contexts
        ]
        return rows + [
            example.window(r.tokens[: r.start + len(r.emitted)] + r.emitted[-1:], window)
            for r in self.generations
        ]

    def expected_reused(self) -> list[list[example.Row]]:
        """The rows of every request for a reused layer."""
        rows = [
            example.chunk([*r.tokens, r.successor], r.start, len(r.tokens), 0)
            for r in self.contexts
        ]
        width = self.step_rows
        return rows + [example.accepted(r.emitted, width, r.start) for r in self.generations]

    def assert_rows(self, first: DrafterInputs, expected: list[list[example.Row]]) -> None:
        flat = [row for rows in expected for row in rows]
        assert first.ids[: len(flat)].tolist() == [row.token for row in flat]
        assert first.positions.tolist() == [row.position for row in flat]
        at = 0
        for name, rows in enumerate(expected):
            for row in rows:
                if row.state is not None:
                    state = self.states(name, [float(row.state)])[0].to(self.dtype)
                    assert torch.equal(first.states[at], state)
                at += 1

    def assert_history(self, pools: Pools) -> None:
        """Every slot of one request has advanced, every other slot has not changed."""
        before = self.pools()
        for name, request in enumerate(self.contexts + self.generations):
            slot = self.slots[name]
            if slot == self.num_slots - 1:
                continue
            span = range(request.start, len(request.tokens))
            read = [Pair(request.tokens[p], float(p)) for p in span]
            if name < len(self.contexts):
                kept = example.after_prompt(self.past(request), read)
            else:
                n = len(request.emitted)
                kept = example.after_generation(self.past(request), read, n)
            assert pools[0][slot].tolist() == [pair.token for pair in kept]
            states = self.states(name, [pair.state for pair in kept]).to(self.pool_dtype)
            assert torch.equal(pools[1][slot], states)
        for slot in set(range(self.num_slots - 1)) - set(self.slots):
            assert same_bits(pools[0][slot], before[0][slot])
            assert same_bits(pools[1][slot], before[1][slot])


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_batch(
    seed: int, k: int, num_contexts: int, num_generations: int, hidden: int, **options: Any
) -> Batch:
    """Prompts shorter and longer than K, first chunks and later ones, any count of tokens."""
    r = random.Random(seed)
    stops, remembers = options.pop("stops", False), options.pop("remembers", True)
    if options.pop("shorter", False):
        options["draft_len"] = r.randint(0, k)
    step_rows = options.get("draft_len", k) + 1

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
        tokens = some(start + step_rows)
        n = r.randint(0 if stops else 1, step_rows)
        # accepted drafts are the inputs after the first, the last token is new
        emitted = [*tokens[start + 1 : start + n], r.randrange(1, 999)] if n else []
        generations.append(Request(tokens, start, emitted, 0, 0))
    return Batch(k, contexts, generations, hidden, seed=seed, **options)


batches = st.builds(
    make_batch,
    seed=st.integers(0, 2**31),
    k=st.integers(1, 7),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    hidden=st.sampled_from([1, 3, 16, 130]),
    shorter=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(FLOATS),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    spare=st.integers(0, 3),
)


def assert_same_first(mine: DrafterInputs, theirs: DrafterInputs, rows: Any = slice(None)) -> None:
    """Compare all but the elements after the last row and the last request."""
    count, requests = theirs.positions.shape[0], theirs.last_rows.shape[0]
    assert mine.ids.shape == theirs.ids.shape
    for name, one, other in (
        ("ids", mine.ids[:count], theirs.ids[:count]),
        ("positions", mine.positions, theirs.positions),
        ("states", mine.states[:count], theirs.states[:count]),
    ):
        assert same_bits(one[rows], other[rows]), name
    assert same_bits(mine.last_rows, theirs.last_rows)
    for name in ("next_positions", "kv_lens"):
        one, other = getattr(mine, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if other is not None:
            assert one.shape == other.shape, name
            assert same_bits(one[:requests], other[:requests]), name


def real_batch(seed: int, contexts: int, generations: int, k: int, hidden: int) -> Batch:
    """Random states of a real model's sizes."""
    options = {"dtype": torch.bfloat16, "pool_dtype": torch.bfloat16, "spare": 64}
    batch = make_batch(seed, k, contexts, generations, hidden, **options)
    batch.hidden_states.normal_()
    batch.states_pool.normal_()
    return batch

"""The reference against the story, over poisoned pools."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.speculative.ops.history import advance_history
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.history import story
from tests.speculative.ops.history.story import Pair
from tests.speculative.ops.letters import ids

H = 3
POISON_TOKEN = -777


def pairs(letters: str) -> list[Pair]:
    return [Pair(token, 10.0 + token) for token in ids(letters)]


def states_of(rows: list[Pair], dtype: torch.dtype) -> torch.Tensor:
    """A state is its name in every column, moved on by the column."""
    names = torch.tensor([row.state for row in rows], dtype=torch.float32).reshape(-1, 1)
    return (names + 0.25 * torch.arange(H)).to(dtype)


def tokens_of(rows: list[Pair]) -> torch.Tensor:
    return torch.tensor([row.token for row in rows], dtype=torch.int32)


class Pools:
    """S slots of K pairs; slots that no request of the story has hold NaN and a foreign number."""

    def __init__(self, slots: dict[int, list[Pair]], num_slots: int, k: int, dtype: torch.dtype):
        self.dtype = dtype
        self.tokens = torch.full((num_slots, k), POISON_TOKEN, dtype=torch.int32)
        self.states = torch.full((num_slots, k, H), torch.nan, dtype=dtype)
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
        input_dtype: torch.dtype = torch.int32,
    ) -> None:
        k = self.tokens.shape[1]
        chunks = [row for chunk in contexts for row in chunk]
        flat = chunks + [row for step in generations for row in step]
        advance_history(
            self.tokens,
            self.states,
            torch.tensor(slot_ids, dtype=torch.int64),
            tokens_of(flat).to(input_dtype),
            states_of(flat, self.dtype).reshape(len(flat), H),
            torch.tensor([1] * len(contexts) + num_accepted, dtype=torch.int32),
            torch.tensor([len(chunk) for chunk in contexts], dtype=torch.int32),
            num_contexts=len(contexts),
            num_ctx_tokens=len(chunks),
            step_rows=k + 1,
        )

    def assert_slot(self, slot: int, rows: list[Pair]) -> None:
        assert torch.equal(self.tokens[slot], tokens_of(rows))
        assert torch.equal(self.states[slot], states_of(rows, self.dtype))

    def assert_untouched(self, slot: int) -> None:
        assert same_bits(self.tokens[slot], self.before[0][slot])
        assert same_bits(self.states[slot], self.before[1][slot])


def test_letters() -> None:
    """K = 3: `p q r s` emits `t`; `t u v w` emits `u v x`; `x` and wrong drafts emit `y`."""
    pools = Pools({1: [Pair(0, 0.0)] * 3}, num_slots=3, k=3, dtype=torch.float32)
    pools.advance([1], [pairs("pqrs")], [], [])
    pools.assert_slot(1, pairs("qrs"))
    pools.advance([1], [], [pairs("tuvw")], [3])
    pools.assert_slot(1, pairs("tuv"))
    pools.advance([1], [], [pairs("xabc")], [1])
    pools.assert_slot(1, pairs("uvx"))
    pools.assert_untouched(0)
    pools.assert_untouched(2)


@pytest.mark.parametrize(
    ("step", "num_accepted", "kept"),
    [("tuvw", 0, "abc"), ("tuvw", 1, "bct"), ("tuvw", 3, "tuv"), ("tuvw", 4, "uvw")],
)
def test_every_count_of_a_generation(step: str, num_accepted: int, kept: str) -> None:
    pools = Pools({0: pairs("abc")}, num_slots=1, k=3, dtype=torch.float32)
    pools.advance([0], [], [pairs(step)], [num_accepted])
    pools.assert_slot(0, pairs(kept))
    assert story.after_generation(pairs("abc"), pairs(step), num_accepted) == pairs(kept)


@pytest.mark.parametrize(
    ("chunk", "kept"), [("s", "bcs"), ("st", "cst"), ("stu", "stu"), ("stuv", "tuv")]
)
def test_every_length_of_a_chunk(chunk: str, kept: str) -> None:
    pools = Pools({0: pairs("abc")}, num_slots=1, k=3, dtype=torch.float32)
    pools.advance([0], [pairs(chunk)], [], [])
    pools.assert_slot(0, pairs(kept))
    assert story.after_prompt(pairs("abc"), pairs(chunk)) == pairs(kept)


def test_chunks_leave_what_the_whole_prompt_leaves() -> None:
    fresh = {0: [Pair(0, 0.0)] * 4}
    whole = Pools(fresh, num_slots=1, k=4, dtype=torch.float32)
    whole.advance([0], [pairs("abcdefg")], [], [])
    for cut in range(1, 7):
        pieces = Pools(fresh, num_slots=1, k=4, dtype=torch.float32)
        pieces.advance([0], [pairs("abcdefg")[:cut]], [], [])
        pieces.advance([0], [pairs("abcdefg")[cut:]], [], [])
        pieces.assert_slot(0, pairs("defg"))
        assert same_bits(pieces.states, whole.states)


@given(
    k=st.integers(1, 7),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    num_dummies=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    input_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    k: int,
    num_contexts: int,
    num_generations: int,
    num_dummies: int,
    dtype: torch.dtype,
    input_dtype: torch.dtype,
    seed: int,
) -> None:
    """Requests in any slots, padding rows that share the last one, everything else left alone."""
    dice = random.Random(seed)
    requests = num_contexts + num_generations
    num_slots = requests + 3
    sentinel = num_slots - 1
    slots = dice.sample(range(sentinel), requests)

    def make(count: int) -> list[Pair]:
        return [Pair(dice.randrange(100), float(dice.randrange(64))) for _ in range(count)]

    past = {slot: make(k) for slot in slots}
    pools = Pools(past, num_slots, k, dtype)
    contexts = [make(dice.randint(1, 2 * k + 1)) for _ in range(num_contexts)]
    steps = [make(k + 1) for _ in range(num_generations + num_dummies)]
    counts = [dice.randint(0, k + 1) for _ in range(num_generations + num_dummies)]
    pools.advance(slots + [sentinel] * num_dummies, contexts, steps, counts, input_dtype)
    for slot, chunk in zip(slots, contexts, strict=False):
        pools.assert_slot(slot, story.after_prompt(past[slot], chunk))
    for slot, step, n in zip(slots[num_contexts:], steps, counts, strict=False):
        pools.assert_slot(slot, story.after_generation(past[slot], step, n))
    for slot in set(range(sentinel)) - set(slots):
        pools.assert_untouched(slot)


def test_inputs_stay_as_they_are() -> None:
    ids_in, states = torch.arange(4, dtype=torch.int32), torch.randn(4, H)
    before = ids_in.clone(), states.clone()
    advance_history(
        torch.zeros(1, 3, dtype=torch.int32),
        torch.zeros(1, 3, H),
        torch.tensor([0]),
        ids_in,
        states,
        torch.tensor([2]),
        torch.empty(0, dtype=torch.int32),
        num_contexts=0,
        num_ctx_tokens=0,
        step_rows=4,
    )
    assert torch.equal(ids_in, before[0])
    assert torch.equal(states, before[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(tokens_pool=torch.zeros(2, 4)), "history pools: expected"),
        (lambda a: a.update(hidden_states=torch.zeros(3, H)), r"hidden_states: expected \[4, 3\]"),
        (lambda a: a.update(hidden_states=torch.zeros(4, 9)), r"hidden_states: expected \[4, 3\]"),
        (lambda a: a.update(step_rows=3), r"input_ids: expected 0 context tokens and K\+1 = 3"),
        (lambda a: a.update(num_ctx_tokens=5), "input_ids: expected 5 context tokens"),
    ],
    ids=["widths", "rows", "width_of_state", "step", "contexts"],
)
def test_shapes_that_do_not_fit(change: Callable[[dict], None], message: str) -> None:
    arguments = {
        "tokens_pool": torch.zeros(2, 3, dtype=torch.int32),
        "states_pool": torch.zeros(2, 3, H),
        "slot_ids": torch.tensor([0]),
        "input_ids": torch.zeros(4, dtype=torch.int32),
        "hidden_states": torch.zeros(4, H),
        "num_accepted": torch.tensor([1]),
        "context_lens": torch.empty(0),
        "num_contexts": 0,
        "num_ctx_tokens": 0,
        "step_rows": 4,
    }
    change(arguments)
    with pytest.raises(TensorContractError, match=message):
        advance_history(**arguments)

"""Masked logits: example, torch reference and Triton agree, and the logits are restored."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import logit_mask_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_mask import mask_disallowed_tokens
from mtp_plugin.ops.logit_rows import LOGITS_PROCESSING_OPTIONS, LogitRows
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from tests.op_arguments import check_arguments, poisoned_memory, storage
from tests.ops.bits import same_bits
from tests.ops.logits_processing import example
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, vector
from tests.ops.slots import slot_rows
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES, VOCABS, odd_rows, strided, without_nan

OF_METHOD = SlotColumn("of_a_method", int, 0, 3)
FOREVER = 2**31 - 1


@dataclass
class Batch:
    """Requests whose rows sample tokens near the first index at which a stop id is allowed, and
    whose outputs end as bad words begin."""

    logits: torch.Tensor
    slots: SlotRows
    rows: LogitRows
    places: list[example.Place]
    """Per row of logits."""

    @classmethod
    def of(
        cls,
        seed: int,
        contexts: int,
        generations: int,
        k: int,
        vocab: int,
        stops: int,
        *,
        dtype: torch.dtype = torch.float32,
        spare: int = 0,
        index_dtype: torch.dtype = torch.int64,
        pools: bool = True,
        drafts: bool = True,
        **slots: Any,
    ) -> Batch:
        r, rng = random.Random(seed), torch.Generator().manual_seed(seed)
        lens = [r.randint(1, 4) for _ in range(contexts)]
        positions, sampled = [], []
        for length in lens:
            start = r.randrange(9)
            positions += range(start, start + length)
            sampled.append([start + length])
        for _ in range(generations):
            start, highest = r.randrange(9), r.randrange(8, 12)
            # positions of absent drafts need not increase
            positions += [min(start + i, max(start, highest)) for i in range(k + 1)]
            sampled.append([start + 1 + i for i in range(k + 1)])
        # few ids, so that words begin in many places
        few = [r.randrange(vocab) for _ in range(2)]
        drafted = [
            [r.choice([*few, *few, vocab + 3, 2**31 - 1]) for _ in range(k)]
            for _ in range(generations)
        ]
        expected = [[]] * contexts + (drafted if drafts else [[example.UNKNOWN] * k] * generations)
        logits_options = [
            random_logits_options(r, vocab, few, stops, before, pools) for before in expected
        ]
        layout = StepLayout(
            tuple(lens),
            generations,
            k,
            vector(lens, torch.int32),
            strided_vector(positions, index_dtype, spare),
        )
        placed, columns = pools_of(logits_options, vocab, r)
        values = [
            {
                "prompt_len": one.prompt_len,
                "min_tokens": one.min_tokens,
                "stop_ids": one.stops,
                "recent": [-1] * (MAX_BAD_WORD_LEN - len(one.recent)) + list(one.recent),
                **(rows if pools else {}),
            }
            for one, rows in zip(logits_options, columns, strict=True)
        ]
        held = slot_rows(values, [OF_METHOD], seed=seed, **slots)
        rows = sum(map(len, sampled))
        flat = [token for tokens in drafted for token in tokens]
        return cls(
            strided(odd_rows(rng, rows, vocab, dtype), spare),
            replace(held, pools=placed) if pools else held,
            LogitRows.of_target(
                layout, strided_vector(flat, index_dtype, spare) if drafts else None
            ),
            [
                example.Place(one, index, tuple(before[:i]))
                for one, indices, before in zip(logits_options, sampled, expected, strict=True)
                for i, index in enumerate(indices)
            ],
        )

    def masked(self, backend: Backend) -> AbstractContextManager[torch.Tensor]:
        return mask_disallowed_tokens(self.logits, self.rows, self.slots, backend=backend)

    def example(self) -> torch.Tensor:
        expected = [
            example.without_banned(row, place)
            for row, place in zip(self.logits.double().tolist(), self.places, strict=True)
        ]
        shape = self.logits.shape
        return torch.tensor(expected, dtype=torch.float64).reshape(shape).to(self.logits)


def random_logits_options(
    rng: random.Random, vocab: int, few: list[int], stops: int, before: list[int], pools: bool
) -> example.LogitsOptions:
    """One request's options, with bad words that begin in its last tokens or drafts ``before``."""
    listed = [
        rng.choice([-1, vocab, rng.randrange(vocab), rng.randrange(vocab)]) for _ in range(stops)
    ]
    if stops > 1 and rng.random() < 0.5:
        listed[0] = listed[-1]  # an id that occurs twice
    recent = [rng.choice(few) for _ in range(rng.choice((0, 1, 5, 16, 16)))]
    words = allowed = None
    if pools and rng.random() < 0.7:
        text = [*recent, *before]
        words = [word_of(rng, vocab, text) for _ in range(rng.choice((1, 2, 8, 64)))]
    if pools and rng.random() < 0.5:
        # often so few that words and stop ids leave none
        some = [*listed, *(word[-1] for word in words or ()), rng.randrange(vocab)]
        kept = rng.choice((rng.sample(some, rng.randint(1, len(some))), range(vocab)))
        allowed = {token for token in kept if 0 <= token < vocab} or {0}
    return example.LogitsOptions(
        allowed=allowed,
        words=words,
        recent=recent,
        stops=[token for token in listed if token >= 0] if rng.random() < 0.5 else listed,
        # the first index at which a stop id is allowed is the sum of two numbers, or never comes
        prompt_len=rng.randrange(1, 8),
        min_tokens=rng.choice([0, rng.randrange(8), rng.randrange(8), FOREVER]),
    )


def word_of(rng: random.Random, vocab: int, text: list[int]) -> tuple[int, ...]:
    """A word that begins as some part of a text ends, or nearly."""
    end = rng.randrange(vocab)
    length = min(rng.choice((0, 1, 2, 3, 14, 15)), len(text))
    last = rng.randint(length, len(text))
    begin = [token for token in text[last - length : last] if 0 <= token < vocab]
    if begin and rng.random() < 0.2:
        begin[0] = rng.randrange(vocab)
    return (*begin, end)


def strided_vector(values: Any, dtype: torch.dtype, spare: int) -> torch.Tensor:
    """With poison between the numbers."""
    values = list(values)
    wide = torch.full((len(values), 1 + spare), 7, dtype=dtype, device=DEVICE)
    wide[:, 0] = vector(values, dtype)
    return wide[:, 0]


@settings(max_examples=16)
@given(
    seed=st.integers(0, 2**31),
    contexts=st.integers(0, 3),
    generations=st.integers(0, 3),
    k=st.integers(0, 4),
    vocab=st.sampled_from([*VOCABS[:5], 32, 33]),
    stops=st.sampled_from([0, 1, 2, 5, MAX_STOP_IDS]),
    dtype=st.sampled_from(DTYPES),
    spare=st.integers(0, 2),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
    id_dtype=st.sampled_from(INDEX_DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
    pools=st.sampled_from([True, True, False]),
    drafts=st.sampled_from([True, True, False]),
)
def test_example_torch_and_triton_agree(
    seed, contexts, generations, k, vocab, stops, **options
) -> None:
    batch = Batch.of(seed, contexts, generations, k, vocab, stops, **options)
    wide = batch.logits if batch.logits._base is None else batch.logits._base
    before, expected = wide.clone(), without_nan(batch.example())
    kept = [storage(tensor) for tensor in tensors_of(batch)]
    for backend in Backend:
        with poisoned_memory(), batch.masked(backend) as masked:
            assert masked.dtype == options["dtype"]
            # a NaN counts as -inf anyway, so a masked id may have either value
            assert torch.equal(without_nan(masked), expected)
        assert same_bits(wide, before)
        for tensor, held in zip(tensors_of(batch), kept, strict=True):
            assert same_bits(storage(tensor), held)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Tensors that are read by slot."""
    pools = () if batch.slots.pools is None else vars(batch.slots.pools).values()
    return [batch.slots.table, *pools]


def small(**options: Any) -> Batch:
    return Batch.of(3, 2, 2, 2, 7, 3, **options)


def test_triton_masks_in_place() -> None:
    batch = small()
    with batch.masked(Backend.TRITON) as masked:
        assert masked is batch.logits
        assert not torch.equal(without_nan(masked), without_nan(small().logits))


@pytest.mark.parametrize("backend", Backend)
def test_logits_are_restored_when_the_body_raises(backend: Backend) -> None:
    batch = small()
    before = batch.logits.clone()
    with pytest.raises(RuntimeError, match="inside"), batch.masked(backend):
        raise RuntimeError("inside")
    assert same_bits(batch.logits, before)


def test_rows_that_share_memory_are_copied() -> None:
    batch = small()
    row = batch.logits[3]
    shared = row.expand(batch.logits.shape)
    own = row.repeat(batch.logits.shape[0], 1)
    before = row.clone()
    expected = replace(batch, logits=own).example()
    with replace(batch, logits=shared).masked(Backend.TRITON) as masked:
        assert torch.equal(without_nan(masked), without_nan(expected))
        assert same_bits(row, before)
    assert same_bits(row, before)


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch.of(3, 0, 0, 2, 7, 3)
    forbid_launches(monkeypatch, logit_mask_triton)
    with batch.masked(backend) as masked:
        assert masked is batch.logits


def one_turn(prompt_len: int, min_tokens: int, start: int) -> Batch:
    """A request whose rows sample the tokens after `start`; the argmax of all is the stop id 2."""
    values = [{"prompt_len": prompt_len, "min_tokens": min_tokens, "stop_ids": [2]}]
    positions = vector([start, start + 1])
    layout = StepLayout((), 1, 1, vector([], torch.int32), positions)
    logits = torch.tensor([[0.0, 1.0, 2.0]], device=DEVICE).repeat(2, 1)
    return Batch(logits, slot_rows(values), LogitRows.of_target(layout), [])


@pytest.mark.parametrize("backend", Backend)
def test_padding_rows_are_not_masked(backend: Backend) -> None:
    """All padding rows of a CUDA graph share one empty slot."""
    batch = one_turn(3, 9, 3)
    empty = [{"prompt_len": 0, "min_tokens": 0, "stop_ids": ()}]
    slots = slot_rows([{"prompt_len": 3, "min_tokens": 9, "stop_ids": [2]}, *empty], slots=[4, 6])
    shared = replace(slots, slot_ids=vector([4, 6, 6, 6]))
    layout = StepLayout((), 4, 1, vector([], torch.int32), vector([3, 4, 1, 2, 1, 2, 1, 2]))
    rows = LogitRows.of_target(layout)
    batch = replace(batch, slots=shared, rows=rows, logits=batch.logits.repeat(4, 1))
    with batch.masked(backend) as masked:
        assert masked.argmax(dim=1).tolist() == [1, 1] + [2] * 6


FORCE = {
    "something else is allowed": ({2, 5}, [(4,)], [2, 3], [2, 3, 4]),
    "nothing else is allowed": ({2, 3}, [(4,)], [2, 3], [4]),
    "an id that is both counts once": ({2, 3, 5}, [(2,)], [2, 3], [2, 3]),
    "ids that are listed twice": ({2, 4, 5}, [(4,), (4,)], [2, 2, 2], [2, 4]),
}


@pytest.mark.parametrize("name", FORCE)
@pytest.mark.parametrize("backend", Backend)
def test_order_of_force(backend: Backend, name: str) -> None:
    """Stop ids that come too early yield where else no allowed id is left; bad words never do."""
    allowed, words, stops, expected = FORCE[name]
    logits_options = example.LogitsOptions(allowed=allowed, words=words)
    pools, columns = pools_of([logits_options], 9, random.Random(0))
    recent = [-1] * (MAX_BAD_WORD_LEN - 1) + [1]
    values = {"prompt_len": 3, "min_tokens": 99, "stop_ids": stops, "recent": recent}
    slots = replace(slot_rows([{**values, **columns[0]}]), pools=pools)
    layout = StepLayout((), 1, 0, vector([], torch.int32), vector([8]))
    logits = torch.arange(9.0, device=DEVICE).unsqueeze(0)
    batch = Batch(logits, slots, LogitRows.of_target(layout), [])
    with batch.masked(backend) as masked:
        assert masked[0].isinf().nonzero().flatten().tolist() == expected


def test_edited_options() -> None:
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    ids = {"logit_bias", "allowed_token_ids", "bad_words", "bad_token_ids"}
    expected = {"min_tokens", "prompt_ignore_length", *penalties, *ids}
    assert expected == LOGITS_PROCESSING_OPTIONS


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    batch = small()
    assert batch.slots.pools is not None
    bias = batch.slots.pools.bias.nan_to_num(nan=0.25)
    arguments = {
        "rows": batch.rows,
        "logits": batch.logits.nan_to_num(nan=0.25),
        "slots": replace(batch.slots, pools=replace(batch.slots.pools, bias=bias)),
    }
    refused = {"slots.table": "row-contiguous", "rows.drafts": "row-contiguous"}
    pools = [f"slots.pools.{name}" for name in vars(batch.slots.pools)]
    refused |= dict.fromkeys(pools, "pools.")
    free = {f"{name}: shorter" for name in (*pools, "slots.table", "slots.slot_ids")}
    free |= {"rows.drafts: list", "rows.positions: list", "rows.positions: dimensions"}
    check_arguments(mask_disallowed_tokens, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("contexts", "generations", "stops", "dtype"),
    [
        (0, 1, 1, torch.float32),
        (0, 256, 3, torch.bfloat16),
        (7, 60, 20, torch.float16),
        (200, 9, 32, torch.float32),
        (200, 9, 32, torch.bfloat16),
    ],
)
def test_real_shapes_in_a_cuda_graph(contexts, generations, stops, dtype) -> None:
    """Captured once, replayed with other logits, stop ids and positions, without a host sync."""
    k, vocab = 3, 151935
    mine = Batch.of(1, contexts, generations, k, vocab, stops)
    rng = torch.Generator(DEVICE).manual_seed(2)
    logits = torch.empty(mine.logits.shape, dtype=dtype, device=DEVICE).normal_(generator=rng)
    mine.logits = logits

    def step() -> torch.Tensor:
        with mine.masked(Backend.TRITON) as masked:
            return masked.clone()

    graph, seen = captured(step)
    for seed in (3, 4):
        other = Batch.of(seed, contexts, generations, k, vocab, stops)
        mine.slots.table.copy_(other.slots.table)
        mine.slots.slot_ids.copy_(other.slots.slot_ids)
        mine.rows.drafts.copy_(other.rows.drafts)
        for pool, changed in zip(tensors_of(mine)[1:], tensors_of(other)[1:], strict=True):
            pool.copy_(changed)
        for name in ("first", "later"):
            mine.rows.positions.add_(1 if name == "later" else 0)
            logits.normal_()
            logits[::3, ::7] = torch.nan
            before = logits.clone()
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(logits, before)
            with mine.masked(Backend.TORCH) as masked:
                assert torch.equal(without_nan(seen), without_nan(masked))
                assert generations == 1 or not same_bits(masked, before)

"""Logits without early stops: the story equals torch's copy equals what Triton masks in place;
outside nothing changed."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.ops.logits import EDITED_OPTIONS, early_stops_masked, launch
from mtp_plugin.speculative.step import SlotRows, StepLayout
from tests.doors import check_strided_arguments, poisoned_memory, storage
from tests.kernels.top_k.launches import captured
from tests.kernels.top_k.rows import DTYPES, VOCABS, odd_rows, strided, without_nan
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.logits import story
from tests.speculative.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, vector
from tests.speculative.ops.slots import slot_rows

BEHIND = SlotColumn("of_a_mode", int, 0, 3)
FOREVER = 2**31 - 1


@dataclass
class Batch:
    """Prompts and turns whose rows draw tokens near the first index at which a stop may stand."""

    logits: torch.Tensor
    slots: SlotRows
    layout: StepLayout
    told: list[tuple[int, int, list[int]]]
    """Per row: the token that it draws, the first index of its request, its stop ids."""

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
        behind: int = 0,
        index_dtype: torch.dtype = torch.int64,
        **slots: Any,
    ) -> Batch:
        r, dice = random.Random(seed), torch.Generator().manual_seed(seed)
        lens = [r.randint(1, 4) for _ in range(contexts)]
        positions, drawn = [], []
        for length in lens:
            start = r.randrange(9)
            positions += range(start, start + length)
            drawn.append(start + length)
        for _ in range(generations):
            start, highest = r.randrange(9), r.randrange(8, 12)
            # positions of absent drafts may stay behind
            positions += [min(start + i, max(start, highest)) for i in range(k + 1)]
            drawn += [start + 1 + i for i in range(k + 1)]
        requests = contexts + generations
        table = [
            [r.choice([-1, vocab, r.randrange(vocab), r.randrange(vocab)]) for _ in range(stops)]
            for _ in range(requests)
        ]
        for row in table:
            if stops > 1 and r.random() < 0.5:
                row[0] = row[-1]  # an id that stands twice
        # the first index at which a stop may stand is the sum of two numbers, or never comes
        prompts = [r.randrange(1, 8) for _ in range(requests)]
        least = [r.choice([0, r.randrange(8), r.randrange(8), FOREVER]) for _ in range(requests)]
        values = [
            {"prompt_len": prompt, "min_tokens": tokens, "stop_ids": stop_ids}
            for prompt, tokens, stop_ids in zip(prompts, least, table, strict=True)
        ]
        first = [prompt + tokens for prompt, tokens in zip(prompts, least, strict=True)]
        owners = list(range(contexts))
        owners += [contexts + g for g in range(generations) for _ in range(k + 1)]
        return cls(
            strided(odd_rows(dice, len(owners), vocab, dtype), behind),
            slot_rows(values, [BEHIND], seed=seed, **slots),
            StepLayout(
                tuple(lens),
                generations,
                k,
                vector(lens, torch.int32),
                vector(positions, index_dtype),
            ),
            [(index, first[o], table[o]) for index, o in zip(drawn, owners, strict=True)],
        )

    def masked(self, backend: Backend) -> AbstractContextManager[torch.Tensor]:
        return early_stops_masked(self.layout, self.logits, self.slots, backend=backend)

    def story(self) -> torch.Tensor:
        rows = self.logits.double().tolist()
        told = [
            story.without_early_stops(row, *facts)
            for row, facts in zip(rows, self.told, strict=True)
        ]
        shape = self.logits.shape
        return torch.tensor(told, dtype=torch.float64).reshape(shape).to(self.logits)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    contexts=st.integers(0, 5),
    generations=st.integers(0, 4),
    k=st.integers(0, 4),
    vocab=st.sampled_from(VOCABS[:5]),
    stops=st.sampled_from([0, 1, 2, 5, MAX_STOP_IDS]),
    dtype=st.sampled_from(DTYPES),
    behind=st.integers(0, 2),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
    id_dtype=st.sampled_from(INDEX_DTYPES),
    index_dtype=st.sampled_from(INDEX_DTYPES),
)
def test_story_torch_and_triton_agree(
    seed, contexts, generations, k, vocab, stops, dtype, behind, index_dtype, **slots
) -> None:
    batch = Batch.of(
        seed,
        contexts,
        generations,
        k,
        vocab,
        stops,
        dtype=dtype,
        behind=behind,
        index_dtype=index_dtype,
        **slots,
    )
    wide = batch.logits if not behind else batch.logits._base
    before, told = wide.clone(), without_nan(batch.story())
    table = storage(batch.slots.table)
    for backend in Backend:
        with poisoned_memory(), batch.masked(backend) as masked:
            assert masked.dtype == dtype
            # a NaN counts as -inf anyway, so either may stand where a stop id is masked
            assert torch.equal(without_nan(masked), told)
        assert same_bits(wide, before)
        assert torch.equal(storage(batch.slots.table), table)


def small(**options: Any) -> Batch:
    return Batch.of(3, 2, 2, 2, 7, 3, **options)


def test_triton_masks_in_place() -> None:
    batch = small()
    with batch.masked(Backend.TRITON) as masked:
        assert masked is batch.logits
        assert not torch.equal(without_nan(masked), without_nan(small().logits))


@pytest.mark.parametrize("backend", Backend)
def test_logits_are_whole_again_when_the_body_raises(backend: Backend) -> None:
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
    told = replace(batch, logits=own).story()
    with replace(batch, logits=shared).masked(Backend.TRITON) as masked:
        assert torch.equal(without_nan(masked), without_nan(told))
        assert same_bits(row, before)


@pytest.mark.parametrize("backend", Backend)
def test_no_rows(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch.of(3, 0, 0, 2, 7, 3)
    forbid_launches(monkeypatch, launch)
    with batch.masked(backend) as masked:
        assert masked is batch.logits


def one_turn(prompt_len: int, min_tokens: int, start: int) -> Batch:
    """A request whose rows draw the tokens behind `start`, all of which prefer the stop id 2."""
    values = [{"prompt_len": prompt_len, "min_tokens": min_tokens, "stop_ids": [2]}]
    positions = vector([start, start + 1])
    layout = StepLayout((), 1, 1, vector([], torch.int32), positions)
    logits = torch.tensor([[0.0, 1.0, 2.0]], device=DEVICE).repeat(2, 1)
    return Batch(logits, slot_rows(values), layout, [])


@pytest.mark.parametrize("prompt_len", [1, 3, 2**31 - 1])
@pytest.mark.parametrize("backend", Backend)
def test_a_least_that_no_text_reaches(backend: Backend, prompt_len: int) -> None:
    """2**31 - 1 tokens behind a prompt are beyond 32 bits, and still to come."""
    with one_turn(prompt_len, FOREVER, 10**6).masked(backend) as masked:
        assert masked.argmax(dim=1).tolist() == [1, 1]


@pytest.mark.parametrize("backend", Backend)
def test_a_stop_may_stand_behind_the_least(backend: Backend) -> None:
    """A prompt of 3 and 2 tokens at least: token 4 may not stop, token 5 may."""
    with one_turn(3, 2, 3).masked(backend) as masked:
        assert masked.argmax(dim=1).tolist() == [1, 2]
    with one_turn(3, 0, 3).masked(backend) as masked:
        assert masked.argmax(dim=1).tolist() == [2, 2]


@pytest.mark.parametrize("backend", Backend)
def test_rows_of_padding_hold_nothing_back(backend: Backend) -> None:
    """A slot that no request has is empty; all rows of a graph's padding share it."""
    batch = one_turn(3, 9, 3)
    empty = [{"prompt_len": 0, "min_tokens": 0, "stop_ids": ()}]
    slots = slot_rows([{"prompt_len": 3, "min_tokens": 9, "stop_ids": [2]}, *empty], slots=[4, 6])
    shared = replace(slots, slot_ids=vector([4, 6, 6, 6]))
    layout = StepLayout((), 4, 1, vector([], torch.int32), vector([3, 4, 1, 2, 1, 2, 1, 2]))
    batch = replace(batch, slots=shared, layout=layout, logits=batch.logits.repeat(4, 1))
    with batch.masked(backend) as masked:
        assert masked.argmax(dim=1).tolist() == [1, 1] + [2] * 6


def test_what_is_edited_is_told() -> None:
    assert frozenset({"min_tokens"}) == EDITED_OPTIONS


@pytest.mark.parametrize("backend", Backend)
def test_positions_are_needed(backend: Backend) -> None:
    batch = small()
    batch.layout = replace(batch.layout, positions=None)
    with pytest.raises(TensorContractError, match="min_tokens: needs the step's positions"):
        batch.masked(backend)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "logits",
            torch.zeros(7, 7),
            r"2 context rows and K\+1 = 3 rows for each of 2 generations",
        ),
        ("logits", torch.zeros(8), r"logits: expected floating \[8, V\]"),
        ("logits", torch.zeros(8, 7).int(), "logits: expected floating .*torch.int32"),
        ("table", torch.zeros(9, 44), r"slot table: expected torch.int32 \[S, 44\].*float32"),
        ("table", torch.zeros(9, 43).int(), r"slot table: .*\[S, 44\].*\[9, 43\]"),
        ("table", torch.zeros(38).int(), r"slot table: .*got torch.int32 \[38\]"),
        ("table", torch.zeros(38, 9).int().t(), "slot table: .*rows without gaps"),
        ("slot_ids", torch.zeros(3).long(), r"slot_ids: expected integers \[>= 4\].*\[3\]"),
        ("slot_ids", torch.zeros(4), "slot_ids: expected integers .*torch.float32"),
        ("slot_ids", torch.zeros(4).bool(), "slot_ids: expected integers .*torch.bool"),
        ("slot_ids", torch.zeros(4, 1).long(), r"slot_ids: .*\[4, 1\]"),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_tensors_that_do_not_fit(backend: Backend, name: str, change: Any, message: str) -> None:
    batch = small()
    change = change.to(DEVICE)
    if name == "logits":
        batch.logits = change
    else:
        batch.slots = replace(batch.slots, **{name: change})
    with pytest.raises(TensorContractError, match=message):
        batch.masked(backend)


@pytest.mark.parametrize("name", ["slot table", "slot_ids", "positions", "context_lens"])
@pytest.mark.parametrize("backend", Backend)
def test_tensors_elsewhere(backend: Backend, name: str) -> None:
    batch = small()
    if name in ("positions", "context_lens"):
        away = getattr(batch.layout, name).to("meta")
        batch.layout = replace(batch.layout, **{name: away})
    else:
        field = "table" if name == "slot table" else name
        away = getattr(batch.slots, field).to("meta")
        batch.slots = replace(batch.slots, **{field: away})
    with pytest.raises(TensorContractError, match=f"{name}: expected .*on {DEVICE.type}.*meta"):
        batch.masked(backend)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    batch = small()
    arguments = {
        "layout": batch.layout,
        "logits": batch.logits.nan_to_num(nan=0.25),
        "slots": batch.slots,
    }
    refused = {"slots.table": "rows without gaps"}
    check_strided_arguments(early_stops_masked, arguments, refused=refused, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("contexts", "generations", "stops"), [(0, 1, 1), (0, 256, 3), (7, 60, 20), (200, 9, 32)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes_in_a_cuda_graph(contexts, generations, stops, dtype) -> None:
    """Captured once, replayed over other logits, stops and positions; the host is never asked."""
    k, vocab = 3, 151935
    mine = Batch.of(1, contexts, generations, k, 64, stops)
    dice = torch.Generator().manual_seed(2)
    rows = mine.logits.shape[0]
    logits = torch.randn(rows, vocab, generator=dice).to(DEVICE, dtype)
    mine.logits = logits

    def step() -> torch.Tensor:
        with mine.masked(Backend.TRITON) as masked:
            return masked.clone()

    graph, seen = captured(step)
    for seed in (3, 4):
        other = Batch.of(seed, contexts, generations, k, vocab, stops)
        mine.slots.table.copy_(other.slots.table)
        mine.slots.slot_ids.copy_(other.slots.slot_ids)
        for name in ("first", "later"):
            mine.layout.positions.add_(1 if name == "later" else 0)
            logits.normal_()
            logits[::3, ::7] = torch.nan
            before = logits.clone()
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(logits, before)
            with mine.masked(Backend.TORCH) as masked:
                assert torch.equal(without_nan(seen), without_nan(masked))
                assert generations == 1 or not same_bits(masked, before)

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
from mtp_plugin.speculative.ops.logits import early_stops_masked, launch
from mtp_plugin.speculative.step import RowParameters, StepLayout
from tests.doors import check_strided_arguments, poisoned_memory
from tests.kernels.top_k.launches import captured
from tests.kernels.top_k.rows import DTYPES, VOCABS, odd_rows, strided, without_nan
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.logits import story
from tests.speculative.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, vector


@dataclass
class Batch:
    """Prompts and turns whose rows draw tokens near the first index at which a stop may stand."""

    logits: torch.Tensor
    parameters: RowParameters
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
        spare: int = 0,
        index_dtype: torch.dtype = torch.int64,
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
        first = [r.randrange(14) for _ in range(requests)]
        owners = list(range(contexts))
        owners += [contexts + g for g in range(generations) for _ in range(k + 1)]
        wide = torch.full((requests + spare, stops + spare), 0, dtype=torch.int32, device=DEVICE)
        wide[:requests, :stops] = torch.tensor(table, dtype=torch.int32).reshape(requests, stops)
        return cls(
            strided(odd_rows(dice, len(owners), vocab, dtype), behind),
            RowParameters(wide[:, :stops], vector(first + [99] * spare, torch.int32)),
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
        return early_stops_masked(self.layout, self.logits, self.parameters, backend=backend)

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
    stops=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    behind=st.integers(0, 2),
    spare=st.integers(0, 2),
    index_dtype=st.sampled_from(INDEX_DTYPES),
)
def test_story_torch_and_triton_agree(
    seed, contexts, generations, k, vocab, stops, dtype, behind, spare, index_dtype
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
        spare=spare,
        index_dtype=index_dtype,
    )
    wide = batch.logits if not behind else batch.logits._base
    before, told = wide.clone(), without_nan(batch.story())
    for backend in Backend:
        with poisoned_memory(), batch.masked(backend) as masked:
            assert masked.dtype == dtype
            # a NaN counts as -inf anyway, so either may stand where a stop id is masked
            assert torch.equal(without_nan(masked), told)
        assert same_bits(wide, before)


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


@pytest.mark.parametrize("why", ["no first index", "no stop ids", "no rows"])
@pytest.mark.parametrize("backend", Backend)
def test_nothing_to_mask(backend: Backend, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {
        "no first index": small(),
        "no stop ids": Batch.of(3, 2, 2, 2, 7, 0),
        "no rows": Batch.of(3, 0, 0, 2, 7, 3),
    }[why]
    if why == "no first index":
        # which alone needs positions
        batch.parameters = RowParameters(batch.parameters.stop_ids, None)
        batch.layout = replace(batch.layout, positions=None)
    before = batch.logits.clone()
    forbid_launches(monkeypatch, launch)
    with batch.masked(backend) as masked:
        assert masked is batch.logits
        assert same_bits(masked, before)


@pytest.mark.parametrize("backend", Backend)
def test_a_first_index_needs_positions(backend: Backend) -> None:
    batch = small()
    batch.layout = replace(batch.layout, positions=None)
    with pytest.raises(TensorContractError, match="min_tokens_end: needs the step's positions"):
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
        ("stop_ids", torch.zeros(3, 2).int(), "stop_ids: expected integers of at least 4 rows"),
        ("stop_ids", torch.zeros(4, 2), "stop_ids: expected integers .*torch.float32"),
        ("stop_ids", torch.zeros(4).int(), "stop_ids: .*2 dimensions"),
        ("min_tokens_end", torch.zeros(3).int(), "min_tokens_end: .*at least 4 rows"),
        ("min_tokens_end", torch.zeros(4).bool(), "min_tokens_end: expected integers"),
    ],
)
@pytest.mark.parametrize("backend", Backend)
def test_tensors_that_do_not_fit(backend: Backend, name: str, change: Any, message: str) -> None:
    batch = small()
    change = change.to(DEVICE)
    if name == "logits":
        batch.logits = change
    else:
        batch.parameters = replace(batch.parameters, **{name: change})
    with pytest.raises(TensorContractError, match=message):
        batch.masked(backend)


@pytest.mark.parametrize("name", ["stop_ids", "min_tokens_end", "positions", "context_lens"])
@pytest.mark.parametrize("backend", Backend)
def test_tensors_elsewhere(backend: Backend, name: str) -> None:
    batch = small()
    if name in ("positions", "context_lens"):
        away = getattr(batch.layout, name).to("meta")
        batch.layout = replace(batch.layout, **{name: away})
    else:
        away = getattr(batch.parameters, name).to("meta")
        batch.parameters = replace(batch.parameters, **{name: away})
    with pytest.raises(TensorContractError, match=f"{name}: expected .*on {DEVICE.type}.*meta"):
        batch.masked(backend)


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    batch = small()
    arguments = {
        "layout": batch.layout,
        "logits": batch.logits.nan_to_num(nan=0.25),
        "parameters": batch.parameters,
    }
    check_strided_arguments(early_stops_masked, arguments, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("contexts", "generations", "stops"), [(0, 1, 1), (0, 256, 3), (7, 60, 40), (200, 9, 128)]
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
        mine.parameters.stop_ids.copy_(other.parameters.stop_ids)
        mine.parameters.min_tokens_end.copy_(other.parameters.min_tokens_end)
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

"""Logits masked in place: what is read inside is the reference's copy, outside nothing changed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.speculative.ops.logits import launch, reference
from mtp_plugin.speculative.ops.logits.contract import LogitRows
from mtp_plugin.speculative.step import RowParameters
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.kernels.top_k.rows import DTYPES, VOCABS, odd_rows, strided, without_nan
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.logits import story
from tests.speculative.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, vector

MODULES = [pytest.param(reference, id="reference"), pytest.param(launch, id="kernel")]


@dataclass
class Batch:
    """Prompts and turns whose rows draw tokens near the first index at which a stop may stand."""

    logits: torch.Tensor
    parameters: RowParameters
    step: LogitRows
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
            LogitRows(
                vector(positions, index_dtype), vector(lens, torch.int32), contexts, sum(lens), k
            ),
            [(index, first[o], table[o]) for index, o in zip(drawn, owners, strict=True)],
        )

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
def test_reference_and_kernel_are_the_story(
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
    for module in (reference, launch):
        with (
            poisoned_outputs(launch),
            module.early_stops_masked(batch.logits, batch.parameters, batch.step) as masked,
        ):
            assert masked.dtype == dtype
            # a NaN counts as -inf anyway, so either may stand where a stop id is masked
            assert torch.equal(without_nan(masked), told)
        assert same_bits(wide, before)


def small(**options: Any) -> Batch:
    return Batch.of(3, 2, 2, 2, 7, 3, **options)


def test_the_kernel_masks_in_place() -> None:
    batch = small()
    masking = launch.early_stops_masked(batch.logits, batch.parameters, batch.step)
    with masking as masked:
        assert masked is batch.logits
        assert not torch.equal(without_nan(masked), without_nan(small().logits))


@pytest.mark.parametrize("module", MODULES)
def test_logits_are_whole_again_when_the_body_raises(module: Any) -> None:
    batch = small()
    before = batch.logits.clone()
    with (
        pytest.raises(RuntimeError, match="inside"),
        module.early_stops_masked(batch.logits, batch.parameters, batch.step),
    ):
        raise RuntimeError("inside")
    assert same_bits(batch.logits, before)


def test_rows_that_share_memory_are_copied() -> None:
    batch = small()
    row = batch.logits[3]
    shared = row.expand(batch.logits.shape)
    own = row.repeat(batch.logits.shape[0], 1)
    before = row.clone()
    told = Batch(own, batch.parameters, batch.step, batch.told).story()
    with launch.early_stops_masked(shared, batch.parameters, batch.step) as masked:
        assert torch.equal(without_nan(masked), without_nan(told))
        assert same_bits(row, before)


@pytest.mark.parametrize("why", ["no first index", "no stop ids", "no rows"])
@pytest.mark.parametrize("module", MODULES)
def test_nothing_to_mask(module: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {
        "no first index": small(),
        "no stop ids": Batch.of(3, 2, 2, 2, 7, 0),
        "no rows": Batch.of(3, 0, 0, 2, 7, 3),
    }[why]
    parameters = batch.parameters
    if why == "no first index":
        parameters = RowParameters(parameters.stop_ids, None)
    before = batch.logits.clone()
    forbid_launches(monkeypatch, launch)
    with module.early_stops_masked(batch.logits, parameters, batch.step) as masked:
        assert same_bits(masked, before)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logits", torch.zeros(7, 7), r"expected 2 context rows and K\+1 = 3 rows per generation"),
        ("logits", torch.zeros(8), "expected a floating"),
        ("positions", torch.zeros(4).long(), r"positions: expected shape \[\d+\], got \[4\]"),
        ("context_lens", torch.zeros(3).int(), r"context_lens: expected shape \[2\], got \[3\]"),
        ("stop_ids", torch.zeros(3, 2).int(), "stop_ids: expected at least 4 rows"),
        ("min_tokens_end", torch.zeros(3).int(), "min_tokens_end: expected at least 4 rows"),
    ],
)
@pytest.mark.parametrize("module", MODULES)
def test_shapes_that_do_not_fit(module: Any, name: str, change: Any, message: str) -> None:
    batch = small()
    given_in = {
        "logits": batch.logits,
        "positions": batch.step.positions,
        "context_lens": batch.step.context_lens,
        "stop_ids": batch.parameters.stop_ids,
        "min_tokens_end": batch.parameters.min_tokens_end,
        name: change,
    }
    step = LogitRows(
        given_in["positions"], given_in["context_lens"], 2, batch.step.num_ctx_tokens, 2
    )
    parameters = RowParameters(given_in["stop_ids"], given_in["min_tokens_end"])
    with (
        pytest.raises(TensorContractError, match=message),
        module.early_stops_masked(given_in["logits"], parameters, step),
    ):
        pytest.fail("the shapes passed")


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

    def step() -> torch.Tensor:
        with launch.early_stops_masked(logits, mine.parameters, mine.step) as masked:
            return masked.clone()

    graph, seen = captured(step)
    for seed in (3, 4):
        other = Batch.of(seed, contexts, generations, k, vocab, stops)
        mine.parameters.stop_ids.copy_(other.parameters.stop_ids)
        mine.parameters.min_tokens_end.copy_(other.parameters.min_tokens_end)
        for name in ("first", "later"):
            mine.step.positions.add_(1 if name == "later" else 0)
            logits.normal_()
            logits[::3, ::7] = torch.nan
            before = logits.clone()
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(logits, before)
            with reference.early_stops_masked(logits, mine.parameters, mine.step) as masked:
                assert torch.equal(without_nan(seen), without_nan(masked))
                assert generations == 1 or not same_bits(masked, before)

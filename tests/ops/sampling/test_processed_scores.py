"""Processed scores: example, torch and Triton agree."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import TRUNCATION_SIZE, processed_scores, sample_tokens
from mtp_plugin.ops.sampling import processed_triton as launch
from mtp_plugin.ops.step import SlotRows
from tests.op_arguments import check_arguments, poisoned_memory
from tests.ops.logits_processing.example import Place
from tests.ops.on_device import DEVICE, forbid_launches, vector
from tests.ops.sampling import example
from tests.ops.sampling.cases import COLUMNS, ROUNDED, slots_of
from tests.ops.sampling.example import Options
from tests.ops.sampling.processed_rows import EditedBatch, write
from tests.ops.top_k.rows import DTYPES

BOTH = pytest.mark.parametrize("backend", Backend)


def reference_probs(row: list[float], options: Options, forced: int) -> list[float]:
    """Probabilities of a row of processed values, by the example."""
    ids = range(len(row))
    values = [-math.inf if math.isnan(value) else value for value in row]
    highest = max(values)
    if forced >= 0:
        return [float(column == forced) for column in ids]
    if highest == -math.inf:
        return [0.0 for _ in ids]
    if highest == math.inf:
        return [float(column == values.index(highest)) for column in ids]
    is_greedy = options.temperature < example.rounded(1e-5)
    below = [example.rounded(value - highest) for value in values]
    scores = [example.rounded(value / (1 if is_greedy else options.temperature)) for value in below]
    kept = set(ids if is_greedy else example.kept(scores, options))
    weights = [math.exp(scores[column]) if column in kept else 0.0 for column in ids]
    return [weight / math.fsum(weights) for weight in weights]


def forced_of(rng: random.Random, rows: int, vocab: int) -> list[int]:
    return [rng.choice((-1, -1, -1, rng.randrange(vocab))) for _ in range(rows)]


def scores_of(
    case: EditedBatch, forced: torch.Tensor | None, slots: SlotRows, backend: Backend
) -> torch.Tensor:
    logits, rows = case.logits, case.batch.rows
    with poisoned_memory():
        truncation = torch.empty(len(logits), TRUNCATION_SIZE, dtype=torch.float32, device=DEVICE)
        sample_tokens(logits, rows, slots, truncation=truncation, backend=backend)
        return processed_scores(logits, rows, slots, truncation, forced, backend=backend)


def shares_of(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities [N, V] float64; of rows without any nothing."""
    return scores.double().softmax(dim=1).nan_to_num(nan=0.0)


@BOTH
def test_processed_scores_equal_the_example(backend: Backend) -> None:
    odd = every = 0

    @settings(max_examples=24 if backend is Backend.TORCH else 12)
    @given(
        seed=st.integers(0, 2**31),
        vocab=st.sampled_from((1, 2, 7, 31, 33, 127)),
        contexts=st.integers(0, 2),
        generations=st.integers(0, 2),
        width=st.integers(1, 3),
        dtype=st.sampled_from(DTYPES),
        gap=st.integers(0, 2),
        drafts=st.booleans(),
        pools=st.sampled_from([True, True, False]),
        forces=st.booleans(),
        greedy=st.sampled_from([False, False, True]),
    )
    def agree(seed: int, vocab: int, forces: bool, **shape: Any) -> None:
        nonlocal odd, every
        case = EditedBatch.of(seed, vocab, **shape)
        case = replace(case, batch=case.batch.replaced(rows=replace(case.batch.rows, column=0)))
        case = replace(case, places=without_column(case))
        rng, count = random.Random(seed), len(case.logits)
        forced = forced_of(rng, count, vocab) if forces else [-1] * count
        slots = case.batch.slots
        requested = [rng.choice((-1, 0, 5)) for _ in case.options]
        write(slots, [{"logprobs": number} for number in requested])
        given_ids = vector(forced, torch.int32) if forces else None
        got = shares_of(scores_of(case, given_ids, slots, backend)).tolist()
        rows = case.edited() if slots.pools is not None else case.logits.double().tolist()
        for row, (request, _) in enumerate(case.sampled_positions()):
            if requested[request] < 0:
                continue
            options = case.options[request]
            options = options._replace(**{n: example.rounded(getattr(options, n)) for n in ROUNDED})
            expected = reference_probs(rows[row], options, forced[row])
            every += 1
            odd += got[row] != pytest.approx(expected, rel=1e-4, abs=1e-6)

    agree()
    assert every > 10
    assert odd == 0, every


def without_column(case: EditedBatch) -> list[Place]:
    """Draft tokens before each row."""
    rows, expected = case.batch.rows, []
    for row, (request, index) in enumerate(case.sampled_positions()):
        before: list[int] = []
        if rows.drafts is not None and request >= rows.num_contexts:
            number = (row - rows.num_contexts) % rows.width
            before = rows.drafts[request - rows.num_contexts].tolist()[:number]
        expected.append(replace(case.places[row], index=index, before=before))
    return expected


OPTIONS = [
    Options(0.0),
    Options(1.0, seed=5),
    Options(0.8, top_k=30, top_p=0.9, seed=6),
    Options(1.2, top_p=0.7, seed=7),
    Options(2.0, min_p=0.2, seed=2**63 + 8),
]


def arguments(vocab: int = 70) -> dict[str, Any]:
    """One context and four generations of two rows; the last has no logprobs."""
    rng = torch.Generator().manual_seed(3)
    slots = slots_of(OPTIONS, random.Random(4))
    write(slots, [{"logprobs": number} for number in (0, 5, 0, 3, 2)])
    rows = LogitRows(1, 2, vector([4, 9, 0, 77, 2**31 - 9]))
    logits = (torch.randn(9, vocab, generator=rng) * 2).to(DEVICE)
    truncation = torch.empty(9, TRUNCATION_SIZE, device=DEVICE)
    sample_tokens(logits, rows, slots, truncation=truncation, backend=Backend.TORCH)
    forced = vector([-1, -1, -1, 5, -1, -1, 0, -1, -1], torch.int32)
    return {
        "logits": logits,
        "rows": rows,
        "slots": slots,
        "truncation": truncation,
        "forced": forced,
    }


@BOTH
def test_arguments(backend: Backend) -> None:
    def result(table: torch.Tensor, slot_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        return processed_scores(slots=SlotRows(table, slot_ids, COLUMNS), **others)

    given_ = arguments()
    slots = given_.pop("slots")
    given_ |= {"table": slots.table, "slot_ids": slots.slot_ids}
    refused = {
        "logits": "row-contiguous",
        "table": "row-contiguous",
        "truncation": "expected contiguous",
    }
    free = {"table: shorter", "slot_ids: shorter"}
    check_arguments(result, given_, refused=refused, free=free, backend=backend)


def test_kernels_follow_torch_over_many_pieces() -> None:
    given_ = arguments(2 * launch.BLOCK + 77)
    expected, got = (processed_scores(**given_, backend=backend) for backend in Backend)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert bool((got == -torch.inf).any())


DEEP = [
    Options(1.0, top_k=3, seed=1),
    Options(1.0, top_k=40, seed=2),
    Options(0.05, top_k=40, seed=3),
    Options(1.0, top_k=2000, seed=4),
    Options(1e-4, top_k=2000, seed=5),
    Options(1.0, top_k=40, top_p=0.999, seed=6),
    Options(1.0, min_p=1e-30, seed=7),
]


@pytest.mark.thinned("step")
@pytest.mark.parametrize("step", [0.04, 1.0, 30.0])
@pytest.mark.parametrize("options", DEEP, ids=str)
def test_deep_kept_tokens_have_scores(options: Options, step: float) -> None:
    """Tokens too deep to be sampled: one every ``step``, after a first one of 50 more."""
    vocab = 6000
    logits = torch.arange(vocab) * -step
    logits[0] += 50
    logits[5000:] = -torch.inf
    logits = logits[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    logits = logits[None].to(DEVICE)
    slots = slots_of([options], random.Random(1))
    write(slots, [{"logprobs": 5}])
    rows = LogitRows(0, 1, vector([7]))
    expected = []
    for backend in Backend:
        truncation = torch.empty(1, TRUNCATION_SIZE, device=DEVICE)
        sample_tokens(logits, rows, slots, truncation=truncation, backend=backend)
        expected.append(processed_scores(logits, rows, slots, truncation, backend=backend))
    torch.testing.assert_close(*expected, rtol=1e-6, atol=1e-6)
    if options.top_p == 1 and options.min_p == 0:
        assert int((expected[1] > -torch.inf).sum()) == options.top_k


def test_requests_without_logprobs_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are not written, and without rows nothing is launched."""
    given_ = arguments()
    write(given_["slots"], [{"logprobs": -1}] * 4 + [{"logprobs": 0}])
    with poisoned_memory():
        got = processed_scores(**given_, backend=Backend.TRITON)
    expected = processed_scores(**given_, backend=Backend.TORCH)
    torch.testing.assert_close(got[7:], expected[7:], rtol=1e-6, atol=1e-6)
    assert bool(got[:7].isnan().all())
    forbid_launches(monkeypatch, launch)
    no_rows = LogitRows(0, 2, vector([]))
    none = {"logits": given_["logits"][:0], "truncation": given_["truncation"][:0], "forced": None}
    assert processed_scores(
        **{**given_, **none, "rows": no_rows}, backend=Backend.TRITON
    ).shape == (
        0,
        70,
    )

"""Example, torch and Triton agree, but where a threshold is too close to call."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_OK
from tests.ops.acceptance.cases import (
    KINDS,
    Case,
    Thinker,
    assert_implementations_agree,
    assert_matches_example,
    assert_same,
    ragged,
    relaxed_rule,
)
from tests.ops.acceptance.margins import CLOSE, undecided
from tests.ops.acceptance.random_cases import (
    cases,
    chosen_rows,
    make_case,
    small_cases,
    smooth_case,
)
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE
from tests.ops.top_k.rows import DTYPES, without_nan


def check_example(case: Case, kind: str) -> None:
    before = case.logits.clone(), case.drafts.clone()
    rules = case.rules(kind)
    for backend in Backend:
        assert_matches_example(case, rules, case.accept(rules, backend))
    assert same_bits(case.logits, before[0])
    assert same_bits(case.drafts, before[1])


EVERY_KIND = st.sampled_from(KINDS)
RAGGED = st.none() | st.integers(0, 2**16)
INTEGERS = st.sampled_from([torch.int32, torch.int64, torch.int16])


@settings(max_examples=28)
@given(kind=EVERY_KIND, case=cases, seed=RAGGED, dtype=INTEGERS)
def test_example_torch_and_triton_agree(
    kind: str, case: Case, seed: int | None, dtype: torch.dtype
) -> None:
    """Rows in order, or with ``seed`` ragged ones in another order."""
    case = case if seed is None else ragged(case, seed, dtype)
    check_example(case, kind)
    assert_implementations_agree(case, kind)


@settings(max_examples=60)
@given(kind=EVERY_KIND, case=small_cases, seed=RAGGED)
def test_all_match_the_example_for_small_vocabularies(
    kind: str, case: Case, seed: int | None
) -> None:
    check_example(case if seed is None else ragged(case, seed), kind)


@settings(max_examples=28)
@given(kind=EVERY_KIND, case=small_cases, seed=RAGGED)
def test_rows_of_output_tokens_and_valid_ids_are_returned_if_wanted(
    kind: str, case: Case, seed: int | None
) -> None:
    case = case if seed is None else ragged(case, seed)
    rules, requests = case.rules(kind), case.layout.num_requests
    for backend in Backend:
        plain, following, *phase = case.accept(rules, backend)
        kept, last, *later = case.accept(rules, backend, keeps_rows=True)
        filled = case.accept(rules, backend, fills=torch.int64).accepted
        assert plain.rows is filled.rows is None
        assert torch.equal(filled.tokens, plain.tokens.clamp_min(0).to(torch.int64))
        assert torch.equal(filled.num_accepted, plain.num_accepted)
        assert kept.rows is not None
        assert kept.rows.dtype == torch.int32
        assert torch.equal(kept.tokens, plain.tokens.clamp_min(0))
        assert torch.equal(kept.num_accepted, plain.num_accepted.clamp_min(1))
        assert torch.equal(kept.status, plain.status)
        assert torch.equal(last, following)
        for before, after in zip(phase, later, strict=True):
            assert before is after is None or torch.equal(before, after)
        for request in range(requests):
            count = int(kept.num_accepted[request])
            rows = (case.rows_of(request) + [-1] * case.layout.step_rows)[:count]
            rows += [-1] * (case.layout.step_rows - count)
            assert kept.rows[request].tolist() == rows


@pytest.mark.parametrize("kind", ["relaxed", "mixed", "chosen"])
def test_implementations_agree_where_distances_decide(kind: str) -> None:
    """Smooth rows, with phases, stop ids, ragged drafts: few are too close, many are decided."""
    seen = Counter()
    # a count leaves few of the mixed ones to distances
    seeds, generations = (12, 4) if kind == "relaxed" else (6, 12)
    for seed in range(seeds):
        case = make_case(
            seed,
            num_generations=generations,
            k=1 + seed % 7,
            vocab=(127, 2049)[seed % 2],
            dtype=DTYPES[seed % 3],
            smooth=True,
            stops=seed % 3,
        )
        close, decided = assert_implementations_agree(case, kind)
        seen.update(close=close, decided=decided)
    assert seen["decided"] > (5 if kind == "relaxed" else 1)
    assert seen["close"] <= seen["decided"] / 10


def test_blocks_of_several_tiles_agree() -> None:
    """Many rows: every program reads one tile after another, and reduces its lanes once."""
    case = smooth_case(70, 1, 2500, seed=4)
    case.logits[0] = torch.arange(2500) / 100  # the highest in the last block
    case.logits[2] = -torch.arange(2500) / 100  # and in the first
    case.logits[4] = -torch.inf
    case.logits[6, [3, 1030, 2499]] = torch.inf
    assert_implementations_agree(chosen_rows(case, 4), "relaxed")


R46 = [
    pytest.param(batch, k, vocab, id=f"batch{batch}-k{k}-vocab{vocab}")
    for batch, k, vocab in [
        (0, 3, 127),
        (1, 0, 1),
        (1, 7, 1023),
        (5, 3, 1025),
    ]
]


@pytest.mark.parametrize(("batch", "k", "vocab"), R46)
def test_r46_counts_stay_within_the_run(batch: int, k: int, vocab: int) -> None:
    """Odd batches, padded drafts, rows without probability: 1..K+1 tokens where a row is alive."""
    for seed in range(2):
        case = make_case(seed, num_generations=batch, k=k, vocab=vocab, dtype=DTYPES[seed])
        case.drafts[:, k - 1 :] = -1
        fine = replace(case, logits=case.logits.masked_fill(dead_rows(case.logits), 0.25))
        fine = chosen_rows(fine, seed)
        for one in (case, fine):
            for kind in KINDS[seed::2]:
                assert_implementations_agree(one, kind)
                given_back = one.accept(kind, Backend.TRITON).accepted
                counts, tokens = given_back.num_accepted, given_back.tokens
                assert counts.shape == (batch,)
                alive = given_back.status == STATUS_OK
                assert (counts[alive] >= 1).all()
                assert (counts >= 0).all()
                assert (counts <= k + 1).all()
                assert one is case or bool(alive.all())
                emitted = torch.arange(k + 1, device=DEVICE) < counts.unsqueeze(1)
                assert ((tokens >= 0) & (tokens < vocab))[emitted].all()
                assert (tokens[~emitted] == PAD_TOKEN).all()
                assert not k or (counts[alive] <= k).all()  # the last draft is no token


def dead_rows(logits: torch.Tensor) -> torch.Tensor:
    return (without_nan(logits) == -torch.inf).all(dim=1, keepdim=True)


def test_thresholds_decide_as_expected_except_for_a_few_close_rows() -> None:
    """Many smooth rows: the share that is too close to call stays under 0.1 %, both ways occur."""
    requests, k = 2000, 3
    case = smooth_case(requests, k, 16, seed=11)
    rules = AcceptanceRules(relaxed=relaxed_rule([Thinker(topk=3, limit=0.2)] * requests))
    outcome = case.accept(rules, Backend.TORCH)
    assert_matches_example(case, rules, outcome)
    margin = case.margins(rules)
    assert int(undecided(margin, rules, case.layout).sum()) < requests / 1000
    decided = torch.isfinite(margin) & (margin > CLOSE)
    is_accepted = torch.arange(k, device=DEVICE) < outcome.accepted.num_accepted.unsqueeze(1) - 1
    assert int((decided & is_accepted).sum()) > requests / 10
    assert int((decided & ~is_accepted).sum()) > requests / 10


@pytest.mark.parametrize("backend", Backend)
def test_drafts_in_any_shape_are_read_in_order(backend: Backend) -> None:
    case = make_case(1, num_generations=3, k=4, vocab=33)
    expected, flat = case.accept("strict", backend), case.drafts.reshape(-1)
    for drafts in (flat, flat.view(1, -1), flat.view(4, 3), case.drafts.T.contiguous().T):
        assert_same(replace(case, drafts=drafts).accept("strict", backend), expected)

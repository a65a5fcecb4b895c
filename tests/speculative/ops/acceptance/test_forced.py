"""Acceptance with a forced number of matches: story, reference and kernel; scenario R45."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.top_k import launch as reduce_launch
from mtp_plugin.speculative import step as step_batch
from mtp_plugin.speculative.ops.acceptance import launch, reference
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, Accepted
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.kernels.top_k.rows import DTYPES
from tests.speculative.ops.acceptance import story
from tests.speculative.ops.acceptance.test_kernel import (
    REAL,
    Case,
    assert_same,
    assert_story,
    cases,
    make_case,
    real_case,
    told,
)
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned, read_back_forbidden

MODULES = [pytest.param(reference, id="reference"), pytest.param(launch, id="kernel")]


def accept(case: Case, forced: torch.Tensor, module: Any) -> tuple[Accepted, torch.Tensor]:
    """What was accepted, and the next inputs, of which it may write the first column."""
    following = poisoned(case.requests, case.k + 2, dtype=torch.int32)
    with poisoned_outputs(launch, step_batch, reduce_launch):
        accepted = module.accept_strict(
            case.logits,
            case.drafts,
            **case.shape,
            last_tokens=following[:, 0],
            forced_matches=forced,
        )
    return accepted, following


def counts(case: Case, seed: int) -> torch.Tensor:
    """Up to K matches per generation, and beyond what a synthetic draw could ask for."""
    r = random.Random(seed)
    numbers = [r.randint(0, case.k + 1) for _ in range(case.drafts.shape[0])]
    return torch.tensor(numbers, dtype=torch.int32).to(DEVICE)


@settings(max_examples=40)
@given(case=cases, seed=st.integers(0, 2**31))
def test_reference_and_kernel_are_the_story(case: Case, seed: int) -> None:
    before = case.logits.clone(), case.drafts.clone()
    forced = counts(case, seed)
    accepted, following = accept(case, forced, launch)
    expected, expected_following = accept(case, forced, reference)
    assert_same(accepted, expected)
    assert torch.equal(following, expected_following)
    assert (following[:, 1:] == POISON).all()
    prompts, generations = told(case)
    runs = [
        story.forced(rows, drafts, count)
        for (rows, drafts), count in zip(generations, forced.tolist(), strict=True)
    ]
    for request, run in enumerate(prompts + runs):
        assert_story(accepted, request, run)
        assert following[request, 0] == (run.tokens[-1] if run.tokens else 0)
    assert same_bits(case.logits, before[0])
    assert same_bits(case.drafts, before[1])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("vocab", [127, 1025, 2049])
def test_r45_forced_matches_beyond_what_was_accepted_emit_tokens(vocab: int, module: Any) -> None:
    """R45: K = 3, every match forced over drafts that are wrong, absent or no tokens at all."""
    k, seen = 3, 0
    for seed in range(6):
        case = make_case(seed, num_generations=5, k=k, vocab=vocab, dtype=DTYPES[seed % 3])
        case.drafts[::2, 1] = (-1, vocab, vocab + 7, 2**31 - 1)[seed % 4]
        lens = torch.tensor([3, 2, 1, 0, 3], dtype=torch.int32, device=DEVICE)
        case.shape["draft_lens"] = lens
        accepted, following = accept(case, torch.full_like(lens, k), module)
        honest, _ = case.strict(module)
        num, tokens = accepted.num_accepted, accepted.tokens
        emitted = torch.arange(k + 1, device=DEVICE) < num.unsqueeze(1)
        assert ((tokens >= 0) & (tokens < vocab))[emitted].all()
        assert (tokens[~emitted] == PAD_TOKEN).all()
        assert ((following[:, 0] >= 0) & (following[:, 0] < vocab)).all()
        assert (num <= lens + 1).all()
        assert (num[::2] <= 2).all()  # no run reaches behind the draft that is no token
        seen += int((num > honest.num_accepted).sum())
    assert seen > 5


@pytest.mark.parametrize("module", MODULES)
def test_a_run_ends_before_a_row_without_values(module: Any) -> None:
    dead, row = [-math.inf] * 4, [0.0, 1.0, math.nan, -math.inf]
    logits = [row, dead, row, row, row, dead, row, row, row]
    case = Case(
        torch.tensor(logits, device=DEVICE),
        torch.tensor([[0, 0], [0, 0], [2, 3]], dtype=torch.int32, device=DEVICE),
        make_case(0, num_generations=3, k=2, vocab=4).rule,
        {"num_contexts": 0, "max_draft_len": 2},
    )
    accepted, _ = accept(case, torch.full((3,), 2, dtype=torch.int32, device=DEVICE), module)
    # the masked draft of the last request and the one whose logit is NaN stand for nobody
    assert accepted.tokens.tolist() == [[0, -1, -1], [0, 0, -1], [1, -1, -1]]
    assert accepted.num_accepted.tolist() == [1, 2, 1]
    assert accepted.status.tolist() == [STATUS_NO_FINITE_LOGIT, STATUS_NO_FINITE_LOGIT, 0]


@pytest.mark.parametrize("module", MODULES)
def test_no_forced_match_is_target_only_decoding(module: Any) -> None:
    """One token per request, also where the target agrees with the drafts."""
    case = make_case(4, num_contexts=2, num_generations=4, k=5, vocab=1025)
    none = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    accepted, _ = accept(case, none, module)
    assert (accepted.num_accepted <= 1).all()
    honest, _ = case.strict(module)
    assert torch.equal(accepted.num_accepted[:2], honest.num_accepted[:2])


@pytest.mark.parametrize("module", MODULES)
def test_a_count_per_generation(module: Any) -> None:
    case = make_case(4, num_contexts=1, num_generations=2, k=2, vocab=7)
    with pytest.raises(
        TensorContractError, match=r"forced_matches: expected shape \[2\], got \[3\]"
    ):
        accept(case, torch.zeros(3, dtype=torch.int32, device=DEVICE), module)


# --- on a device, with real shapes ---


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k", "vocab"), REAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes(batch: int, k: int, vocab: int, dtype: torch.dtype) -> None:
    case = real_case(batch, k, vocab, 8, dtype)
    forced = counts(case, 9)
    accepted, following = accept(case, forced, launch)
    expected, expected_following = accept(case, forced, reference)
    assert_same(accepted, expected)
    assert torch.equal(following, expected_following)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k", "vocab"), [(1, 3, 129280), (256, 3, 151935)])
def test_in_a_cuda_graph(batch: int, k: int, vocab: int) -> None:
    """Captured once, replayed with other logits, drafts, lengths and counts."""
    mine = real_case(batch, k, vocab, 1, torch.bfloat16)
    forced = counts(mine, 1)

    def step() -> Accepted:
        return launch.accept_strict(mine.logits, mine.drafts, **mine.shape, forced_matches=forced)

    graph, outputs = captured(step)
    for seed in (20, 30):
        other = real_case(batch, k, vocab, seed, torch.bfloat16)
        mine.logits.copy_(other.logits)
        mine.drafts.copy_(other.drafts)
        mine.shape["draft_lens"].copy_(other.shape["draft_lens"])
        forced.copy_(counts(mine, seed))
        graph.replay()
        torch.cuda.synchronize()
        with read_back_forbidden():
            step()
        assert_same(outputs, accept(other, forced, reference)[0])

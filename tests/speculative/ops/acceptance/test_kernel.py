"""The kernels against reference and story: the same ids, but where a threshold is too close."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.top_k import launch as reduce_launch
from mtp_plugin.kernels.top_k.launch import split
from mtp_plugin.speculative import step as step_batch
from mtp_plugin.speculative.ops.acceptance import RelaxedRule, contract, launch, reference
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK, Accepted
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided, without_nan
from tests.speculative.ops.acceptance import story
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned, read_back_forbidden

CLOSE = 1e-5
"""Nearer than this to a threshold, two orders of summation may decide differently."""


@dataclass(frozen=True)
class Case:
    """One call: tensors on the device, and what the story needs on the host."""

    logits: torch.Tensor
    drafts: torch.Tensor  # [G, K]
    rule: RelaxedRule
    shape: dict[str, Any]

    @property
    def k(self) -> int:
        return int(self.shape["max_draft_len"])

    @property
    def num_contexts(self) -> int:
        return int(self.shape["num_contexts"])

    @property
    def requests(self) -> int:
        return self.num_contexts + self.drafts.shape[0]

    def strict(self, module: Any = launch) -> tuple[Accepted, torch.Tensor]:
        """What was accepted, and the next inputs, of which it may write the first column."""
        following = poisoned(self.requests, self.k + 2, dtype=torch.int32)
        with poisoned_outputs(launch, step_batch, contract, reduce_launch):
            accepted = module.accept_strict(
                self.logits, self.drafts, **self.shape, last_tokens=following[:, 0]
            )
        return accepted, following

    def relaxed(self, module: Any = launch) -> tuple[Any, torch.Tensor]:
        following = poisoned(self.requests, self.k + 2, dtype=torch.int32)
        with poisoned_outputs(launch, step_batch, contract, reduce_launch):
            result = module.accept_relaxed(
                self.logits, self.drafts, self.rule, **self.shape, last_tokens=following[:, 0]
            )
        return result, following


def make_case(
    seed: int,
    *,
    num_contexts: int = 0,
    num_generations: int,
    k: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    smooth: bool = False,
    behind: int = 0,
    lens: bool = False,
    finals: bool = False,
    stops: int | None = None,
    id_dtype: torch.dtype = torch.int32,
) -> Case:
    """Drafts that mostly match, phases that begin and end inside runs, ids outside."""
    dice, r = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = num_contexts + num_generations * (k + 1)
    requests = num_contexts + num_generations
    values = odd_rows(dice, rows, vocab, dtype, smooth=smooth)
    begin, end = r.sample(range(-1, vocab + 1), 2)
    # tokens that change the phase are first choices here and there
    for row in range(rows):
        token = r.choice([begin, end])
        if r.random() < 0.2 and 0 <= token < vocab and not torch.isnan(values[row]).any():
            values[row, token] = 30.0
    best = best_ids(values)[num_contexts:].view(num_generations, k + 1)
    ranked = without_nan(values.float())[num_contexts:].argsort(dim=1, descending=True)
    ranked = ranked.view(num_generations, k + 1, vocab)

    def guess(g: int, i: int) -> int:
        luck = r.random()
        if luck < 0.45:
            return int(best[g, i])
        if luck < 0.9:
            return int(ranked[g, i, r.randrange(min(4, vocab))])
        return r.choice([-1, vocab, vocab + 3, 2**31 - 1, begin, end, r.randrange(vocab)])

    drafts = [[guess(g, i) for i in range(k)] for g in range(num_generations)]
    stop_ids = None
    if stops is not None:
        stop_ids = torch.full((requests, stops), -1, dtype=torch.int32)
        for g, row in enumerate(drafts):
            for column in range(stops):
                if row and r.random() < 0.3:
                    stop_ids[num_contexts + g, column] = r.choice(row)
        stop_ids = stop_ids.to(DEVICE)

    def int32(items: list[int]) -> torch.Tensor:
        return torch.tensor(items, dtype=torch.int32, device=DEVICE)

    deltas = [r.choice([0.0, 0.0213, 0.1371, 0.6117, 1.0]) for _ in range(requests)]
    rule = RelaxedRule(
        thinking=torch.tensor([r.random() < 0.6 for _ in range(requests)], dtype=torch.bool).to(
            DEVICE
        ),
        topk=int32([r.choice([1, 2, 4, vocab, vocab + 5]) for _ in range(requests)]),
        delta=torch.tensor(deltas, dtype=torch.float32, device=DEVICE),
        stop_ids=stop_ids,
        begin_token=begin,
        end_token=end,
    )
    ends_prompt = [r.random() < 0.5 for _ in range(num_contexts)]
    shape = {
        "num_contexts": num_contexts,
        "max_draft_len": k,
        "draft_lens": int32([r.randint(0, k) for _ in drafts]) if lens else None,
        "final_context": torch.tensor(ends_prompt, dtype=torch.bool).to(DEVICE) if finals else None,
    }
    table = torch.tensor(drafts, dtype=id_dtype).reshape(num_generations, k).to(DEVICE)
    return Case(strided(values, behind), table, rule, shape)


cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 3),
    k=st.integers(0, 7),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    smooth=st.booleans(),
    behind=st.integers(0, 3),
    lens=st.booleans(),
    finals=st.booleans(),
    stops=st.sampled_from([None, 0, 1, 3]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)


def assert_same(mine: Accepted, theirs: Accepted, rows: Any = slice(None)) -> None:
    for name in ("tokens", "num_accepted", "status"):
        kernel, expected = getattr(mine, name), getattr(theirs, name)
        assert kernel.dtype == expected.dtype == torch.int32
        assert kernel.shape == expected.shape
        assert torch.equal(kernel[rows], expected[rows]), name


def undecided(margin: torch.Tensor, rule: RelaxedRule, num_contexts: int) -> torch.Tensor:
    """Generations with a margin too small to call; equal values at distance 0 are not close."""
    exact = (rule.delta[num_contexts:] == 0).unsqueeze(1) & (margin == 0)
    return ((margin < CLOSE) & ~exact).any(dim=1)


def assert_relaxed(case: Case) -> tuple[int, int]:
    """Kernel and reference agree; returns how many generations were too close, and how many of
    all were judged by a distance."""
    result, following = case.relaxed()
    expected, expected_following = case.relaxed(reference)
    close = undecided(expected.margin, case.rule, case.num_contexts)
    sure = torch.cat([close.new_ones(case.num_contexts), ~close])
    assert_same(result.accepted, expected.accepted, sure)
    assert result.thinking.dtype == torch.bool
    assert torch.equal(result.thinking[sure], expected.thinking[sure])
    assert torch.equal(following[sure], expected_following[sure])
    torch.testing.assert_close(result.margin[~close], expected.margin[~close], atol=CLOSE, rtol=0)
    return int(close.sum()), int(torch.isfinite(expected.margin).any(dim=1).sum())


def assert_story(accepted: Accepted, request: int, run: story.Run) -> None:
    width = accepted.tokens.shape[1]
    padding = [PAD_TOKEN] * (width - len(run.tokens))
    assert accepted.tokens[request].tolist() == run.tokens + padding
    assert accepted.num_accepted[request] == len(run.tokens)
    assert accepted.status[request] == (STATUS_OK if run.fine else STATUS_NO_FINITE_LOGIT)


def told(case: Case) -> tuple[list[story.Run], list[tuple[list[list[float]], list[int]]]]:
    """The runs of contexts, and (rows, drafts that are there) of generations."""
    rows, width = case.logits.double().tolist(), case.k + 1
    finals, lens = case.shape["final_context"], case.shape["draft_lens"]
    prompts = [
        story.prompt(rows[c], finals is None or bool(finals[c])) for c in range(case.num_contexts)
    ]
    generations = []
    for g, drafts in enumerate(case.drafts.tolist()):
        first = case.num_contexts + g * width
        present = drafts if lens is None else drafts[: int(lens[g])]
        generations.append((rows[first : first + width], present))
    return prompts, generations


@settings(max_examples=40)
@given(cases)
def test_strict_is_the_reference_and_the_story(case: Case) -> None:
    before = case.logits.clone(), case.drafts.clone()
    accepted, following = case.strict()
    expected, expected_following = case.strict(reference)
    assert_same(accepted, expected)
    assert torch.equal(following, expected_following)
    assert (following[:, 1:] == POISON).all()
    prompts, generations = told(case)
    for request, run in enumerate(prompts + [story.strict(*told) for told in generations]):
        assert_story(accepted, request, run)
        assert following[request, 0] == (run.tokens[-1] if run.tokens else 0)
    assert same_bits(case.logits, before[0])
    assert same_bits(case.drafts, before[1])


@settings(max_examples=40)
@given(cases)
def test_relaxed_is_the_reference(case: Case) -> None:
    assert_relaxed(case)


def test_relaxed_is_the_reference_where_distances_decide() -> None:
    """Smooth rows, with phases, stop ids, ragged drafts: few are too close, many are decided."""
    seen = Counter()
    for seed in range(24):
        k, vocab, dtype = 1 + seed % 7, (127, 2049)[seed % 2], DTYPES[seed % 3]
        case = make_case(
            seed, num_generations=4, k=k, vocab=vocab, dtype=dtype, smooth=True, stops=seed % 3
        )
        close, decided = assert_relaxed(case)
        seen.update(close=close, decided=decided)
    assert seen["decided"] > 10
    assert seen["close"] <= seen["decided"] / 10


@settings(max_examples=15)
@given(cases)
def test_relaxed_is_the_story(case: Case) -> None:
    result, _ = case.relaxed()
    prompts, generations = told(case)
    for request, run in enumerate(prompts):
        assert_story(result.accepted, request, run)
    stop_ids = case.rule.stop_ids
    for g, (rows, drafts) in enumerate(generations):
        request = case.num_contexts + g
        stops = [] if stop_ids is None else [s for s in stop_ids[request].tolist() if s >= 0]
        rule = story.Rule(
            bool(case.rule.thinking[request]),
            int(case.rule.topk[request]),
            float(case.rule.delta[request]),
            stops,
            case.rule.begin_token,
            case.rule.end_token,
        )
        run = story.relaxed(rows, drafts, rule)
        if any(0 < margin < CLOSE for margin in run.margins.values()):
            continue
        assert_story(result.accepted, request, run)
        assert bool(result.thinking[request]) == run.thinking
        margins = [run.margins.get(i, math.inf) for i in range(case.k)]
        torch.testing.assert_close(result.margin[g].tolist(), margins, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])
def test_ties_across_pieces_go_to_the_lowest_id(dtype: torch.dtype, relaxed: bool) -> None:
    """The same maximum on both sides of a cut, and once more in the last piece."""
    vocab, k = 4999, 1
    piece, pieces, _ = split(2, vocab, heavy=relaxed)
    assert pieces > 2
    for low in (piece - 1, piece, 2 * piece - 1, vocab - 1):
        logits = torch.zeros(2, vocab)
        logits[:, [low, vocab - 1]] = 2.5
        if low + 1 < vocab:
            logits[:, low + 1] = 2.5
        rule = RelaxedRule(
            torch.ones(1, dtype=torch.bool, device=DEVICE),
            torch.tensor([2], dtype=torch.int32, device=DEVICE),
            torch.zeros(1, device=DEVICE),
            None,
            -1,
            -1,
        )
        tied = sorted({low, min(low + 1, vocab - 1), vocab - 1})
        for rank, draft in enumerate(tied):
            case = Case(
                logits.to(DEVICE, dtype),
                torch.tensor([[draft]], device=DEVICE),
                rule,
                {"num_contexts": 0, "max_draft_len": k},
            )
            accepted = case.relaxed()[0].accepted if relaxed else case.strict()[0]
            # equal probabilities: relaxed takes the first two of them, strict the first alone
            stands = rank < (2 if relaxed else 1)
            assert accepted.tokens.tolist() == [[draft, low] if stands else [low, PAD_TOKEN]]


def test_a_phase_that_begins_and_ends_within_a_run() -> None:
    """Six tokens: 1 begins, 2 ends; 4 is always near 3, the first choice."""
    near = [-9.0, -9.0, -9.0, 0.0, -0.1, -9.0]

    def top(token: int) -> list[float]:
        return [0.0 if t == token else -9.0 for t in range(6)]

    runs = [
        # thinking before, rows, drafts, emitted, thinking after
        (False, [near, top(1), near, top(2), near], [3, 1, 4, 2], [3, 1, 4, 2, 3], False),
        (False, [near, top(1), near, near, near], [4, 1, 4, 4], [3], False),
        (True, [near, top(2), near, near, near], [4, 2, 4, 4], [4, 2, 3], False),
        (False, [top(1), near, near, near, near], [1, 4, 4, 4], [1, 4, 4, 4, 3], True),
        (False, [top(1), top(1), near, near, near], [3, 1, 4, 4], [1], True),  # the bonus begins
        (True, [near, top(2), near, near, near], [4, 3, 4, 4], [4, 2], False),  # the bonus ends
    ]
    rule = RelaxedRule(
        torch.tensor([run[0] for run in runs], device=DEVICE),
        torch.full((len(runs),), 2, dtype=torch.int32, device=DEVICE),
        torch.full((len(runs),), 0.3, device=DEVICE),
        None,
        1,
        2,
    )
    case = Case(
        torch.tensor([row for run in runs for row in run[1]], device=DEVICE),
        torch.tensor([run[2] for run in runs], device=DEVICE),
        rule,
        {"num_contexts": 0, "max_draft_len": 4},
    )
    result, _ = case.relaxed()
    for g, (_, _, _, emitted, after) in enumerate(runs):
        assert_story(result.accepted, g, story.Run(emitted))
        assert bool(result.thinking[g]) == after
    assert_relaxed(case)


R46 = [
    pytest.param(batch, k, vocab, id=f"batch{batch}-k{k}-vocab{vocab}")
    for batch, k, vocab in [
        (0, 3, 127),
        (1, 0, 1),
        (1, 3, 2049),
        (1, 7, 1023),
        (3, 0, 1025),
        (5, 3, 1025),
        (7, 1, 3001),
    ]
]


@pytest.mark.parametrize(("batch", "k", "vocab"), R46)
def test_r46_counts_stay_within_the_run(batch: int, k: int, vocab: int) -> None:
    """Odd batches, padded drafts, rows without probability: 1..K+1 tokens where a row is alive."""
    for seed in range(2):
        case = make_case(seed, num_generations=batch, k=k, vocab=vocab, dtype=DTYPES[seed])
        case.drafts[:, k - 1 :] = -1
        fine = replace(case, logits=case.logits.masked_fill(dead_rows(case.logits), 0.25))
        for one in (case, fine):
            accepted, _ = one.strict()
            assert_same(accepted, one.strict(reference)[0])
            result, _ = one.relaxed()
            assert_relaxed(one)
            for given_back in (accepted, result.accepted):
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


def smooth_batch(requests: int, k: int, vocab: int, seed: int, dtype=torch.float32) -> Case:
    dice = torch.Generator().manual_seed(seed)
    logits = (1.5 * torch.randn(requests * (k + 1), vocab, generator=dice)).to(DEVICE, dtype)
    first = logits.float().topk(4, dim=1).indices.view(requests, k + 1, 4)[:, :k]
    rank = torch.randint(0, 4, (requests, k, 1), generator=dice).to(DEVICE)
    rule = RelaxedRule(
        thinking=(torch.rand(requests, generator=dice) < 0.8).to(DEVICE),
        topk=torch.full((requests,), 3, dtype=torch.int32, device=DEVICE),
        delta=torch.full((requests,), 0.2 if vocab < 100 else 2e-4, device=DEVICE),
        stop_ids=None,
        begin_token=5,
        end_token=6,
    )
    shape = {"num_contexts": 0, "max_draft_len": k}
    return Case(logits, first.gather(2, rank).squeeze(2).int(), rule, shape)


def test_few_rows_are_too_close_to_call() -> None:
    close, decided = assert_relaxed(smooth_batch(requests=130, k=3, vocab=17, seed=3))
    assert decided > 50
    assert close == 0  # 0.1 % of them


def test_top_one_and_no_distance_is_strict() -> None:
    case = make_case(4, num_contexts=1, num_generations=4, k=5, vocab=1025, smooth=True)
    ones, zeros = torch.ones_like(case.rule.topk), torch.zeros_like(case.rule.delta)
    case = replace(case, rule=replace(case.rule, topk=ones, delta=zeros))
    assert_same(case.relaxed()[0].accepted, case.strict()[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 7).t()}, "contiguous rows"),
        ({"logits": torch.zeros(7, 4, dtype=torch.int32)}, "logits: expected a floating"),
        ({"draft_tokens": torch.zeros(3)}, r"draft_tokens: expected G\*K = 4 ids, got 3"),
        ({"draft_lens": torch.zeros(3)}, r"draft_lens: expected shape \[2\], got \[3\]"),
    ],
    ids=["strides", "integers", "drafts", "lens"],
)
@pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])
def test_shapes_that_do_not_fit(change: dict[str, Any], message: str, relaxed: bool) -> None:
    arguments = {
        "logits": torch.zeros(7, 4),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.int32),
        "num_contexts": 1,
        "max_draft_len": 2,
        **change,
    }
    if relaxed:
        flags = torch.zeros(3, dtype=torch.bool)
        arguments["rule"] = RelaxedRule(flags, flags.int(), flags.float(), None, -1, -1)
    with pytest.raises(TensorContractError, match=message):
        (launch.accept_relaxed if relaxed else launch.accept_strict)(**arguments)


# --- on a device, with real shapes ---

REAL = [
    pytest.param(1, 3, 129280, id="1xk3"),
    pytest.param(5, 7, 151935, id="5xk7"),
    pytest.param(64, 0, 151935, id="64xk0"),
    pytest.param(128, 7, 129280, id="128xk7"),
    pytest.param(256, 3, 151935, id="256xk3"),
]


def real_case(batch: int, k: int, vocab: int, seed: int, dtype: torch.dtype) -> Case:
    """Smooth rows, some odd ones among them, ragged drafts."""
    case = smooth_batch(batch, k, vocab, seed, dtype)
    dice = torch.Generator().manual_seed(seed + 1)
    case.logits[1::37] = torch.nan
    case.logits[2::11, ::3] = -torch.inf
    case.logits[3::13, 7::4001] = torch.inf
    case.logits[4::9, 1::5] = torch.nan
    right = best_ids(case.logits).view(batch, k + 1)[:, :k].int()
    lucky = torch.rand(right.shape, generator=dice).to(DEVICE) < 0.6
    drafts = torch.where(lucky & (right < vocab), right, case.drafts)
    drafts.masked_fill_(torch.rand(right.shape, generator=dice).to(DEVICE) < 0.03, -1)
    lens = torch.randint(0, k + 1, (batch,), generator=dice, dtype=torch.int32).to(DEVICE)
    return replace(case, drafts=drafts, shape={**case.shape, "draft_lens": lens})


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k", "vocab"), REAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes(batch: int, k: int, vocab: int, dtype: torch.dtype) -> None:
    case = real_case(batch, k, vocab, 8, dtype)
    accepted, following = case.strict()
    expected, expected_following = case.strict(reference)
    assert_same(accepted, expected)
    assert torch.equal(following, expected_following)
    close, decided = assert_relaxed(case)
    if batch * k > 500:
        assert decided > 10
    assert close <= max(1, decided // 10)
    first = case.relaxed()[0]
    for _ in range(5):  # a race would show
        again = case.relaxed()[0]
        assert_same(again.accepted, first.accepted)
        assert same_bits(again.margin, first.margin)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    stride, k, batch, vocab = 2**29 + 24, 3, 2, 151935
    rows = batch * (k + 1)
    device_memory(12)
    near = real_case(batch, k, vocab, 2, torch.bfloat16)
    near.rule.thinking[:] = True
    buffer = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far = buffer.as_strided((rows, vocab), (stride, 1))
    far.copy_(near.logits)
    assert (rows - 1) * stride > 2**31
    case = replace(near, logits=far)
    assert_same(case.strict()[0], near.strict()[0])
    mine, same = case.relaxed()[0], near.relaxed()[0]
    assert_same(mine.accepted, same.accepted)
    assert same_bits(mine.margin, same.margin)
    assert_same(near.strict()[0], near.strict(reference)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])
@pytest.mark.parametrize(("batch", "k", "vocab"), [(1, 3, 129280), (256, 3, 151935)])
def test_in_a_cuda_graph(batch: int, k: int, vocab: int, relaxed: bool) -> None:
    """Captured once, replayed with other logits, drafts, lengths and phases."""
    mine = real_case(batch, k, vocab, 1, torch.bfloat16)
    last = poisoned(batch, 2, dtype=torch.int32)

    def step() -> Any:
        given_in = {**mine.shape, "last_tokens": last[:, 0]}
        if relaxed:
            return launch.accept_relaxed(mine.logits, mine.drafts, mine.rule, **given_in)
        return launch.accept_strict(mine.logits, mine.drafts, **given_in)

    graph, outputs = captured(step)
    for seed in (20, 30):
        other = real_case(batch, k, vocab, seed, torch.bfloat16)
        mine.logits.copy_(other.logits)
        mine.drafts.copy_(other.drafts)
        mine.shape["draft_lens"].copy_(other.shape["draft_lens"])
        mine.rule.thinking.copy_(other.rule.thinking)
        last.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        with read_back_forbidden():
            eager = step()
        expected, following = other.relaxed(reference) if relaxed else other.strict(reference)
        if relaxed:
            assert torch.equal(outputs.thinking, eager.thinking)
            assert same_bits(outputs.margin, eager.margin)
            sure = ~undecided(expected.margin, other.rule, 0)
            assert_same(outputs.accepted, expected.accepted, sure)
            assert torch.equal(outputs.thinking[sure], expected.thinking[sure])
        else:
            sure = torch.ones(batch, dtype=torch.bool, device=DEVICE)
            assert_same(outputs, expected)
        assert torch.equal(last[sure, 0], following[sure, 0])
        assert (last[:, 1] == POISON).all()


def test_stop_ids_may_be_a_slice_of_a_wider_table() -> None:
    """The kernel follows the row stride: a stop id stands only as top-1."""
    logits = torch.zeros(4, 8, device=DEVICE)
    logits[:, 5] = 1
    table = torch.tensor([[-1, 9, 9], [3, 9, 9]], dtype=torch.int32, device=DEVICE)
    rule = RelaxedRule(
        thinking=torch.ones(2, dtype=torch.bool, device=DEVICE),
        topk=torch.full((2,), 8, dtype=torch.int32, device=DEVICE),
        delta=torch.ones(2, device=DEVICE),
        stop_ids=table[:, :1],
        begin_token=-1,
        end_token=-1,
    )
    drafts = torch.tensor([[3], [3]], dtype=torch.int32, device=DEVICE)
    options = {"num_contexts": 0, "max_draft_len": 1}
    result = launch.accept_relaxed(logits, drafts, rule, **options)
    assert result.accepted.tokens.tolist() == [[3, 5], [5, -1]]
    told = reference.accept_relaxed(logits, drafts, rule, **options)
    assert torch.equal(result.accepted.tokens, told.accepted.tokens)


def test_wide_ids_outside_the_vocabulary_are_never_accepted() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[:, 5] = 1
    drafts = torch.tensor([[2**32 + 5]], device=DEVICE)
    accepted = launch.accept_strict(logits, drafts, num_contexts=0, max_draft_len=1)
    assert accepted.tokens.tolist() == [[5, -1]]

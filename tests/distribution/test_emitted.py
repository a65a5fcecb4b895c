"""R28: output follows the target distribution under every verification and draft method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.embedded.models import load_model
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.thinking import ThinkingEnd
from tests.distribution.chain import IN_FRONT, PROMPT_LEN, Language, Ways, texts
from tests.distribution.shares import probabilities, tail
from tests.hosts.embedded.oracles import Oracle

VOCAB, LENGTH, NUMBER = 6, 5, 5_000
LEAST_TAIL = 1e-4
"""The seeds are fixed."""

OPTIONS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.15},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
]
PAIRS = [
    ("coupled", "coupled"),
    ("coupled", "greedy"),
    ("rejection", "plain"),
    ("rejection", "greedy"),
    ("block", "plain"),
    ("block", "greedy"),
]
SAMPLED = [place for place, pair in enumerate(PAIRS) if pair[1] != "greedy"]
"""Pairs whose drafts are sampled."""
RESIDUAL = [pair for pair in PAIRS if pair[0] != "coupled"]


def least_tail(text: torch.Tensor, language: Language, options: Mapping[str, float]) -> float:
    """The smallest likelihood of: the first three tokens together, and every pair of tokens, at
    each position and at all; times the number of these tests."""
    following = [probabilities(row, **options) for row in language.target.tolist()]
    vocab, number = len(following), len(text)
    triples = itertools.product(range(vocab), repeat=3)
    joint = [
        number * math.prod(following[a][b] for a, b in itertools.pairwise((language.first, *three)))
        for three in triples
    ]
    places = (text[:, 0] * vocab + text[:, 1]) * vocab + text[:, 2]
    tails = [tail(torch.bincount(places, minlength=vocab**3).tolist(), joint)]
    before = torch.cat([torch.full((number, 1), language.first), text[:, :-1]], dim=1)
    pairs = [(before, text), *zip(before.T, text.T, strict=True)]
    for (source, sampled), token in itertools.product(pairs, range(vocab)):
        seen = torch.bincount(sampled[source == token], minlength=vocab).tolist()
        tails.append(tail(seen, [sum(seen) * share for share in following[token]]))
    return min(tails) * len(tails)


def check(
    language: Language,
    ways: list[Ways],
    *,
    draft_len: int,
    number: int = NUMBER,
    backend: Backend = Backend.TORCH,
    vocab_ids: torch.Tensor | None = None,
    absent: bool = False,
) -> torch.Tensor:
    """Decode and compare; returns the accepted drafts of the first step, [ways, number]."""
    text, num_accepted = texts(
        language,
        ways,
        number=number,
        draft_len=draft_len,
        length=LENGTH,
        seed=draft_len,
        backend=backend,
        vocab_ids=vocab_ids,
        absent=absent,
    )
    for way, mine in zip(ways, text.split(number), strict=True):
        assert least_tail(mine, language, way.options) > LEAST_TAIL, way
    return num_accepted.view(len(ways), number)


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_every_mode_r28(draft_len: int) -> None:
    """All of them in one batch, with other options at every length."""
    ways = [
        Ways(*pair, OPTIONS[(place + draft_len) % len(OPTIONS)]) for place, pair in enumerate(PAIRS)
    ]
    num_accepted = check(Language.of(draft_len, VOCAB), ways, draft_len=draft_len)
    for place in SAMPLED:  # many of them are accepted, not all
        assert 0.3 < (num_accepted[place] > 0).double().mean() < 0.97


def check_many(
    pairs: Sequence[tuple[str, str]], *, draft_len: int, number: int, **options: Any
) -> None:
    """Of each 80 thousand draws, in which all defects of `test_defects` are seen, of so many
    requests at a time."""
    ways, language = [Ways(*pair) for pair in pairs], Language.of(12, VOCAB, likeness=0.5)
    run = {"number": number, "draft_len": draft_len, "length": LENGTH, **options}
    batches = range(80_000 // (number * LENGTH))
    parts = [texts(language, ways, seed=seed, **run)[0].split(number) for seed in batches]
    for way, mine in zip(ways, zip(*parts, strict=True), strict=True):
        assert least_tail(torch.cat(mine), language, way.options) > LEAST_TAIL, way


@pytest.mark.thinned
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_many_draws_of_every_mode_r28(draft_len: int) -> None:
    # what a batch computes with stays in the processor's caches
    check_many([PAIRS[place] for place in SAMPLED], draft_len=draft_len, number=2_000)


def check_rejection(draft_len: int, column: int, **options: Any) -> None:
    """The drafter is the target itself, but for one place whose draft the target never says."""
    language = Language.of(7, VOCAB, likeness=1.0)
    target = language.target.clone()
    target[:, VOCAB - 1] = -math.inf
    never = torch.full((VOCAB,), -30.0)
    never[VOCAB - 1] = 0.0
    language = Language(target, target, drafts_at={column: never})
    ways = [Ways(*pair) for pair in PAIRS]
    num_accepted = check(language, ways, draft_len=draft_len, **options)
    assert num_accepted.max() == column
    assert (num_accepted[SAMPLED] == column).all()


PLACES = [(k, column) for k in (1, 2, 3, 4) for column in range(k)]
"""Draft lengths, and a place of each."""


@pytest.mark.thinned(cases=5)
@pytest.mark.parametrize(("draft_len", "column"), PLACES)
def test_rejection_at_every_place_r28(draft_len: int, column: int) -> None:
    check_rejection(draft_len, column, number=1500)


def check_absent(draft_len: int, **options: Any) -> None:
    """The token after the last present draft is a sample of the target."""
    ways = [Ways(*pair) for pair in PAIRS]
    language = Language.of(11, VOCAB, likeness=0.3)
    num_accepted = check(language, ways, draft_len=draft_len, absent=True, **options)
    for number in range(draft_len + 1):
        assert (num_accepted[SAMPLED] == number).any(dim=1).all()


@pytest.mark.thinned
@pytest.mark.parametrize("draft_len", [1, 3])
def test_absent_drafts_r28(draft_len: int) -> None:
    check_absent(draft_len)


def test_drafts_of_a_cut_vocabulary_r28() -> None:
    ids = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    ways = [Ways(*pair) for pair in RESIDUAL]
    num_accepted = check(Language.of(5, VOCAB), ways, draft_len=3, number=3000, vocab_ids=ids)
    assert (num_accepted[0] > 0).double().mean() > 0.3


def edited_tail(
    pair: tuple[str, str], *, number: int, backend: Backend = Backend.TORCH
) -> tuple[float, float]:
    """Of the first three tokens together, of requests that penalise what they emitted and add a
    bias; and the share of drafts accepted in the first step."""
    options = {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.7}
    bias = {1: 1.8, 3: -2.5}
    language = Language.of(3, 5, spread=1.0)
    ways = [Ways(*pair, options, logit_bias=bias)]
    run = {"number": number, "draft_len": 3, "length": 3}
    text, num_accepted = texts(language, ways, backend=backend, **run)
    expected = []
    for three in itertools.product(range(5), repeat=3):
        chance = 1.0
        for place, token in enumerate(three):
            before = three[:place]
            logits = language.target[(language.first, *three)[place]].tolist()
            row = [
                x + bias.get(other, 0.0) - 1.5 * before.count(other) - 0.7 * (other in before)
                for other, x in enumerate(logits)
            ]
            chance *= probabilities(row, 0.8)[token]
        expected.append(number * chance)
    places = (text[:, 0] * 5 + text[:, 1]) * 5 + text[:, 2]
    seen = torch.bincount(places, minlength=125).tolist()
    return tail(seen, expected), float(num_accepted.double().mean()) / 3


EDITED = {("coupled", "coupled"): 0.76, ("rejection", "plain"): 0.77, ("block", "plain"): 0.79}
"""Pairs whose drafts are sampled, and the smallest share of accepted drafts."""


@pytest.mark.parametrize("pair", EDITED, ids="-".join)
def test_bias_and_what_was_emitted_count_r28(pair: tuple[str, str]) -> None:
    """Of so many texts, as only those whose first draft fell read what was counted before."""
    least, share = edited_tail(pair, number=40_000 if pair in RESIDUAL else 10_000)
    assert least > LEAST_TAIL
    assert share > EDITED[pair]


def expected_row(
    language: Language, way: Ways, text: tuple[int, ...], end: ThinkingEnd | None = None
) -> list[float]:
    """Target distribution after a prompt and ``text``, with masks and a forced end of thinking."""
    history = (*IN_FRONT, language.first, *text)
    row = language.target[history[-1]].tolist()
    if end is not None and way.thinking_token_budget is not None:
        thought, place = end.progress_after(history, PROMPT_LEN, way.thinking_token_budget)
        if thought >= way.thinking_token_budget:
            return [float(token == end.end[place]) for token in range(len(row))]
    banned = {word[-1] for word in way.bad_words if history[1 - len(word) :] == word[:-1]}
    banned.update(way.stop_ids if len(text) < way.min_tokens else ())
    row = [-math.inf if token in banned else x for token, x in enumerate(row)]
    return probabilities(row, **way.options)


def expected_tail(
    sampled: torch.Tensor, language: Language, way: Ways, end: ThinkingEnd | None = None
) -> float:
    """The smallest likelihood of: all samples [number, length] together, and every two positions;
    times the number of these tests."""
    number, length = sampled.shape
    vocab = len(language.target)
    shares = {(): 1.0}
    for _ in range(length):
        shares = {
            (*text, token): share * following
            for text, share in shares.items()
            for token, following in enumerate(expected_row(language, way, text, end))
        }
    expected = torch.tensor(list(shares.values())).view([vocab] * length) * number
    which = torch.zeros(number, dtype=torch.int64)
    for column in sampled.T:
        which = which * vocab + column
    seen = torch.bincount(which, minlength=vocab**length).view([vocab] * length)
    tails = [tail(seen.flatten().tolist(), expected.flatten().tolist())]
    for pair in itertools.combinations(range(length), 2):
        others = [place for place in range(length) if place not in pair]
        counts, means = (table.sum(others).flatten().tolist() for table in (seen, expected))
        tails.append(tail(counts, means))
    return min(tails) * len(tails)


BANS: dict[str, Any] = {
    # words that the prompt begins, 2 1 0, or drafts do
    "bad_words": ((0, 3), (1, 0, 4), (1, 0, 2, 3), (0, 1, 2), (3, 3), (4, 2, 1), (1, 4)),
    "stop_ids": (1,),
    "min_tokens": 3,
}


def ban_tails(
    pairs: Sequence[tuple[str, str]],
    *,
    draft_len: int,
    number: int = 1500,
    backend: Backend = Backend.TORCH,
) -> tuple[list[float], torch.Tensor]:
    """Likelihood of the output of requests with masked tokens, and their first accepted drafts."""
    language = Language.of(21, 5)
    ways = [Ways(*pair, {"temperature": 1.1}, **BANS) for pair in pairs]
    run = {"number": number, "draft_len": draft_len, "length": 4}
    text, num_accepted = texts(language, ways, backend=backend, **run)
    parts = zip(text.split(number), ways, strict=True)
    return [expected_tail(mine, language, way) for mine, way in parts], num_accepted.view(
        len(ways), -1
    )


@pytest.mark.thinned
@pytest.mark.parametrize("draft_len", [1, 2, 3])
def test_bans_that_drafts_see_r28(draft_len: int) -> None:
    """Bad words begin in the prompt and in drafts, and a stop id is held back within the run."""
    tails, num_accepted = ban_tails(PAIRS, draft_len=draft_len)
    assert min(tails) > LEAST_TAIL, tails
    assert (num_accepted[SAMPLED] > 0).double().mean() > 0.5


END = ThinkingEnd(begin=0, end=(2, 3))


def budget_tails(
    pairs: Sequence[tuple[str, str]],
    *,
    draft_len: int,
    number: int,
    backend: Backend = Backend.TORCH,
) -> list[float]:
    """How likely is what requests emit whose thinking begins with the prompt's last token."""
    language = Language.of(31, 4)
    ways = [
        Ways(*pair, {"temperature": 0.9}, thinking_token_budget=place % 2)
        for place, pair in enumerate(pairs)
    ]
    run = {"number": number, "draft_len": draft_len, "length": 5}
    text, _ = texts(language, ways, thinking_end=END, backend=backend, **run)
    parts = zip(text.split(number), ways, strict=True)
    return [expected_tail(mine, language, way, END) for mine, way in parts]


@pytest.mark.thinned
@pytest.mark.parametrize("draft_len", [1, 2, 3])
def test_ends_that_are_forced_r28(draft_len: int) -> None:
    """Ends of thinking within a run: tokens before and after them are verified as usual."""
    tails = budget_tails([*PAIRS, *RESIDUAL[::-1]], draft_len=draft_len, number=2500)
    assert min(tails) > LEAST_TAIL, tails


def test_rows_of_a_model_r28() -> None:
    """Total variation between what is emitted and the rows that predict it, which a model computes
    for three prompts; drafts are sampled from the rows of two of them, mixed."""
    checkpoint = Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint"
    oracle = Oracle(load_model(str(checkpoint), num_mtp_layers=1), 1, vanilla=False)
    prompts = [[11, 42, 7, 300, 5, 90], [11, 42, 8, 300, 5, 91], [60, 9, 250, 31]]
    rows = torch.stack(
        [
            oracle.model.lm_head(oracle.states(tuple(prompt))[-1]).float().detach().flatten()
            for prompt in prompts
        ]
    )
    # of the others nothing is left to be counted
    likely = rows.log_softmax(dim=1).amax(dim=0).topk(40).indices.sort().values
    rows = rows[:, likely]
    vocab, number = len(likely), 3000
    next_row = torch.empty(vocab, dtype=torch.int64)
    # likely ids are followed by other rows, so that each is sampled often
    next_row[rows[0].argsort(descending=True)] = (torch.arange(vocab) + 1) % len(rows)
    mixed = 0.6 * rows + 0.4 * rows.roll(1, dims=0)
    language = Language(rows[next_row], mixed[next_row])
    options = {"temperature": 0.9, "top_p": 0.95}
    ways = [Ways(*pair, options) for pair in PAIRS]
    text, num_accepted = texts(language, ways, number=number, draft_len=2, length=4)
    some = (num_accepted > 0).view(len(ways), number).double().mean(dim=1)[SAMPLED]
    assert ((some > 0.3) & (some < 0.97)).all()
    for way, mine in zip(ways, text.split(number), strict=True):
        before = torch.cat([torch.full((number, 1), language.first), mine[:, :-1]], dim=1)
        for place, row in enumerate(rows.tolist()):
            sampled = mine[next_row[before] == place]
            expected = torch.tensor(probabilities(row, **options))
            noise = (expected * (1 - expected) / len(sampled)).sqrt().sum()
            seen = torch.bincount(sampled, minlength=vocab) / len(sampled)
            # chance gives 0.4 of it
            assert (seen - expected).abs().sum() / 2 < noise * 0.6, (way, place)


@pytest.mark.thinned(cases=2)
@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_every_mode_of_the_kernels_r28(draft_len: int) -> None:
    ways = [
        Ways(*pair, OPTIONS[(place + draft_len) % len(OPTIONS)]) for place, pair in enumerate(PAIRS)
    ]
    check(Language.of(draft_len, VOCAB), ways, draft_len=draft_len, backend=Backend.TRITON)


@pytest.mark.thinned
@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_many_draws_of_the_kernels_r28(draft_len: int) -> None:
    """Greedy drafts too."""
    check_many(PAIRS, draft_len=draft_len, number=4_000, backend=Backend.TRITON)


@pytest.mark.thinned(cases=3)
@pytest.mark.gpu
@pytest.mark.parametrize(("draft_len", "column"), PLACES)
def test_rejection_at_every_place_of_the_kernels_r28(draft_len: int, column: int) -> None:
    check_rejection(draft_len, column, number=4000, backend=Backend.TRITON)


@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 3])
def test_absent_drafts_of_the_kernels_r28(draft_len: int) -> None:
    check_absent(draft_len, backend=Backend.TRITON)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", EDITED, ids="-".join)
def test_bias_and_what_was_emitted_count_in_kernels_r28(pair: tuple[str, str]) -> None:
    least, share = edited_tail(pair, number=40_000, backend=Backend.TRITON)
    assert least > LEAST_TAIL
    assert share > EDITED[pair]


@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 3])
def test_bans_that_drafts_of_the_kernels_see_r28(draft_len: int) -> None:
    tails, num_accepted = ban_tails(PAIRS, draft_len=draft_len, number=5000, backend=Backend.TRITON)
    assert min(tails) > LEAST_TAIL, tails
    assert (num_accepted[SAMPLED] > 0).double().mean() > 0.5


@pytest.mark.thinned(cases=2)
@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_ends_that_kernels_force_r28(draft_len: int) -> None:
    run: dict[str, Any] = {"number": 2500, "backend": Backend.TRITON}
    assert min(budget_tails([*PAIRS, *RESIDUAL[::-1]], draft_len=draft_len, **run)) > LEAST_TAIL


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize("pair", RESIDUAL, ids="-".join)
def test_draft_rows_without_any_value(pair: tuple[str, str]) -> None:
    """The placeholder token of such a draft was not sampled and is never accepted."""
    full = Language.of(5, VOCAB)
    dead = Language(full.target, full.drafter, drafts_at={0: torch.full((VOCAB,), float("-inf"))})
    run = {"draft_len": 1, "length": 2}
    text, num_accepted = texts(dead, [Ways(*pair)], number=4 * NUMBER, **run)
    probs = torch.softmax(full.target[full.first], 0)
    seen = torch.bincount(text[:, 0], minlength=VOCAB).tolist()
    assert tail(seen, [len(text) * share for share in probs.tolist()]) > LEAST_TAIL
    if pair[1] == "plain":
        assert not num_accepted.any()
    mine, _ = texts(dead, [Ways(*pair)], number=40, backend=Backend.TRITON, **run)
    same, _ = texts(dead, [Ways(*pair)], number=40, **run)
    assert torch.equal(mine, same)

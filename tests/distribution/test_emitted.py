"""R28: whatever judges and draws the drafts, what is emitted is distributed as the target says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mtp_plugin.executor.models import load_model
from mtp_plugin.kernels.backend import Backend
from tests.distribution.chain import Language, Ways, texts
from tests.distribution.shares import probabilities, tail
from tests.executor.oracles import Oracle

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
RESIDUAL = [pair for pair in PAIRS if pair[0] != "coupled"]


def least_tail(text: torch.Tensor, language: Language, options: Mapping[str, float]) -> float:
    """The least likely of: the first three tokens together, and every token behind every other, at
    each place and at all; times how many these are."""
    behind = [probabilities(row, **options) for row in language.target.tolist()]
    vocab, number = len(behind), len(text)
    triples = itertools.product(range(vocab), repeat=3)
    joint = [
        number * math.prod(behind[a][b] for a, b in itertools.pairwise((language.first, *three)))
        for three in triples
    ]
    places = (text[:, 0] * vocab + text[:, 1]) * vocab + text[:, 2]
    tails = [tail(torch.bincount(places, minlength=vocab**3).tolist(), joint)]
    before = torch.cat([torch.full((number, 1), language.first), text[:, :-1]], dim=1)
    pairs = [(before, text), *zip(before.T, text.T, strict=True)]
    for (source, drawn), token in itertools.product(pairs, range(vocab)):
        seen = torch.bincount(drawn[source == token], minlength=vocab).tolist()
        tails.append(tail(seen, [sum(seen) * share for share in behind[token]]))
    return min(tails) * len(tails)


def check(
    language: Language,
    ways: list[Ways],
    *,
    draft_len: int,
    number: int = NUMBER,
    backend: Backend = Backend.TORCH,
    vocab_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode and compare; what stood in the first step, [ways, number]."""
    text, stood = texts(
        language,
        ways,
        number=number,
        draft_len=draft_len,
        length=LENGTH,
        seed=draft_len,
        backend=backend,
        vocab_ids=vocab_ids,
    )
    for way, mine in zip(ways, text.split(number), strict=True):
        assert least_tail(mine, language, way.options) > LEAST_TAIL, way
    return stood.view(len(ways), number)


@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_every_mode_r28(draft_len: int) -> None:
    """All of them in one batch, with other options at every length."""
    ways = [
        Ways(*pair, OPTIONS[(place + draft_len) % len(OPTIONS)]) for place, pair in enumerate(PAIRS)
    ]
    stood = check(Language.of(draft_len, VOCAB), ways, draft_len=draft_len)
    for place in (0, 2, 4):  # of drafts that are drawn many stand, not all
        assert 0.3 < (stood[place] > 0).double().mean() < 0.97


@pytest.mark.parametrize("column", [0, 1, 2])
def test_rejection_at_every_place_r28(column: int) -> None:
    """The drafter is the target itself, but for one place whose draft the target never says."""
    language = Language.of(7, VOCAB, likeness=1.0)
    target = language.target.clone()
    target[:, VOCAB - 1] = -math.inf
    never = torch.full((VOCAB,), -30.0)
    never[VOCAB - 1] = 0.0
    language = Language(target, target, drafts_at={column: never})
    stood = check(language, [Ways(*pair) for pair in RESIDUAL], draft_len=3, number=3000)
    assert stood.max() == column
    assert (stood[0] == column).all()
    assert (stood[2] == column).all()


def test_drafts_of_a_cut_vocabulary_r28() -> None:
    ids = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    ways = [Ways(*pair) for pair in RESIDUAL]
    stood = check(Language.of(5, VOCAB), ways, draft_len=3, number=3000, vocab_ids=ids)
    assert (stood[0] > 0).double().mean() > 0.3


def penalised_tail(pair: tuple[str, str], *, number: int) -> float:
    """Of the first three tokens together, of requests that penalise what they emitted."""
    options = {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.7}
    language = Language.of(3, 5, spread=1.0)
    text, _ = texts(language, [Ways(*pair, options)], number=number, draft_len=3, length=3)
    expected = []
    for three in itertools.product(range(5), repeat=3):
        chance = 1.0
        for place, token in enumerate(three):
            before = three[:place]
            row = [
                x - 1.5 * before.count(other) - 0.7 * (other in before)
                for other, x in enumerate(language.target[(language.first, *three)[place]].tolist())
            ]
            chance *= probabilities(row, 0.8)[token]
        expected.append(number * chance)
    places = (text[:, 0] * 5 + text[:, 1]) * 5 + text[:, 2]
    return tail(torch.bincount(places, minlength=125).tolist(), expected)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] != "greedy"])
def test_penalties_count_what_was_emitted_r28(pair: tuple[str, str]) -> None:
    assert penalised_tail(pair, number=5000) > LEAST_TAIL


@pytest.mark.parametrize("pair", [pair for pair in RESIDUAL if pair[1] == "plain"])
def test_rows_of_a_model_r28(pair: tuple[str, str]) -> None:
    """Total variation between what is emitted behind a prompt and the row that predicts it, drafted
    from rows that another prompt leaves."""
    checkpoint = Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint"
    oracle = Oracle(load_model(str(checkpoint), num_mtp_layers=1), 1, vanilla=False)
    prompts = [[11, 42, 7, 300, 5, 90], [11, 42, 8, 300, 5, 91]]
    row, other = (
        oracle.model.lm_head(oracle.states(tuple(prompt))[-1]).float().detach().flatten()
        for prompt in prompts
    )
    likely = row.topk(40).indices.sort().values  # of the others nothing is left to be counted
    row, other = row[likely], other[likely]
    vocab, number = len(likely), 8000
    language = Language(row.expand(vocab, -1), (0.6 * row + 0.4 * other).expand(vocab, -1))
    way = Ways(*pair, {"temperature": 0.9, "top_p": 0.95})
    text, stood = texts(language, [way], number=number, draft_len=2, length=2)
    assert 0.3 < (stood > 0).double().mean() < 0.99
    expected = torch.tensor(probabilities(row.tolist(), **way.options))
    noise = (expected * (1 - expected) / number).sqrt().sum()  # over twice what chance gives
    for place in range(2):
        seen = torch.bincount(text[:, place], minlength=vocab) / number
        assert (seen - expected).abs().sum() / 2 < noise * 0.6


@pytest.mark.gpu
@pytest.mark.parametrize("draft_len", [1, 2, 3, 4])
def test_every_mode_of_the_kernels_r28(draft_len: int) -> None:
    ways = [
        Ways(*pair, OPTIONS[(place + draft_len) % len(OPTIONS)]) for place, pair in enumerate(PAIRS)
    ]
    check(Language.of(draft_len, VOCAB), ways, draft_len=draft_len, backend=Backend.TRITON)


@pytest.mark.parametrize("pair", RESIDUAL, ids="-".join)
def test_draft_rows_without_any_value(pair: tuple[str, str]) -> None:
    """The token that stands in place of such a draft was never drawn: no odds may let it stand."""
    full = Language.of(5, VOCAB)
    dead = Language(full.target, full.drafter, drafts_at={0: torch.full((VOCAB,), float("-inf"))})
    run = {"draft_len": 1, "length": 2}
    text, stood = texts(dead, [Ways(*pair)], number=4 * NUMBER, **run)
    behind = torch.softmax(full.target[full.first], 0)
    seen = torch.bincount(text[:, 0], minlength=VOCAB).tolist()
    assert tail(seen, [len(text) * share for share in behind.tolist()]) > LEAST_TAIL
    if pair[1] == "plain":
        assert not stood.any()
    mine, _ = texts(dead, [Ways(*pair)], number=40, backend=Backend.TRITON, **run)
    same, _ = texts(dead, [Ways(*pair)], number=40, **run)
    assert torch.equal(mine, same)

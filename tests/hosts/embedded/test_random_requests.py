"""Random requests with any options: every way to run gives each the target's own text.

Each of 300 requests runs in two of sixteen ways (K = 0 to 3, worker, loop), on random weights and
on the trained tiny model. Half of the ways have a cache so small that requests are paused, the
others let sequences be short; their steps run in padded graphs. Vanilla workers
report processed log-probabilities. Tokens, text, finish reason and log-probabilities are those of
plain decoding, request by request, seed by seed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.hosts.embedded.outputs import FINISH_REASONS
from mtp_plugin.infer import Continuation, Decoded, Thinking, decode
from mtp_plugin.infer.noise import Role, gumbel
from mtp_plugin.requests.states import FinishReason
from tests import near_ties
from tests.hosts.embedded.conftest import VOCAB, assert_drained
from tests.hosts.embedded.replays import WatchedGraphs

NUM_REQUESTS = 300
BEGIN, END = 5, 6
MARGIN = 1e-5
"""Of noisy scores: a nearer choice may fall either way."""
MOST_TIES = 2
ROUNDING = 2e-5
"""Of a logit, on any device."""
TRAINED = Path(__file__).parents[3] / "integration" / "tiny_model"
WAYS = [(k, vanilla, overlap) for k in range(4) for vanilla in (0, 1) for overlap in (0, 1)]
MODES = ("coupled", "rejection", "block")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORT = 30
"""Tokens of a sequence at most, where that ends some."""
TEMPERATURES = (None, None, 0, 1e-3, 0.6, 0.7, 1.0, 1.3)


@dataclass(frozen=True)
class Language:
    """What requests to a checkpoint are made of."""

    eos: int
    ids: tuple[int, ...]
    """Most of them more than once: those of texts."""

    def prompt(self, rng: random.Random) -> list[int]:
        """Adjacent ids, with the begin of thinking here and there."""
        length = rng.choice((1, 2, 4, 7, 12, 25))
        first = rng.randrange(len(self.ids) - length)
        return list(self.ids[first : first + length])

    def some(self, rng: random.Random, most: int) -> list[int]:
        """Different ids."""
        return list(dict.fromkeys(rng.choices(self.ids, k=rng.randint(1, most))))


def random_language() -> Language:
    """Of random weights any ids are as good as others."""
    rng = random.Random(19)
    return Language(1, tuple(rng.randrange(2, VOCAB) for _ in range(4000)))


def trained_language() -> Language:
    """Python's own library, but for the ids of the two tags here."""
    prompts = [item["prompt"] for item in json.loads((TRAINED / "prompts.json").read_text())]
    text = AutoTokenizer.from_pretrained(TRAINED / "checkpoint").encode("\n".join(prompts))
    return Language(0, tuple(token for token in text if token not in (BEGIN, END)))


LANGUAGES = {"random": random_language, "trained": trained_language}


@cache
def language(name: str) -> Language:
    return LANGUAGES[name]()


def prompt_of(rng: random.Random, spoken: Language) -> list[int]:
    prompt = spoken.prompt(rng)
    if rng.random() < 0.3:
        prompt.insert(rng.randrange(len(prompt) + 1), BEGIN)
    return prompt


def params_of(rng: random.Random, prompt: list[int], spoken: Language) -> SamplingParams:
    """Each option of most kinds for a fifth of the requests."""

    def some(share: float = 0.2) -> bool:
        return rng.random() < share

    requested: dict = {
        "max_new_tokens": rng.choice((1, 2, 5, 12, 20)),
        "temperature": rng.choice(TEMPERATURES),
        "ignore_eos": some(0.5),
    }
    if some(0.3):
        requested["top_k"] = rng.choice((0, 1, 2, 5, 50))
    if some(0.3):
        requested["top_p"] = rng.choice((1.0, 0.95, 0.9, 0.5))
    if some():
        requested["min_p"] = rng.choice((0.0, 0.05, 0.3))
    if some(0.7):
        requested["seed"] = rng.choice((rng.getrandbits(64), -rng.getrandbits(60), 0))
    if some():
        requested["repetition_penalty"] = rng.choice((0.8, 1.1, 1.5))
    if some():
        requested["presence_penalty"] = rng.choice((-0.5, 0.4, 1.0))
    if some():
        requested["frequency_penalty"] = rng.choice((-0.1, 0.3, 0.9))
        requested["prompt_ignore_length"] = rng.choice((0, 2, 100))
    if some():
        requested["logit_bias"] = {token: rng.uniform(-3, 3) for token in spoken.some(rng, 20)}
    if some(0.15):
        requested["allowed_token_ids"] = [*spoken.some(rng, 60), spoken.eos, BEGIN, END]
    if some():
        requested["bad_words"] = [
            rng.choices(prompt + spoken.some(rng, 3), k=rng.choice((1, 2, 3))) for _ in range(8)
        ]
    if some():
        requested["bad_token_ids"] = spoken.some(rng, 9)
    if some():
        requested["min_tokens"] = rng.randint(1, requested["max_new_tokens"])
    if some(0.4):
        requested["stop_token_ids"] = spoken.some(rng, 25)
    if some():
        requested["stop"] = ["".join(rng.choices(LETTERS, k=rng.randint(1, 2))) for _ in range(3)]
        requested["include_stop_str_in_output"] = some(0.5)
    if some():
        requested["logprobs"] = rng.choice((0, 1, 5))
    if some(0.1):
        requested["prompt_logprobs"] = rng.choice((0, 2))
    if some():
        requested["thinking_token_budget"] = rng.choice((0, 1, 4))
    if some():
        requested["max_draft_len"] = rng.choice((0, 1, 2))
    if some(0.1):
        requested["speculate"] = False
    if some():
        requested["draft_sampling"] = rng.choice(("coupled", "greedy"))
    elif some():
        # greedy texts are the target's own whatever verifies their drafts
        is_greedy = SamplingParams(**requested).is_greedy
        requested["verification"] = rng.choice(MODES) if is_greedy else "coupled"
    return SamplingParams(**requested)


@cache
def requests(name: str) -> list[tuple[list[int], SamplingParams]]:
    rng, spoken = random.Random(20), language(name)
    made = []
    for _ in range(NUM_REQUESTS):
        prompt = prompt_of(rng, spoken)
        made.append((prompt, params_of(rng, prompt, spoken)))
    return made


def ways() -> dict[int, list[int]]:
    """Of every way the requests that run so."""
    rng = random.Random(21)
    taken: dict[int, list[int]] = {way: [] for way in range(len(WAYS))}
    for number in range(NUM_REQUESTS):
        for way in rng.sample(range(len(WAYS)), 2):
            taken[way].append(number)
    return taken


def is_tight(way: int) -> bool:
    """Whether it has a small cache."""
    return sum(WAYS[way]) % 2 == 1


THINKING = Thinking(BEGIN, (END,), END)


class Plain:
    """What plain decoding says of each request; those without a seed by their number."""

    def __init__(self, harness, name: str) -> None:
        self.model, self.name = harness.oracle_model.target, name
        self.ends = (language(name).eos,)
        self.ties: list[str] = []
        self.decoded = lru_cache(maxsize=None)(self._decode)

    def _decode(self, number: int, place: int, max_seq_len: int, mode: str) -> Decoded:
        prompt, params = requests(self.name)[number]
        return decode(
            self.model,
            prompt,
            params,
            number=place,
            end_ids=self.ends,
            thinking=THINKING,
            max_seq_len=max_seq_len,
            tokenizer=TAGS,
            logprobs_mode=mode,
        )

    def of(self, number: int, place: int, max_seq_len: int, mode: str) -> Decoded:
        """Of a request that its engine got as the ``place``-th."""
        params = requests(self.name)[number][1]
        place = place if params.seed is None else 0
        return self.decoded(number, place, max_seq_len, "raw" if params.logprobs is None else mode)


@pytest.fixture(scope="module")
def plain_of():
    made: dict[str, Plain] = {}

    def give(harness, name: str) -> Plain:
        if name not in made:
            made[name] = Plain(harness, name)
        return made[name]

    return give


@pytest.fixture
def one_of(request: pytest.FixtureRequest, way: int) -> int:
    """One of so many requests runs; a small cache needs many of them to pause some."""
    if "full" in request.config.option.markexpr:
        return 1
    return 2 if is_tight(way) else 8


def cases() -> list:
    """All ways of the random model, and those of the trained one with K = 3; the others are
    ``full``."""
    return [
        pytest.param(
            way,
            name,
            marks=() if name == "random" or k == 3 else pytest.mark.full,
            id=f"k{k}-vanilla{vanilla}-overlap{overlap}-{name}",
        )
        for way, (k, vanilla, overlap) in enumerate(WAYS)
        for name in LANGUAGES
    ]


@pytest.mark.parametrize(("way", "name"), cases())
def test_random_requests(harness, trained_harness, plain_of, way, name, one_of, monkeypatch):
    k, vanilla, overlap = WAYS[way]
    harness = trained_harness() if name == "trained" else harness
    numbers, plain = ways()[way][::one_of], plain_of(harness, name)
    prompts = [requests(name)[number][0] for number in numbers]
    params = [requests(name)[number][1] for number in numbers]
    if not k:  # where no drafts are verified
        params = [replace(one, verification=None, draft_sampling=None) for one in params]
    max_seq_len = 128 if is_tight(way) else SHORT
    options: dict = {"kv_cache_config": {"max_tokens": 64}} if is_tight(way) else {}
    mode = "processed" if k and vanilla else "raw"
    has_graphs = not is_tight(way)
    if k:
        options["speculative"] = {
            "begin_thinking_phase_token": BEGIN,
            "end_thinking_phase_token": END,
        }
        options["mtp"] = {"verification": list(MODES), "logprobs_mode": mode}
    if has_graphs:
        graphs = {"batch_sizes": [1, 8], "enable_padding": True, "capture": "all"}
        options["cuda_graph_config"] = {**graphs, "prompt_tokens": []}
    llm = harness.llm(
        k=k,
        vanilla=bool(vanilla),
        disable_overlap_scheduler=not overlap,
        max_num_tokens=40,
        max_seq_len=max_seq_len,
        tokenizer=TAGS,
        kv_fill=float("nan"),
        **options,
    )
    watched = WatchedGraphs(llm, monkeypatch) if has_graphs else None
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    assert watched is None or watched.replayed
    if is_tight(way):
        assert llm.executor.num_preemptions > 0
    before = len(plain.ties)
    for place, (number, output) in enumerate(zip(numbers, outputs, strict=True)):
        expected = plain.of(number, place, max_seq_len, mode)
        if output.token_ids != expected.token_ids:
            plain.ties.append(tie_of(plain, number, place, expected, output.token_ids))
            continue
        assert output.finish_reason == FINISH_REASONS[expected.finish_reason], number
        assert output.text == expected.text, number
        ending = ending_of(*requests(name)[number], plain.ends, output.token_ids, max_seq_len)
        assert ending is not None
        length, reason, text = ending
        assert (length, FINISH_REASONS[reason], text) == (
            len(output.token_ids),
            output.finish_reason,
            output.text,
        ), number
        # a low temperature magnifies the rounding of logits
        away = 1e-4 + (ROUNDING / (params[place].temperature or 1) if mode == "processed" else 0)
        same_logprobs(expected.token_ids, output.logprobs, expected.logprobs, away)
        same_logprobs(prompts[place], output.prompt_logprobs, expected.prompt_logprobs)
    near_ties.count("texts of random requests", len(plain.ties) - before, len(numbers))
    assert len(plain.ties) <= MOST_TIES, plain.ties


def ending_of(
    prompt: list[int],
    params: SamplingParams,
    ends: tuple[int, ...],
    tokens: list[int],
    max_seq_len: int,
) -> tuple[int, FinishReason, str] | None:
    """Where a text ends, by what, and what it reads: looked up in the whole of it, a letter a
    token; None: it does not."""
    letters = "".join(LETTERS[token % len(LETTERS)] for token in tokens)
    end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    for count, token in enumerate(tokens, 1):
        may_end = count > params.min_tokens
        text = letters[:count]
        found = max((len(one) for one in params.stop if text.endswith(one)), default=0)
        if may_end and (found or token in end_ids):
            reason = FinishReason.END_ID if token in end_ids else FinishReason.STOP_WORDS
            is_shown = params.include_stop_str_in_output
            return count, reason, text if is_shown else text[: count - found]
        if count == params.max_new_tokens or len(prompt) + count == max_seq_len:
            return count, FinishReason.LENGTH, text
    return None


class Tags:
    """A letter per token; it knows the two tags too, for where no config can name them."""

    def encode(self, text, add_special_tokens=True):  # noqa: ARG002
        return {"<think>": [BEGIN], "</think>": [END]}.get(text, [2, 3])

    def decode(self, ids, skip_special_tokens=True):  # noqa: ARG002
        return "".join(LETTERS[token % len(LETTERS)] for token in ids)


TAGS = Tags()


def tie_of(plain: Plain, number: int, place: int, expected: Decoded, token_ids: list[int]) -> str:
    """The first difference, which must be one of rounding."""
    prompt, params = requests(plain.name)[number]
    pairs = zip(expected.token_ids, token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert first is not None, (number, expected, token_ids)
    text = Continuation(prompt, params, number=place, end_ids=plain.ends, thinking=THINKING)
    before = expected.token_ids[:first]
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *before]])
        logits = plain.model(input_ids=ids).logits[0, -1]
    scores = text.rule.scores(logits, before)
    if not text.rule.is_greedy:
        index = len(prompt) + first
        scores = scores + gumbel(text.rule.seed, index, len(scores), Role.TARGET)
    gap = float(scores.max() - scores[token_ids[first]])
    assert gap < MARGIN, (number, params, expected.token_ids, token_ids, gap)
    return f"request {number}: {gap:.1e}"


def same_logprobs(token_ids, actual, expected, away: float = 1e-4) -> None:
    """As many entries, of the same ids, and values at most so far apart."""
    if expected is None:
        assert actual is None
        return
    assert len(actual) == len(expected) == len(token_ids)
    for token, one, other in zip(token_ids, actual, expected, strict=True):
        if other is None:
            assert one is None
            continue
        reported = {token: other.logprob, **other.top}
        assert {id_: one[id_].logprob for id_ in reported} == pytest.approx(
            reported, abs=away, rel=0
        )
        assert set(one) == set(reported)

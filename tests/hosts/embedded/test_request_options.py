"""What a request may ask for of the embedded executor: words, drafts, stop strings, seeds."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mtp_plugin.errors import ConfigError, RequestError
from mtp_plugin.hosts.embedded import LLM, LlmRequest, SamplingParams
from mtp_plugin.hosts.embedded.admission import Admission
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.infer import decode
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.plugin.contract import any_text, no_refusals
from tests.hosts.embedded.conftest import VOCAB, WORKERS, assert_drained

COUNT = 16


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": COUNT, "ignore_eos": True, **options})


# --- words as ids ---


class Words:
    """Ids of words with and without a space before them; "@" is longer after one."""

    def __init__(self) -> None:
        self.ids = {"a": [3], " a": [4], "bc": [5, 6], " bc": [5, 7], "big": [99]}
        self.ids |= {"@": [8], " @": [9, 8]}
        self.ids |= {"\n": [40], "\na": [40, 3], " \na": [43, 40, 3], "  ": [41], "   ": [42]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        special = [1] if add_special_tokens else []
        if text.strip() == "long":
            return special + [2] * 17
        if text.strip().isdecimal():
            return [*special, 10 + 2 * int(text) + text.startswith(" ")]
        return special + self.ids.get(text, [])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return " ".join(map(str, token_ids))


def admission(*, tokenizer: Any = None, vocab_size: int = 90) -> Admission:
    """Where every option is given."""
    pieces = SimpleNamespace(
        served_options=frozenset(OPTIONS),
        refusals=no_refusals,
        plan=SimpleNamespace(max_draft_len=3),
        label=None,
        changes_text=any_text,
    )
    facts = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=(2,))
    executor = SimpleNamespace(check_fits=lambda _: None)
    return Admission(executor, facts, pieces, tokenizer=tokenizer, max_seq_len=64)  # type: ignore[arg-type]


def admitted(**options: Any) -> LlmRequest:
    return admission(tokenizer=Words()).make_requests([1, 2], SamplingParams(**options))[0]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["a"], ((3,), (4,))),
        ([" a"], ((3,), (4,))),  # as vLLM reads it: a space in front says nothing
        (["bc"], ((5, 6),)),  # after a space it begins with the same id
        (["@"], ((8,),)),  # and here it is longer
        (["\na"], ((40, 3),)),  # what else is white is part of the word
        (["\n", "  "], ((40,), (41,))),
        (["a", [30, 31], "bc"], ((3,), (4,), (30, 31), (5, 6))),
        (["a", "a", [3], [3]], ((3,), (4,))),
        ([[30, 31]], ((30, 31),)),
    ],
    ids=str,
)
def test_bad_words_become_ids(words: list[Any], ids: tuple[tuple[int, ...], ...]) -> None:
    request = admitted(bad_words=words, top_k=4)
    assert request.params.bad_words == request.facts.options["bad_words"] == ids
    assert (request.params.top_k, request.facts.options["top_k"]) == (4, 4)
    assert request.sampling_kind


class Wrong(NamedTuple):
    options: dict[str, Any]
    reasons: str
    tokenizer: Any = Words()


NUMBERS = [str(n) for n in range(33)]
OUTSIDE = "is outside the vocabulary of 90"
WRONG = [
    Wrong({"bad_words": ["a"]}, "bad_words='a' (the checkpoint has no tokenizer.json)", None),
    Wrong({"bad_words": ["?"]}, "bad_words='?' (it has no tokens)"),
    Wrong({"bad_words": ["    "]}, "bad_words='    ' (it has no tokens)"),
    Wrong({"bad_words": ["\ud800"]}, "bad_words='\\ud800' (it is no valid Unicode text)"),
    Wrong(
        {"bad_words": ["long"]},
        "bad_words='long' (at most 16 tokens of a word are served, got 17)",
    ),
    Wrong(
        {"bad_words": NUMBERS},
        "bad_words and bad_token_ids: at most 64 are served, got 66, as a string also counts with "
        "a leading space",
    ),
    Wrong(
        {"bad_words": NUMBERS[:31], "bad_token_ids": [1, 2, 3]},
        "bad_words and bad_token_ids: at most 64 are served, got 65, as a string also counts with "
        "a leading space",
    ),
    Wrong(
        {"allowed_token_ids": [*range(10**5)]},
        "allowed_token_ids: 90, 91, 92 and 99907 more are outside the vocabulary of 90",
    ),
    Wrong(
        {"stop_token_ids": [93, 4, 92, 91], "bad_token_ids": [94, 90, 91, 92]},
        "stop_token_ids: 93, 92, 91 are outside the vocabulary of 90, "
        "bad_token_ids: 94, 90, 91 and 1 more are outside the vocabulary of 90",
    ),
    Wrong({"embedding_bias": {900: 1.0}}, f"embedding_bias: 900 {OUTSIDE}"),
    Wrong({"bad": [[3], [900]]}, f"bad: 900 {OUTSIDE}"),
    Wrong({"stop_token_ids": [10**5000]}, f"stop_token_ids: an integer of 16610 bits {OUTSIDE}"),
    Wrong(
        {"allowed_token_ids": [3, 4], "bad_words": ["a"]},
        "allowed_token_ids: none is left without bad_words and bad_token_ids",
    ),
    Wrong(
        {
            "stop_token_ids": [90, 90, 3],
            "logit_bias": {100: 1.0},
            "allowed_token_ids": [101],
            "bad_words": ["?", [102, 3]],
            "bad_token_ids": [103],
        },
        f"bad_words='?' (it has no tokens), stop_token_ids: 90 {OUTSIDE}, "
        f"logit_bias: 100 {OUTSIDE}, allowed_token_ids: 101 {OUTSIDE}, bad_words: 102 {OUTSIDE}, "
        f"bad_token_ids: 103 {OUTSIDE}",
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: ",".join(case.options))
def test_words_and_ids_that_cannot_be(case: Wrong) -> None:
    """Every reason at once, before anything starts."""
    message = f"^request 0: not supported: {re.escape(case.reasons)}$"
    with pytest.raises(RequestError, match=message):
        admission(tokenizer=case.tokenizer).make_requests([1], SamplingParams(**case.options))


def test_an_option_is_called_as_the_user_did() -> None:
    why = "^sampling parameters: allowed_token_ids: none is left without bad and bad_token_ids$"
    with pytest.raises(RequestError, match=why):
        admitted(bad=[[4]], bad_token_ids=[5], allowed_token_ids=[4, 5])


@pytest.mark.parametrize("k", [0, 3])
def test_min_tokens_yields_where_only_ends_are_left(harness, prompts, k) -> None:
    params = SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=4, max_tokens=9)
    other = greedy(allowed_token_ids=[7, 8], stop_token_ids=[7], min_tokens=4)
    llm = harness.llm(k=k)
    ended, held_back = llm.generate(prompts[:2], [params, other])
    plain = decode(harness.oracle_model.target, prompts[0], params)
    assert (ended.token_ids, ended.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert set(ended.token_ids) == {7}
    assert held_back.token_ids[:4] == [8] * 4
    assert_drained(llm)


def test_bad_words_that_leave_nothing_after_the_prompt() -> None:
    """What it ends with decides; but a budget of thinking may force a token there."""
    options = {"allowed_token_ids": [7, 8], "bad_words": [[4, 7], [3, 4, 8]]}
    message = (
        "^request [0-9]+: not supported: allowed_token_ids: none is left after this prompt "
        "without bad_words and bad_token_ids$"
    )
    admits = admission(tokenizer=Words())
    for make in (admits.make_requests, partial(admits.make_call, in_thread=True)):
        for more in ({}, {"stop": ["bc"]}):
            with pytest.raises(RequestError, match=message):
                make([3, 4], SamplingParams(**options, **more))
    for prompt in ([4], [5, 4], [3, 4, 5]):
        assert admits.make_requests(prompt, SamplingParams(**options))
    assert admits.make_requests([3, 4], SamplingParams(**options, thinking_token_budget=0))
    with pytest.raises(RequestError, match=r"no id of the vocabulary of 5 is left after this p"):
        admission(vocab_size=5).make_requests(
            [4], SamplingParams(bad_token_ids=[0, 1, 2, 3], bad_words=[[4, 4]])
        )


@pytest.mark.parametrize("k", [0, 3])
def test_options_that_leave_nothing_later_are_named(harness, k) -> None:
    """The target's logits are finite."""
    params = [
        greedy(allowed_token_ids=[7], bad_words=[[7, 7]]),
        greedy(allowed_token_ids=[7, 8], bad_words=[[7, 7], [8, 7]], bad_token_ids=[8]),
    ]
    llm = harness.llm(k=k)
    first, second = llm.generate([[3, 4]] * 2, params)
    why = "the target gave a row of logits without any finite value, or allowed_token_ids and "
    assert (first.token_ids, first.error) == ([7], f"{why}bad_words left none")
    assert (second.token_ids, second.error) == (
        [7],
        f"{why}bad_words and bad_token_ids left none",
    )
    assert_drained(llm)


def test_the_most_words_that_there_is_room_for() -> None:
    request = admitted(bad_words=NUMBERS[:32])
    assert request.params.bad_words == tuple((10 + n,) for n in range(64))


# --- drafts ---


@pytest.mark.parametrize("vanilla", WORKERS)
def test_drafts_of_each_request_in_one_batch(harness, target, prompts, vanilla) -> None:
    """As many as requested and no more; the text is that of K = 0."""
    requested = [None, 0, 1, 2, 3, 9, None, 2]
    params = [greedy(max_draft_len=most) for most in requested]
    params[6] = greedy(speculate=False)
    params[7] = greedy(speculate=False, max_draft_len=2)
    llm = harness.llm(k=3, vanilla=vanilla)
    outputs = llm.generate(prompts, params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == target.greedy(prompt, COUNT)
    for output, most in zip(outputs, [3, 0, 1, 2, 3, 3, 0, 0], strict=True):
        stats = output.acceptance
        # drafts past the request's length were absent, at most 3 + 2 + 1
        assert most * stats.steps - 6 <= stats.num_drafted <= most * stats.steps
        assert sum(stats.histogram[most + 2 :]) == 0
    assert outputs[2].acceptance.acceptance_length > 1
    assert_drained(llm)


def test_drafts_are_counted_as_requested(harness, prompts) -> None:
    """Exactly: a text that no length cuts."""
    llm = harness.llm(k=3, max_seq_len=128)
    stops = [llm.generate([p], greedy())[0].token_ids[9] for p in prompts[2:6]]
    params = [
        greedy(max_new_tokens=60, max_draft_len=most, stop_token_ids=[stop])
        for most, stop in enumerate(stops)
    ]
    requests = llm.make_requests(prompts[2:6], params)
    last = {event.request_id: event for step in llm._read(Call.of(requests)) for event in step}
    for most, request in enumerate(requests):
        event, stats = last[request.request_id], request.py_acceptance
        assert event.finish_reason is FinishReason.END_ID
        # after the last token none counts
        expected = most * (stats.steps - 1) + min(most, len(event.token_ids) - 1)
        assert stats.num_drafted == expected


# --- lengths ---


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_without_a_limit_a_text_fills_max_seq_len(harness, target, prompts, name: str) -> None:
    """It ends there by its length, and is that of a limit beyond what fits."""
    llm = harness.llm(max_seq_len=64)
    params = SamplingParams(**{name: None}, ignore_eos=True)
    most = SamplingParams(max_new_tokens=10**9, ignore_eos=True)
    for output, prompt in zip(llm.generate(prompts[:2], [params, most]), prompts, strict=False):
        assert output.token_ids == target.greedy(prompt, 64 - len(prompt))
        assert output.finish_reason == "length"
    assert_drained(llm)


# --- seeds ---


def sampled(llm: LLM, prompt: list[int], **options: Any) -> list[int]:
    params = greedy(**{"temperature": 1.0, **options})
    return llm.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, "x"])
def test_engine_seeds_that_cannot_be(harness, seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.mtp\.seed"):
        harness.llm(mtp={"seed": seed})


@pytest.mark.parametrize("k", [0, 3])
def test_seed_of_the_config_is_the_engines_seed(harness, prompts, k: int) -> None:
    """It gives requests without a seed theirs, by their number; others keep their own."""
    low, high = (word % 2**32 for word in seed_words(None, 1, engine_seed=7))
    llm, other = harness.llm(mtp={"seed": 7}), harness.llm(seed=8, k=k)
    expected = sampled(llm, prompts[3])
    assert sampled(harness.llm(seed=7, k=k), prompts[3]) == expected
    assert sampled(other, prompts[3]) != expected
    assert sampled(llm, prompts[3]) == sampled(other, prompts[3], seed=low | high << 32)


# --- log-probabilities ---


@pytest.mark.parametrize(("mode", "other"), [("raw", "processed"), ("processed", "raw")])
def test_a_request_may_name_the_mode_of_its_log_probabilities(
    harness, prompts, mode, other
) -> None:
    llm = harness.llm(mtp={"logprobs_mode": mode})
    requested = {"temperature": 0.5, "seed": 3, "logprobs": 0}
    named, unnamed = (
        llm.generate(prompts[:1], greedy(**requested, logprobs_mode=name))[0]
        for name in (mode, None)
    )
    assert named.logprobs == unnamed.logprobs
    with pytest.raises(RequestError, match=f"_mode={other!r} is not enabled; set .*: {other}"):
        llm.generate(prompts[:1], greedy(**requested, logprobs_mode=other))
    assert_drained(llm)


# --- one of several ---


def test_one_refused_request_leaves_the_others_alone(harness, target, prompts) -> None:
    """Where requests come one by one, its call fails and nothing else."""
    llm = harness.llm()

    async def ask(place: int) -> list[int]:
        wrong = {"top_p_decay": 0.5, "stop_token_ids": [VOCAB]} if place == 1 else {}
        return (await llm.generate_async(prompts[place], greedy(**wrong))).token_ids

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(ask, range(4)), return_exceptions=True)

    answers = asyncio.run(all_of_them())
    assert isinstance(answers[1], RequestError)
    assert str(answers[1]) == (
        f"request 1: not supported: top_p_decay=0.5, stop_token_ids: {VOCAB} is outside "
        f"the vocabulary of {VOCAB}"
    )
    for place in (0, 2, 3):
        assert answers[place] == target.greedy(prompts[place], COUNT)
    assert_drained(llm)

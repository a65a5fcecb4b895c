"""A user's own rule of stopping, through the embedded executor: tokens, text, events, the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.sampler import MTPSampler
from tests.hosts.embedded.conftest import LOOPS, WORKERS, assert_drained
from tests.hosts.embedded.test_llm_api import Pieces

COUNT = 24


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": COUNT, "ignore_eos": True, **options})


class Ids:
    """Ends a request with one of its ids, after it or after its whole run."""

    def __init__(self, *, cuts: bool, ends: dict[int, int]) -> None:
        self.cuts, self.ends = cuts, ends
        self.llm: LLM | None = None
        self.requested: list[int] = []

    def __call__(self, ids: Sequence[int]) -> Any:
        self.requested += ids
        kept = {}
        for request_id in ids:
            request = self.llm.find_request(request_id)
            output = request.output_token_ids
            end = self.ends.get(request_id)
            if end in output:
                kept[request_id] = output.index(end) + 1 if self.cuts else len(output)
        return kept if self.cuts else list(kept)


def make(harness, rule: Any, **options: Any) -> LLM:
    # the callback belongs to the LLM, and looks up requests there
    llm = harness.llm(**options, stop_callback=rule)
    rule.llm = llm
    return llm


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_a_rule_that_cuts_is_a_stop_id(harness, target, prompts, no_overlap, vanilla) -> None:
    """Whatever K: text, events and statistics end where the rule says; the others go on."""
    free = [target.greedy(prompt, COUNT) for prompt in prompts]
    ends = {i: tokens[5 + i] for i, tokens in enumerate(free) if i != 2}
    want = [
        tokens[: tokens.index(ends[i]) + 1] if i in ends else tokens
        for i, tokens in enumerate(free)
    ]
    tokenizer = Pieces()
    lengths = []
    for k in (0, 1, 3):
        rule = Ids(cuts=True, ends=ends)
        options = {"tokenizer": tokenizer, "disable_overlap_scheduler": no_overlap}
        llm = make(harness, rule, k=k, vanilla=vanilla and k > 0, **options)
        ids: dict[int, list[int]] = {}
        text: dict[int, str] = {}
        reasons = {}
        requests = llm.make_requests(prompts, [greedy(logprobs=1)] * len(prompts))
        for events in llm._read(Call.of(requests)):
            for event in events:
                assert len(event.logprobs or ()) == len(event.token_ids)
                ids.setdefault(event.request_id, []).extend(event.token_ids)
                text[event.request_id] = text.get(event.request_id, "") + event.text
                reasons[event.request_id] = event.finish_reason
        assert [ids[i] for i in range(len(prompts))] == want
        assert [request.output_token_ids for request in requests] == want
        for request in requests:
            reported = [next(iter(entry)) for entry in request.logprobs]
            assert reported == request.output_token_ids
        decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in want]
        assert [text[i] for i in range(len(prompts))] == decoded
        assert [request.text.full_text for request in requests] == decoded
        assert reasons == {
            i: FinishReason.STOP_WORDS if i in ends else FinishReason.LENGTH for i in ids
        }
        # the first token is the prompt's step's
        for request in requests:
            assert request.py_acceptance.emitted == len(request.output_token_ids) - 1
        lengths.append(llm.executor.acceptance.acceptance_length)
        assert_drained(llm)
    assert lengths[0] == 1 < lengths[2]


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_a_rule_that_ends_after_the_run(harness, target, prompts, no_overlap) -> None:
    """The run stays whole, so that the text depends on K; a step in flight is dropped."""
    free = [target.greedy(prompt, COUNT) for prompt in prompts]
    ends = {i: tokens[6] for i, tokens in enumerate(free)}
    rule = Ids(cuts=False, ends=ends)
    llm = make(harness, rule, disable_overlap_scheduler=no_overlap)
    outputs = llm.generate(prompts, greedy())
    surplus = []
    for output, tokens in zip(outputs, free, strict=True):
        first = tokens.index(ends[output.request_id]) + 1
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert output.finish_reason == "stop"
        surplus.append(len(output.token_ids) - first)
    assert min(surplus) >= 0 < max(surplus) <= 3
    assert_drained(llm)
    assert all(llm.find_request(i) is None for i in range(len(prompts)))


def test_a_rule_with_stops_of_the_request(harness, target, prompts) -> None:
    """The callback also gets requests that end by themselves; uncut, they keep their reason."""
    free = [target.greedy(prompt, COUNT) for prompt in prompts[:2]]
    rule = Ids(cuts=True, ends={0: free[0][0]})
    llm = make(harness, rule)
    params = [greedy(stop_token_ids=[free[0][0]]), greedy(max_new_tokens=1)]
    outputs = llm.generate(prompts[:2], params)
    assert [output.token_ids for output in outputs] == [free[0][:1], free[1][:1]]
    assert [o.finish_reason for o in outputs] == ["stop", "length"]
    assert rule.requested == [0, 1]


class Keep:
    """Keeps as many tokens of an output as a function of it returns; None: all."""

    llm: LLM

    def __init__(self, count: Callable[[list[int]], int | None]) -> None:
        self.count = count

    def __call__(self, ids: Sequence[int]) -> dict[int, int]:
        counts = {i: self.count(self.llm.find_request(i).output_token_ids) for i in ids}
        return {i: count for i, count in counts.items() if count is not None}


def keep_at_most(count: int) -> Keep:
    return Keep(lambda output: count if len(output) >= count else None)


def own_stop(kind: str, tokens: list[int], at: int) -> dict[str, Any]:
    """Options that end a request with the token at an index."""
    text = Pieces().decode([tokens[at]], skip_special_tokens=True)
    return {
        "length": {"max_new_tokens": at + 1},
        "stop id": {"stop_token_ids": [tokens[at]]},
        "stop string": {"stop": text, "include_stop_str_in_output": True},
        "stop id with logprobs": {"stop_token_ids": [tokens[at]], "logprobs": 2},
    }[kind]


@pytest.mark.parametrize(
    ("own", "no_overlap"), [("length", False), ("stop id", True), ("stop string", False)]
)
def test_a_rule_that_drops_its_own_mark(harness, target, prompts, own, no_overlap) -> None:
    """Also one that ends the text by itself, be it alone in its run or the last of several."""
    free = target.greedy(prompts[0], COUNT)
    places = [i for i in range(1, 8) if free[i] not in free[:i]]

    runs = set()
    for k in (0, 3):
        for at in places:
            end = free[at]
            rule = Keep(lambda text, end=end: text.index(end) if end in text else None)
            llm = make(harness, rule, k=k, tokenizer=Pieces(), disable_overlap_scheduler=no_overlap)
            params = greedy(**own_stop(own, free, at))
            events = [e for step in llm.stream(prompts[:1], params) for e in step]
            assert [token for event in events for token in event.token_ids] == free[:at]
            assert events[-1].finish_reason is FinishReason.STOP_WORDS
            runs.add((k, len(events[-1].token_ids)))
            assert_drained(llm)
    assert {(0, 0), (3, 0), (3, 1)} <= runs


@pytest.mark.parametrize(
    ("own", "no_overlap"),
    [("length", True), ("stop id", False), ("stop string", True), ("stop id with logprobs", False)],
)
def test_a_rule_in_front_of_a_stop_of_the_request(
    harness, target, prompts, own, no_overlap
) -> None:
    """Which of the two comes first is the same for every K, in one run too."""
    free = target.greedy(prompts[0], COUNT)
    at = next(i for i in range(6, COUNT) if free[i] not in free[:i])
    options = own_stop(own, free, at)
    for kept in (at, at + 1, at + 2):
        reasons = []
        for k in (0, 1, 3):
            options_of_llm = {"tokenizer": Pieces(), "disable_overlap_scheduler": no_overlap}
            llm = make(harness, keep_at_most(kept), k=k, **options_of_llm)
            (output,) = llm.generate(prompts[:1], greedy(**options))
            assert output.token_ids == free[: min(kept, at + 1)]
            assert len(output.logprobs or output.token_ids) == len(output.token_ids)
            assert output.text == Pieces().decode(output.token_ids, skip_special_tokens=True)
            reasons.append(output.finish_reason)
            assert_drained(llm)
        assert len({*reasons}) == 1
        assert (reasons[0] == "stop") == (kept == at or own != "length")


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_a_wrong_answer_ends_one_request_alone(
    harness, target, prompts, no_overlap, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(ids: Sequence[int]) -> dict[int, int]:
        return {1: 99} if 1 in ids else {12345: 3}

    llm = harness.llm(disable_overlap_scheduler=no_overlap, stop_callback=rule)
    with caplog.at_level(logging.ERROR, "mtp_plugin"):
        outputs = llm.generate(prompts[:4], greedy())
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error == (
        "stop_callback: expected 0 to 1 tokens of the output to keep, got 99"
    )
    for i in (0, 2, 3):
        assert outputs[i].token_ids == target.greedy(prompts[i], COUNT)
        assert outputs[i].finish_reason == "length"
    assert "expected ids among 0, 2, 3, got 12345" in caplog.text
    assert_drained(llm)


def test_a_failed_rule_is_reported_to_all_its_requests(harness, target, prompts) -> None:
    failing = True

    def rule(ids: Sequence[int]) -> None:
        if failing:
            raise LookupError(f"no rule for {len(ids)} requests")

    llm = harness.llm(stop_callback=rule)
    outputs = llm.generate(prompts[:2], greedy())
    assert {o.error for o in outputs} == {"stop_callback: LookupError: no rule for 2 requests"}
    failing = False
    (output,) = llm.generate([prompts[2]], greedy())
    assert output.token_ids == target.greedy(prompts[2], COUNT)
    assert_drained(llm)


def test_pieces_that_ask_no_rule(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPSampler, "set_stop_callback", None)
    with pytest.raises(
        ConfigError, match=r"^stop_callback: expected None, the plugin's MTPSampler"
    ):
        harness.llm(stop_callback=list)


def test_a_rule_in_front_of_a_token_without_text(harness, target, prompts) -> None:
    """What the tokenizer cannot decode ends the request, unless the rule ends it before."""
    free = target.greedy(prompts[0], COUNT)
    at = next(i for i in range(6, COUNT) if free[i] not in free[:i])

    class Failing(Pieces):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            if free[at] in token_ids:
                raise ValueError("no such")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    for kept in (at, at + 1):
        for k in (0, 1, 3):
            llm = make(harness, keep_at_most(kept), k=k, tokenizer=Failing())
            (output,) = llm.generate(prompts[:1], greedy())
            assert len(output.token_ids) == kept
            failed = kept > at
            reason = "error" if failed else "stop"
            assert (output.finish_reason, output.error is not None) == (reason, failed)
            assert_drained(llm)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a\nb"), "ValueError: a b"),
        (UnspeakableError(), "UnspeakableError: its message cannot be read"),
    ],
)
def test_whatever_is_raised_is_one_line(harness, prompts, error, message) -> None:
    def rule(_: Sequence[int]) -> None:
        raise error

    class Decoding(Pieces):
        def decode(self, *_: Any, **__: Any) -> str:
            raise error

    llm = harness.llm(stop_callback=rule)
    outputs = llm.generate(prompts[:2], greedy())
    assert [output.error for output in outputs] == [f"stop_callback: {message}"] * 2
    assert_drained(llm)
    llm = harness.llm(tokenizer=Decoding())
    (output,) = llm.generate(prompts[:1], greedy())
    assert output.error.endswith(f"cannot decode token {output.token_ids[0]}: {message}")
    assert_drained(llm)

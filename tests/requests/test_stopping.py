"""When a request stops: runs of tokens compared with a plain example, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import MAX_STOP_IDS, Ending, StopRule, stop_words

IDS = st.integers(0, 5)
REASONS = (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)


class Watch:
    """Ends the text with token number ``ends``, and cannot decode number ``fails``, from 0."""

    def __init__(self, ends: int | None, fails: int | None) -> None:
        self.ends, self.fails = ends, fails
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, token: int, *, from_draft: bool) -> bool:
        number = len(self.seen)
        if number == self.fails:
            raise ValueError(f"bad byte {token}")
        self.seen.append((token, from_draft))
        return number == self.ends


@dataclass
class Story:
    """A prompt, what the target says after it, and what ends it."""

    prompt: list[int]
    said: list[int]
    end_ids: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    min_tokens: int
    room: int  # tokens that fit after the prompt
    ends: int | None = None  # of the watch
    fails: int | None = None
    runs: list[int] = field(default_factory=list)  # lengths of the runs that it comes in

    def rule(self, watch: Watch | None = None) -> StopRule:
        return StopRule(
            max_length=len(self.prompt) + self.room,
            prompt_len=len(self.prompt),
            min_tokens=self.min_tokens,
            end_ids=self.end_ids,
            words=self.words,
            watch=watch,
        )

    def expected(self) -> tuple[list[int], FinishReason | None, str | None]:
        """The output, and why it ends, as plain Python reports it."""
        output: list[int] = []
        for token in self.said:
            output.append(token)
            number = len(output)
            if self.fails == number - 1:
                return output, FinishReason.ERROR, f"ValueError: bad byte {token}"
            may_end = number > self.min_tokens
            words = [w for w in self.words if w and output[-len(w) :] == list(w)]
            happened = (
                may_end and token in self.end_ids,
                (may_end and len(words) > 0) or self.ends == number - 1,
                number >= self.room,
            )
            for reason, did in zip(REASONS, happened, strict=True):
                if did:
                    return output, reason, None
        return output, None, None


def checked(
    story: Story, runs: list[int], *, watched: bool
) -> tuple[list[int], Ending, Watch | None]:
    """The same in runs of these lengths, as a sampler does it; the last run takes the rest."""
    watch = Watch(story.ends, story.fails) if watched else None
    rule, tokens = story.rule(watch), list(story.prompt)
    left, sizes = list(story.said), [*runs, len(story.said)]
    ending = Ending(0)
    while left:
        size = sizes.pop(0)
        run, left = left[:size], left[size:]
        ending = rule.check(run, len(tokens), num_drafts=max(len(run) - 1, 0), tokens=tokens)
        assert 0 <= ending.length <= len(run)
        tokens += run[: ending.length]
        if ending.reason is not None:
            break
        assert ending == Ending(len(run))
    return tokens[len(story.prompt) :], ending, watch


@st.composite
def stories(draw: Callable[..., Any], *, watched: bool = False) -> Story:
    words = st.lists(st.lists(IDS, max_size=4).map(tuple), max_size=3).map(tuple)
    number = st.none() | st.integers(0, 12)
    return Story(
        prompt=draw(st.lists(IDS, min_size=1, max_size=4)),
        said=draw(st.lists(IDS, min_size=1, max_size=12)),
        end_ids=tuple(draw(st.lists(IDS, unique=True, max_size=2))),
        words=draw(words),
        min_tokens=draw(st.integers(0, 6)),
        room=draw(st.integers(1, 14)),
        ends=draw(number) if watched else None,
        fails=draw(number) if watched else None,
        runs=draw(st.lists(st.integers(0, 4), max_size=12)),
    )


# --- runs ---


@given(story=stories())
def test_a_run_ends_as_its_tokens_do(story: Story) -> None:
    """However the text is cut into runs, empty ones too: the same output, the same reason."""
    output, reason, _ = story.expected()
    for runs in (story.runs, [1] * len(story.said), []):
        got, ending, _ = checked(story, runs, watched=False)
        assert (got, ending.reason, ending.error) == (output, reason, None)


@given(story=stories(watched=True))
def test_a_watched_text_ends_as_its_tokens_do(story: Story) -> None:
    output, reason, error = story.expected()
    for runs in (story.runs, [1] * len(story.said), []):
        got, ending, watch = checked(story, runs, watched=True)
        assert (got, ending.reason) == (output, reason)
        assert watch is not None
        # every token that counts, and no other, but one that cannot be decoded
        assert [token for token, _ in watch.seen] == output[: len(output) - (error is not None)]
        if error is None:
            assert (ending.error, ending.cause) == (None, None)
        else:
            assert ending.error == f"the tokenizer cannot decode token {output[-1]}: {error}"
            assert isinstance(ending.cause, ValueError)


@given(story=stories())
@example(story=Story([1], [2, 3], (), (), 0, 9, runs=[0, 2]))
def test_a_watch_that_sees_nothing_changes_nothing(story: Story) -> None:
    """The short way of requests without text and words, and the long way, agree."""
    plain = replace(story, words=())
    alone, watched = (checked(plain, story.runs, watched=w) for w in (False, True))
    assert alone[:2] == watched[:2]


def test_which_tokens_were_drafts_is_reported() -> None:
    watch = Watch(None, None)
    rule = StopRule(max_length=99, watch=watch)
    assert rule.check([7, 8, 9], 5, num_drafts=2) == Ending(3)
    assert rule.check([4], 8) == Ending(1)
    assert watch.seen == [(7, True), (8, True), (9, False), (4, False)]


def test_an_empty_run_goes_on() -> None:
    """As of a row without any finite value, also where the request is full."""
    assert StopRule(max_length=5, end_ids=(1,)).check([], 5) == Ending(0)
    assert StopRule(max_length=5, watch=Watch(0, None)).check([], 5) == Ending(0)


# --- reasons ---


def test_the_order_of_reasons() -> None:
    """All at once: the end id; without it the word, or the text; without these the length."""
    everything: dict[str, Any] = {
        "max_length": 4,
        "prompt_len": 2,
        "end_ids": (8,),
        "words": ((7, 8),),
    }
    for left_out, reason in (
        ({}, FinishReason.END_ID),
        ({"end_ids": ()}, FinishReason.STOP_WORDS),
        ({"end_ids": (), "words": ()}, FinishReason.STOP_WORDS),
        ({"end_ids": (), "words": (), "watch": None}, FinishReason.LENGTH),
    ):
        rule = StopRule(**{**everything, "watch": Watch(1, None), **left_out})
        assert rule.check([7, 8, 9], 2, tokens=[1, 7]) == Ending(2, reason)


def test_an_error_comes_before_every_reason() -> None:
    rule = StopRule(max_length=3, end_ids=(8,), words=((8,),), watch=Watch(0, 0))
    ending = rule.check([8, 9], 2, tokens=[1, 2])
    assert (ending.length, ending.reason) == (1, FinishReason.ERROR)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_the_first_token_that_may_end(min_tokens: int) -> None:
    rule = StopRule(max_length=99, prompt_len=2, min_tokens=min_tokens, end_ids=(5,))
    assert rule.check([5] * 4, 2) == Ending(min_tokens + 1, FinishReason.END_ID)
    # of a later run
    assert rule.check([5] * 4, 3) == Ending(max(min_tokens, 1), FinishReason.END_ID)


def test_words_begin_before_the_run_but_never_in_the_prompt() -> None:
    rule = StopRule(max_length=99, prompt_len=2, words=((6, 7, 8),))
    assert rule.check([8, 9], 4, tokens=[1, 2, 6, 7]) == Ending(1, FinishReason.STOP_WORDS)
    assert rule.check([8, 9], 3, tokens=[1, 6, 7]) == Ending(2)
    assert rule.check([7, 8, 9], 2, tokens=[1, 6]) == Ending(3)
    assert rule.check([6, 7, 8, 9], 2, tokens=[6, 7]) == Ending(3, FinishReason.STOP_WORDS)


def test_trtllm_words_begin_in_the_prompt_and_yield_to_the_length() -> None:
    rule = StopRule(max_length=6, prompt_len=3, words=((6, 7, 8), (4,)), trtllm_words=True)
    assert rule.check([8, 9], 3, tokens=[1, 6, 7]) == Ending(1, FinishReason.STOP_WORDS)
    assert rule.check([7, 8, 9], 3, tokens=[1, 2, 6]) == Ending(2, FinishReason.STOP_WORDS)
    assert rule.check([2, 2, 4], 3, tokens=[1, 2, 6]) == Ending(3, FinishReason.LENGTH)
    ends = replace(rule, end_ids=(4,))
    assert ends.check([2, 2, 4], 3, tokens=[1, 2, 6]) == Ending(3, FinishReason.END_ID)


def test_a_text_of_ours_is_a_watch() -> None:
    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            del skip_special_tokens
            return "".join(chr(ord("a") + token) for token in token_ids)

    text = RequestText(Letters(), ("cd",))
    rule = StopRule(max_length=99, watch=text.push)
    assert rule.check([0, 1, 2], 1) == Ending(3)
    assert rule.check([3, 4], 4) == Ending(1, FinishReason.STOP_WORDS)
    assert text.full_text == "ab"


# --- what the device knows ---


def test_ids_of_the_device_are_those_that_end_alone() -> None:
    rule = StopRule(max_length=9, end_ids=(5, 1), words=((7,), (2, 3), (), (1,), (0,), (7,)))
    assert rule.device_ids == (5, 1, 7, 0)
    assert rule.slot_ids == rule.device_ids
    assert StopRule(max_length=9).slot_ids == ()


def test_more_ids_than_a_slot_has_room_for() -> None:
    fits = tuple(range(MAX_STOP_IDS))
    assert StopRule(max_length=9, end_ids=fits).slot_ids == fits
    assert StopRule(max_length=9, end_ids=fits, min_tokens=3).slot_ids == fits
    more = StopRule(max_length=99, end_ids=(*fits, MAX_STOP_IDS))
    assert more.slot_ids is None
    assert len(more.device_ids) == MAX_STOP_IDS + 1
    assert more.check([50, MAX_STOP_IDS], 1) == Ending(2, FinishReason.END_ID)


@pytest.mark.parametrize("word", [False, True], ids=["ids", "ids and a word of one"])
def test_too_many_ids_cannot_be_held_back(word: bool) -> None:
    ids = tuple(range(MAX_STOP_IDS + (not word)))
    words = ((MAX_STOP_IDS,), (3, 4)) if word else ()
    for min_tokens in (1, 2):
        expected = f"min_tokens={min_tokens} and 33 ids that end the text: at most 32 can be held"
        with pytest.raises(RequestError, match=f"^{expected} back$"):
            StopRule(max_length=9, min_tokens=min_tokens, end_ids=ids, words=words)


# --- of options ---


def test_the_rule_of_options() -> None:
    watch = Watch(None, None)
    params = SamplingParams(max_new_tokens=10, min_tokens=4, stop_token_ids=(2, 9, 9))
    rule = StopRule.of(params, prompt_len=5, max_seq_len=100, end_ids=[1, 2], watch=watch)
    assert rule == StopRule(
        max_length=15, prompt_len=5, min_tokens=4, end_ids=(1, 2, 9), watch=watch
    )
    assert StopRule.of(params, prompt_len=5, max_seq_len=12).max_length == 12
    assert StopRule.of(params, prompt_len=5, max_seq_len=12).end_ids == (2, 9)


def test_ids_of_the_model_may_be_ignored() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(8,))
    assert StopRule.of(params, prompt_len=1, max_seq_len=9, end_ids=(1, 2)).end_ids == (8,)
    huge = SamplingParams(ignore_eos=True, min_tokens=2, max_new_tokens=2)
    ids = range(MAX_STOP_IDS + 1)
    assert StopRule.of(huge, prompt_len=1, max_seq_len=9, end_ids=ids).slot_ids == ()


# --- words of hosts ---


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (None, []),
        ([], []),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ([[5, 6, 7, 8], [1, 3, 4, -1]], [[5], [6, 7], [8]]),
        ([[5, 6], [2, -1]], [[5, 6]]),
        ([[5, 6], [1, 2]], [[5], [6]]),
        # ends that do not rise, or lie after the last token: two words
        ([[5, 6], [2, 1]], [[5, 6], [2, 1]]),
        ([[5, 6], [1, 9]], [[5, 6], [1, 9]]),
        ([[5, 6], [-1, -1]], [[5, 6], [-1, -1]]),
        ([[5], [6], [7]], [[5], [6], [7]]),
    ],
)
def test_both_forms_of_stop_words(listed: Any, words: list[list[int]]) -> None:
    assert stop_words(listed) == words


@given(words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=5))
def test_flat_words_come_back(words: list[list[int]]) -> None:
    flat = [token for word in words for token in word]
    ends = [sum(map(len, words[: i + 1])) for i in range(len(words))]
    padded = ends + [-1] * (len(flat) - len(ends))
    assert stop_words([flat, padded]) == words

"""Plain decoding of one prompt: where it ends, what it returns, and how it continues."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mtp_plugin.infer import Decoded, ReferenceLogprobs, Thinking, decode
from mtp_plugin.infer.logprobs import logprobs_of
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from tests.infer.models import TableModel

MODEL = TableModel(seed=1)
PROMPT = [3, 1, 4, 1, 5]


class Letters:
    """A tokenizer of one letter per id."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return "".join("abcdefghijkl"[token] for token in token_ids)


def decoded(options: dict[str, Any], **more: Any) -> Decoded:
    return decode(MODEL, PROMPT, SamplingParams(**{"max_new_tokens": 10, **options}), **more)


def test_a_length_ends_the_text() -> None:
    text = decoded({})
    assert len(text.token_ids) == 10
    assert text.finish_reason is FinishReason.LENGTH
    assert text == Decoded(text.token_ids, FinishReason.LENGTH)
    assert decoded({}, max_seq_len=8).token_ids == text.token_ids[:3]
    assert decoded({}, max_seq_len=5) == Decoded([], FinishReason.LENGTH)


def test_ids_end_the_text() -> None:
    free = decoded({}).token_ids
    end = free[3]
    cut = free[: free.index(end) + 1]
    ended = Decoded(cut, FinishReason.END_ID)
    assert decoded({}, end_ids=[end]) == ended
    assert decoded({"stop_token_ids": [end]}) == ended
    assert decoded({"ignore_eos": True}, end_ids=[end]).token_ids == free


def test_strings_end_the_text() -> None:
    free = decoded({}, tokenizer=Letters())
    assert free.text == Letters().decode(free.token_ids, skip_special_tokens=True)
    stop = free.text[3:5]
    first = free.text.index(stop)
    cut = decoded({"stop": [stop]}, tokenizer=Letters())
    expected = Decoded(free.token_ids[: first + 2], FinishReason.STOP_WORDS, free.text[:first])
    assert cut == expected


class SpecialLetters(Letters):
    """Letters, of which one is a special token."""

    def __init__(self, special: int) -> None:
        self.special = special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return ["abcdefghijkl".index(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t == self.special)]
        return super().decode(kept, skip_special_tokens=False)


def test_special_token_as_stop_string_ends_the_text() -> None:
    special = decoded({}).token_ids[3]
    tokenizer = SpecialLetters(special)
    stop = "abcdefghijkl"[special]
    for skips, reason in ((True, FinishReason.END_ID), (False, FinishReason.STOP_WORDS)):
        options = {"skip_special_tokens": skips}
        ids = decoded({**options, "stop_token_ids": [special]}, tokenizer=tokenizer)
        found = decoded({**options, "stop": [stop]}, tokenizer=tokenizer)
        assert found == Decoded(ids.token_ids, reason, ids.text.removesuffix(stop))
    masked = decoded({"stop": [stop], "min_tokens": 8}, tokenizer=tokenizer).token_ids
    assert masked == decoded({"stop_token_ids": [special], "min_tokens": 8}).token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.3, "seed": 4, "frequency_penalty": 0.7, "prompt_ignore_length": 2},
        {"min_tokens": 8, "stop_token_ids": [9, 0]},
        {"temperature": 0.9, "bad_words": [(0, 8), (1, 5, 9)], "repetition_penalty": 1.3},
        {"thinking_token_budget": 2, "logit_bias": {4: 2.0}},
        {"stop": ["ak"]},
    ],
)
def test_a_text_goes_on_from_any_of_its_tokens(options: dict[str, Any]) -> None:
    more = {"tokenizer": Letters(), "thinking": Thinking(4, (6, 3)), "end_ids": [2], "number": 5}
    whole = decoded({**options, "max_new_tokens": 16}, **more)
    for count in range(len(whole.token_ids) + 1):
        emitted = whole.token_ids[:count]
        assert decoded({**options, "max_new_tokens": 16}, **more, emitted=emitted) == whole


def test_log_probabilities_are_the_model_s_own() -> None:
    options = {"temperature": 1.5, "seed": 1, "logit_bias": {3: 4.0}, "logprobs": 3}
    text = decoded({**options, "prompt_logprobs": 2})
    whole = [*PROMPT, *text.token_ids]
    rows = [MODEL.rows[a, b].log_softmax(0) for a, b in zip([0, *whole], whole, strict=False)]
    assert text.prompt_logprobs is not None
    assert text.logprobs is not None
    first, *others = text.prompt_logprobs
    assert first is None
    assert len(others) == len(PROMPT) - 1
    assert len(text.logprobs) == len(text.token_ids)
    for token, row, entry in zip(whole[1:], rows, [*others, *text.logprobs], strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        best = row.topk(len(entry.top))
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-6)
    assert {len(entry.top) for entry in text.logprobs} == {3}


def test_log_probabilities_of_none_but_the_token() -> None:
    text = decoded({"logprobs": 0})
    assert text.prompt_logprobs is None
    assert text.logprobs is not None
    assert [entry.top for entry in text.logprobs] == [{}] * 10


def test_prompt_logprobs_without_output() -> None:
    text = decoded({"prompt_logprobs": 0, "logprobs": 0}, max_seq_len=5)
    assert text.token_ids == text.logprobs == []
    assert text.prompt_logprobs is not None
    assert len(text.prompt_logprobs) == 5


@pytest.mark.parametrize(
    ("row", "token", "expected"),
    [
        ([1.0, 2.0, 2.0, 2.0], 3, (-1.2143, [1, 2])),
        ([0.0, math.nan, 0.0], 0, (-math.log(2), [0, 2])),
        ([0.0, math.nan, 0.0], 1, (-math.inf, [0, 2])),
        ([5.0, math.inf, math.inf], 1, (0.0, [1, 2])),
        ([5.0, math.inf, math.inf], 2, (-math.inf, [1, 2])),
        ([-math.inf, math.nan], 0, (-math.inf, [0, 1])),
    ],
)
def test_log_probabilities_of_odd_rows(row, token, expected) -> None:
    entry = logprobs_of(torch.tensor(row), token, 2)
    assert entry.logprob == pytest.approx(expected[0], abs=1e-4)
    assert list(entry.top) == expected[1]
    assert entry == ReferenceLogprobs(entry.logprob, entry.top)


def test_a_row_without_values_is_an_error() -> None:
    model = TableModel(seed=1)
    model.rows[:] = -math.inf
    text = decode(model, PROMPT, SamplingParams(logprobs=1))
    assert text == Decoded([], FinishReason.ERROR, logprobs=[])

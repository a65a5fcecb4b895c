"""SamplingParams: what it takes and refuses; LlmRequest: chunks, tokens, pauses, ends."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import pytest

from mtp_plugin.errors import ExecutorError, MTPPluginError, RequestError
from mtp_plugin.executor import LlmRequest, SamplingParams
from mtp_plugin.requests.detokenizer import RequestText, Segment
from mtp_plugin.requests.states import FinishReason, RequestState

# --- sampling parameters ---


class Refused(NamedTuple):
    options: dict[str, Any]
    message: str


REFUSED = [
    Refused({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
    Refused({"max_new_tokens": -3}, "max_new_tokens must be an integer >= 1, got -3"),
    Refused({"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 1, got 2.0"),
    Refused({"max_new_tokens": True}, "max_new_tokens must be an integer >= 1, got True"),
    Refused({"max_new_tokens": None}, "max_new_tokens must be an integer >= 1, got None"),
    Refused({"min_tokens": -1}, "min_tokens must be an integer >= 0, got -1"),
    Refused({"min_tokens": "2"}, "min_tokens must be an integer >= 0, got '2'"),
    Refused({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is above max_new_tokens 8"),
    Refused({"stop": "END"}, "stop must be a sequence of strings that are not empty, got 'END'"),
    Refused({"stop": [""]}, "stop must be a sequence of strings that are not empty, got ('',)"),
    Refused({"stop": [3]}, "stop must be a sequence of strings that are not empty, got (3,)"),
    Refused({"stop": b"x"}, "stop must be a sequence of strings that are not empty, got b'x'"),
    Refused({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids >= 0, got 5"),
    Refused(
        {"stop_token_ids": [-1]}, "stop_token_ids must be a sequence of token ids >= 0, got (-1,)"
    ),
    Refused(
        {"stop_token_ids": "12"}, "stop_token_ids must be a sequence of token ids >= 0, got '12'"
    ),
    Refused({"temperature": -0.1}, "temperature must be a number >= 0, got -0.1"),
    Refused({"temperature": float("nan")}, "temperature must be a number >= 0, got nan"),
    Refused({"temperature": float("inf")}, "temperature must be a number >= 0, got inf"),
    Refused({"temperature": "hot"}, "temperature must be a number >= 0, got 'hot'"),
    Refused({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
    Refused({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
    Refused({"top_p": 1.1}, "top_p must be a number from 0 to 1, got 1.1"),
    Refused({"top_p": -0.5}, "top_p must be a number from 0 to 1, got -0.5"),
    Refused({"min_p": 2}, "min_p must be a number from 0 to 1, got 2"),
    Refused({"seed": -1}, "seed must be an integer from 0 to 2**64 - 1, got -1"),
    Refused({"seed": 2**64}, f"seed must be an integer from 0 to 2**64 - 1, got {2**64}"),
    Refused({"n": 0}, "n must be an integer >= 1, got 0"),
    Refused({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
    Refused({"speculate": 1}, "speculate must be True or False, got 1"),
    Refused({"relaxed_acceptance": None}, "relaxed_acceptance must be True or False, got None"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case.options))
def test_wrong_values_are_refused(case: Refused) -> None:
    message = f"^sampling parameters: {re.escape(case.message)}$"
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**case.options)
    assert isinstance(caught.value, MTPPluginError)
    assert isinstance(caught.value, ValueError)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_new_tokens=0, stop="x", temperature=-1, n=0)
    assert str(caught.value).split("; ") == [
        "sampling parameters: max_new_tokens must be an integer >= 1, got 0",
        "stop must be a sequence of strings that are not empty, got 'x'",
        "temperature must be a number >= 0, got -1",
        "n must be an integer >= 1, got 0",
    ]


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_repeat_ngram_size"):
        SamplingParams(no_repeat_ngram_size=2)  # type: ignore[call-arg]


def test_lists_and_none_are_as_good_as_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], bad_words=[])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (3,), ())
    assert params.unsupported() == []
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_new_tokens = 3  # type: ignore[misc]


def test_what_counts_as_greedy() -> None:
    """R27: an unset temperature beside a set option samples; 0, top_k 1 and top_p 0 do not."""
    table = itertools.product(
        (None, 0, 1e-3, 0.7, 1), (None, 0, 1, 50), (None, 0, 0.9, 1), (None, 0, 0.1)
    )
    for values in table:
        options = dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
        params = SamplingParams(**options)
        temperature, top_k, top_p, _ = values
        unset = values == (None, None, None, None)
        greedy = unset or temperature == 0 or top_k == 1 or top_p == 0
        assert params.is_greedy is greedy, values
        named = {option.split("=")[0] for option in params.unsupported()}
        given = {name for name, value in options.items() if value is not None}
        assert named == (set() if greedy else given), values


UNSUPPORTED = {
    "n": 2,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: -1.0},
    "bad_words": ("a",),
    "logprobs": 0,
    "prompt_logprobs": 1,
    "guided_decoding": {"json": {}},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_option_is_named_with_its_value(name: str) -> None:
    value = UNSUPPORTED[name]
    assert SamplingParams(**{name: value}).unsupported() == [f"{name}={value!r}"]


def test_every_unsupported_option_is_named() -> None:
    options = SamplingParams(temperature=0.7, top_p=0.9, **UNSUPPORTED).unsupported()
    assert [option.split("=")[0] for option in options] == ["temperature", "top_p", *UNSUPPORTED]


def test_every_field_is_supported_or_refused() -> None:
    """A new option has to be put on one of the two sides."""
    used = {
        "max_new_tokens",
        "min_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "speculate",
        "relaxed_acceptance",
        "seed",  # greedy decoding draws nothing
    }
    sampling = {"temperature", "top_k", "top_p", "min_p"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == used | sampling | set(UNSUPPORTED)


# --- the request ---


class Letters:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(chr(ord("a") + token) for token in token_ids)


def make(prompt_len: int = 5, *, text: RequestText | None = None, **options: Any) -> LlmRequest:
    max_seq_len = options.pop("max_seq_len", 100)
    return LlmRequest(
        7,
        list(range(prompt_len)),
        SamplingParams(**options),
        end_ids=(1, 2),
        text=text,
        max_draft_len=3,
        max_seq_len=max_seq_len,
    )


def emit(request: LlmRequest, tokens: list[int]) -> None:
    """A step's run, as the sampler hands it over: all but the last token are drafts."""
    request.py_num_accepted_draft_tokens = len(tokens) - 1
    request.py_decoding_iter += 1
    for token in tokens:
        request.add_new_token(token)


def test_a_fresh_request() -> None:
    request = make(max_new_tokens=10, stop_token_ids=(2, 9, 9))
    assert request.get_tokens() == [0, 1, 2, 3, 4]
    assert request.output_token_ids == []
    assert request.py_stop_ids == (1, 2, 9)
    assert request.py_end_id == 1
    assert request.max_length == 15
    assert request.is_first_context_chunk
    assert not request.is_finished
    assert not request.is_generating


def test_ignore_eos_keeps_the_requests_own_stop_ids() -> None:
    assert make(ignore_eos=True).py_stop_ids == ()
    assert make(ignore_eos=True).py_end_id is None
    assert make(ignore_eos=True, stop_token_ids=[8]).py_stop_ids == (8,)


def test_the_longest_sequence_is_capped_by_max_seq_len() -> None:
    assert make(max_new_tokens=10, max_seq_len=12).max_length == 12
    assert make(max_new_tokens=10, max_seq_len=15).max_length == 15


def test_chunks_end_in_generation() -> None:
    request = make(5)
    for size, first, last, left in ((2, True, False, 3), (2, False, False, 1), (1, False, True, 0)):
        request.context_chunk_size = size
        assert (request.is_first_context_chunk, request.is_last_context_chunk) == (first, last)
        request.move_to_next_context_chunk()
        assert request.context_remaining_length == left
        assert request.context_chunk_size == 0
        assert request.is_generating == (left == 0)


def test_a_request_that_ended_while_its_prompt_was_read_stays_ended() -> None:
    request = make(2)
    request.context_chunk_size = 2
    request.finish_by(FinishReason.CANCELLED)
    request.move_to_next_context_chunk()
    assert request.is_finished
    assert request.state == RequestState.GENERATION_COMPLETE


def test_pause_starts_over_with_the_output_as_prompt() -> None:
    request = make(3)
    request.context_chunk_size = 3
    request.move_to_next_context_chunk()
    emit(request, [5, 6])
    request.py_draft_tokens = [1, 2, 3]
    request.py_batch_idx = 4
    request.pause()
    assert request.py_epoch == request.num_preemptions == 1
    assert request.py_draft_tokens == []
    assert request.py_batch_idx is None
    assert request.context_remaining_length == 5
    assert request.is_first_context_chunk
    assert not request.is_generating
    assert request.output_token_ids == [5, 6]
    assert request.py_orig_prompt_len == 3


def test_the_first_finish_reason_stays() -> None:
    request = make()
    request.finish_by(FinishReason.LENGTH)
    request.finish_by(FinishReason.CANCELLED)
    assert request.finish_reason is FinishReason.LENGTH


def test_a_finished_request_takes_no_token_and_no_pause() -> None:
    request = make()
    request.finish_by(FinishReason.END_ID)
    with pytest.raises(ExecutorError, match=r"^request 7 has finished; token 4 came late$"):
        request.add_new_token(4)
    with pytest.raises(ExecutorError, match=r"^request 7 has finished and cannot be paused$"):
        request.pause()
    assert request.output_token_ids == []


def test_drafts_of_each_run_are_told_from_its_last_token() -> None:
    text = RequestText(Letters())
    request = make(2, text=text)
    emit(request, [0])  # the prompt's step
    emit(request, [1, 2, 3])
    emit(request, [4])
    emit(request, [5, 6])
    assert text.drain(final=False) == [
        Segment("a", False),
        Segment("bc", True),
        Segment("de", False),
        Segment("f", True),
        Segment("g", False),
    ]


def test_stop_criterion_is_the_texts() -> None:
    request = make(text=RequestText(Letters(), ("cd",)))
    emit(request, [1, 2])
    assert not request.py_stop_criterion()
    emit(request, [3])
    assert request.py_stop_criterion()
    assert not make().py_stop_criterion()

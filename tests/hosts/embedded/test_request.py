"""LlmRequest: its facts, chunks, tokens, pauses, ends."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LlmRequest, SamplingParams
from mtp_plugin.requests.detokenizer import RequestText, Segment
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import Ending, StopRule
from mtp_plugin.speculative.host import RequestFacts, read_request


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


def emit(request: LlmRequest, tokens: list[int]) -> Ending:
    """A step's run, as the sampler hands it over: all but the last token are drafts."""
    length = request.get_num_tokens()
    ending = request.facts.stop.check(tokens, length, num_drafts=len(tokens) - 1)
    for token in tokens[: ending.length]:
        request.add_new_token(token)
    return ending


def test_tokens_are_taken_back_with_their_text() -> None:
    request = make(text=RequestText(Letters(), stop=("df",)), max_new_tokens=10)
    emit(request, [3, 4])
    assert request.text is not None
    assert request.text.drain(final=False) == [Segment("d", 1), Segment("e", 0)]
    emit(request, [6, 3, 7])
    request.take_back_tokens(2)
    assert (request.output_token_ids, request.text.full_text) == ([3, 4, 6], "deg")
    request.take_back_tokens(0)
    # the text goes on as if they had never been there
    assert emit(request, [3, 5]) == Ending(2, FinishReason.STOP_WORDS)
    assert request.text.drain(final=True) == [Segment("g", 1)]
    assert request.text.full_text == "deg"


def test_what_cannot_be_taken_back() -> None:
    request = make()
    emit(request, [3, 4])
    for count in (3, -1):
        message = f"expected 0 to 2 tokens of a running request to take back, got {count}"
        with pytest.raises(ExecutorError, match=message):
            request.take_back_tokens(count)
    request.finish_by(FinishReason.LENGTH)
    with pytest.raises(ExecutorError, match=r"got 1 of a finished one$"):
        request.take_back_tokens(1)
    assert request.output_token_ids == [3, 4]


@pytest.mark.parametrize(
    ("requested", "limit", "speculates"),
    [(None, 3, True), (0, 0, False), (2, 2, True), (9, 3, True)],
)
def test_the_requested_drafts(requested: int | None, limit: int, speculates: bool) -> None:
    request = make(max_draft_len=requested)
    state = request.py_draft_state
    assert state.limit == state.usable == limit
    assert request.py_disable_speculative_decoding is not speculates


def test_its_facts() -> None:
    """What samplers and managers read of it: its own, not what fields of hosts would say."""
    request = make(max_new_tokens=10, min_tokens=4, stop_token_ids=(2, 9, 9), speculate=False)
    assert request.facts == RequestFacts(
        7,
        StopRule(max_length=15, prompt_len=5, min_tokens=4, end_ids=(1, 2, 9)),
        full_length=15,
        options={
            "max_new_tokens": 10,
            "min_tokens": 4,
            "stop_token_ids": (2, 9, 9),
            "speculate": False,
        },
        stats=request.py_acceptance,
    )
    assert read_request(request, 3) is request.facts
    assert request.sampling_kind
    assert request.py_disable_speculative_decoding
    other = make()
    assert not other.sampling_kind
    assert not other.py_disable_speculative_decoding


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


def test_a_finished_request_takes_no_token_and_no_pause() -> None:
    request = make()
    request.finish_by(FinishReason.END_ID)
    with pytest.raises(ExecutorError, match=r"^request 7 has finished; token 4 came late$"):
        request.add_new_token(4)
    with pytest.raises(ExecutorError, match=r"^request 7 has finished and cannot be paused$"):
        request.pause()
    assert request.output_token_ids == []


def test_drafts_of_each_run_are_counted_without_its_last_token() -> None:
    text = RequestText(Letters())
    request = make(2, text=text)
    emit(request, [0])  # the prompt's step
    emit(request, [3, 4, 5])
    emit(request, [6])
    emit(request, [7, 8])
    assert text.drain(final=False) == [
        Segment("a", 0),
        Segment("d", 1),
        Segment("e", 2),
        Segment("fg", 0),
        Segment("h", 1),
        Segment("i", 0),
    ]

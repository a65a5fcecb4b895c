"""Request, batch and metadata classes for host engines without their own."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_plugin.errors import ExecutorError, MetadataError, RequestError
from mtp_plugin.plugin import (
    FinishReason,
    PlainAttentionMetadata,
    PlainBatch,
    PlainRequest,
    SamplingParams,
)
from mtp_plugin.requests.states import RequestState
from mtp_plugin.requests.stopping import Ending


def make(prompt: list[int], number: int = 0, **options: Any) -> PlainRequest:
    return PlainRequest(number, prompt, SamplingParams(**options), max_seq_len=100, end_ids=(1, 2))


def generating(tokens: list[int], drafts: list[int], number: int = 0) -> PlainRequest:
    request = make(tokens[:-1], number)
    request.move_to_next_context_chunk()
    request.add_new_token(tokens[-1])
    request.py_draft_tokens = drafts
    return request


def test_rows_of_a_batch() -> None:
    contexts = [make([5, 6, 7], 3), make([8], 4)]
    generations = [generating([3, 4, 5, 6], [10, 11], 7), generating([3, 4], [12, 13], 9)]
    batch = PlainBatch(contexts, generations)
    assert batch.request_ids == [3, 4, 7, 9]
    assert batch.seq_lens == [3, 1, 3, 3]
    assert batch.input_ids("cpu").tolist() == [5, 6, 7, 8, 6, 10, 11, 4, 12, 13]
    assert batch.position_ids("cpu").tolist() == [[0, 1, 2, 0, 3, 4, 5, 1, 2, 3]]
    assert batch.draft_tokens("cpu").tolist() == [10, 11, 12, 13]
    assert batch.logit_rows("cpu").tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    lengths = PlainAttentionMetadata(batch, "cpu")
    assert lengths.seq_lens.tolist() == lengths.seq_lens_cuda.tolist() == [3, 1, 3, 3]
    assert lengths.kv_lens_cuda.tolist() == [3, 1, 6, 4]
    assert (lengths.num_seqs, lengths.num_contexts, lengths.num_generations) == (4, 2, 2)
    assert lengths.num_ctx_tokens == 4
    assert lengths.request_ids == [3, 4, 7, 9]


def test_rows_of_a_prompt_that_a_host_cuts() -> None:
    request = make([5, 6, 7, 8, 9])
    request.context_chunk_size = 2
    assert (request.is_first_context_chunk, request.is_last_context_chunk) == (True, False)
    request.move_to_next_context_chunk()
    assert request.state is RequestState.CONTEXT_INIT
    request.context_chunk_size = 3
    batch = PlainBatch([request], [])
    assert (request.is_first_context_chunk, request.is_last_context_chunk) == (False, True)
    assert batch.input_ids("cpu").tolist() == [7, 8, 9]
    assert batch.position_ids("cpu").tolist() == [[2, 3, 4]]
    assert batch.logit_rows("cpu").tolist() == [2]
    assert PlainAttentionMetadata(batch, "cpu").kv_lens_cuda.tolist() == [5]
    request.move_to_next_context_chunk()
    assert request.state is RequestState.GENERATION_IN_PROGRESS


def test_a_request_ends_once() -> None:
    request = generating([5, 6], [7, 8])
    request.finish_by(FinishReason.END_ID)
    request.finish_by(FinishReason.LENGTH)
    assert (request.is_finished, request.finish_reason) == (True, FinishReason.END_ID)
    assert request.output_token_ids == [6]
    assert request.py_draft_tokens == []
    with pytest.raises(ExecutorError, match="request 0 has finished; token 9 came late"):
        request.add_new_token(9)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "request 7: expected at least one prompt token, got none"),
        ([3], {"stop": "a"}, r"request 7: stop=\('a',\) needs a watch, got None"),
        (
            [3],
            {"speculate": False, "max_draft_len": 1},
            "request 7: the loop of PlainRequest does not support speculate=False, max_draft_len=1",
        ),
        (
            [3],
            {"prompt_logprobs": 1},
            "request 7: the loop of PlainRequest does not support prompt_logprobs=1",
        ),
    ],
)
def test_what_a_plain_request_refuses(
    prompt: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        make(prompt, 7, **options)


def test_a_watch_finds_stop_strings() -> None:
    def ends(token: int, *, from_draft: bool) -> bool:
        return token == 4 and not from_draft

    request = PlainRequest(0, [3], SamplingParams(stop="a"), max_seq_len=9, watch=ends)
    assert request.facts.stop.check([3, 4, 5], 1) == Ending(2, FinishReason.STOP_WORDS)


@pytest.mark.parametrize("length", [100, 101])
def test_a_prompt_that_fills_the_sequence_is_refused(length: int) -> None:
    make([5] * 99)
    with pytest.raises(
        RequestError, match=f"the prompt has {length} tokens, max_seq_len is 100 and"
    ):
        make([5] * length)


def test_bad_words_must_be_ids_here() -> None:
    for name in ("bad_words", "bad"):
        with pytest.raises(RequestError, match=f"^request 0: {name}='b': expected its token ids$"):
            make([5], **{name: [[3], "b"]})


@pytest.mark.parametrize("chunk", [-1, 0, 4])
def test_a_chunk_that_is_none_of_its_prompt_is_refused(chunk: int) -> None:
    request = make([5, 6, 7, 8, 9], 3)
    request.context_chunk_size = 2
    request.move_to_next_context_chunk()
    request.context_chunk_size = chunk
    message = f"request 3: expected a context_chunk_size from 1 to the 3 tokens .*, got {chunk}"
    with pytest.raises(MetadataError, match=message):
        PlainBatch([request], [])
    with pytest.raises(MetadataError, match="request 3: 3 tokens of its prompt are left, so it is"):
        PlainBatch([], [request])

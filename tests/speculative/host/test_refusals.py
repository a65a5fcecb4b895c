"""Unsupported options of a host engine's request that its executor did not check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.host import read_request
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks

K = 2


def foreign(request_id: int = 4, **sampling: Any) -> LlmRequest:
    """A request whose options are in the fields of TensorRT-LLM."""
    request = LlmRequest(request_id, [1, 2, 3], SamplingParams(), max_draft_len=K, max_seq_len=30)
    request.sampling_config = SimpleNamespace(**sampling)
    request.py_seq_slot = 0
    request.context_chunk_size = 3
    del request.facts
    return request


def sampler(**options: Any) -> MTPSampler:
    args = SimpleNamespace(max_num_sequences=2, max_seq_len=30)
    return MTPSampler(args, nextn=K, device="cpu", kernels="reference", **options)


REFUSED = [
    pytest.param({"min_length": [5]}, "min_length=5", id="min_length"),
    pytest.param({"min_length": 5}, "min_length=5", id="a_number"),
    pytest.param({"repetition_penalty": [1.5]}, "repetition_penalty=1.5", id="penalty"),
    pytest.param({"beam_width": 2, "min_length": [2]}, "min_length=2", id="several"),
]


@pytest.mark.parametrize(("sampling", "message"), REFUSED)
@pytest.mark.parametrize("always_greedy", [False, True])
def test_what_needs_edited_logits_is_refused(
    sampling: dict[str, Any], message: str, always_greedy: bool
) -> None:
    """By a sampler without a worker that serves these options."""
    piece = sampler(hooks=SamplerHooks(always_greedy=always_greedy))
    assert "min_tokens" not in piece.served_options
    with pytest.raises(ConfigError, match=f"request 4: not supported with MTP: .*{message}"):
        piece.validate_request(foreign(**sampling))


@pytest.mark.parametrize(("sampling", "message"), REFUSED)
def test_a_request_that_was_never_validated_ends(sampling: dict[str, Any], message: str) -> None:
    piece, request = sampler(), foreign(**sampling)
    batch = SimpleNamespace(context_requests=[request], generation_requests=[])
    row = {"dtype": torch.int32}
    state = piece.sample_async(
        batch,
        {
            "new_tokens": torch.tensor([[7, -1, -1]], **row),
            "new_tokens_lens": torch.tensor([1], **row),
            "next_draft_tokens": torch.tensor([[8, 9]], **row),
            "next_new_tokens": torch.tensor([[7, 8, 9]], **row),
        },
    )
    request.move_to_next_context_chunk()
    (result,) = piece.update_requests(state)
    assert (result.token_ids, result.finish_reason) == ([], FinishReason.ERROR)
    assert message in request.py_error
    assert request.output_token_ids == []


@pytest.mark.parametrize("length", [None, 0, 1, [0], [1], []])
def test_lengths_that_change_nothing_pass(length: Any) -> None:
    """Every run has a token."""
    request = foreign(min_length=length)
    sampler().validate_request(request)
    assert dict(read_request(request).options) == {}

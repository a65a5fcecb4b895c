"""Log-probabilities in the sampler: which requests want them, what counts, what is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_INDEX,
    TOKEN_INDEX,
    TOP_IDS_INDEX,
    TOP_VALUES_INDEX,
    VALUE_INDEX,
    Logprob,
)
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.sampler import MTPSampler, SampleStateMTP
from tests.speculative.test_sampler import K, Request, S, batch, outputs

VALUES = {7: -0.5, 8: -1.5, 9: -2.5}


def asking(slot: int, number: int | None, **params: Any) -> Request:
    request = Request(slot)
    request.facts = RequestFacts.of(
        request.request_id,
        SamplingParams(max_new_tokens=50, logprobs=number, **params),
        prompt_len=3,
        max_seq_len=64,
    )
    return request


def make(**options: Any) -> MTPSampler:
    sizes = SimpleNamespace(max_seq_len=64, max_num_sequences=S)
    return MTPSampler(sizes, nextn=K, device="cpu", **{"served_options": {"logprobs"}, **options})


def outputs_with_logprobs(*runs: list[int]) -> dict[str, Any]:
    """What a worker returns: tokens 7 to 9, of which 7 is the most likely."""
    entries = torch.zeros(len(runs), K + 1, ENTRY_WIDTH, dtype=torch.int32)
    entries[..., TOP_IDS_INDEX:TOP_VALUES_INDEX] = -1
    entries[..., TOKEN_INDEX] = -1
    values = entries.view(torch.float32)
    for row, run in enumerate(runs):
        for place, token in enumerate(run):
            entries[row, place, TOKEN_INDEX] = token
            entries[row, place, RANK_INDEX] = token - 6
            values[row, place, VALUE_INDEX] = VALUES[token]
            for number, (other, value) in enumerate(VALUES.items()):
                entries[row, place, TOP_IDS_INDEX + number] = other
                values[row, place, TOP_VALUES_INDEX + number] = value
    return outputs(*runs) | {"logprob_entries": entries}


def test_tokens_and_the_most_likely_ones() -> None:
    requests = [asking(0, 2), asking(1, 0), asking(2, None)]
    piece = make()
    given = outputs_with_logprobs([9, 7], [8], [7, 7, 7])
    state = piece.sample_async(batch([], requests), given)
    given["logprob_entries"].fill_(-777)  # the next step writes there
    results = piece.update_requests(state)
    first, second = Logprob(-0.5, 1), Logprob(-1.5, 2)
    assert results[0].logprobs == [
        {9: Logprob(-2.5, 3), 7: first, 8: second},
        {7: first, 8: second},
    ]
    assert results[1].logprobs == [{8: second}]
    assert results[2].logprobs is None


def test_a_stop_drops_what_follows_it() -> None:
    request = asking(0, 1, stop_token_ids=(8,))
    piece = make()
    (result,) = piece.update_requests(
        piece.sample_async(batch([], [request]), outputs_with_logprobs([7, 8, 9, 9]))
    )
    assert result.token_ids == [7, 8]
    assert [list(one) for one in result.logprobs] == [[7], [8, 7]]


def test_each_request_has_its_own_after_another_finished() -> None:
    requests = [asking(0, 0), asking(1, 0), asking(2, 0)]
    piece = make()
    state = piece.sample_async(batch([], requests), outputs_with_logprobs([7], [8], [9]))
    requests[0].finish_by(FinishReason.CANCELLED, 0)
    results = piece.update_requests(state)
    assert [list(result.logprobs[0]) for result in results] == [[8], [9]]


def test_what_a_request_keeps_is_its_own_memory() -> None:
    """Whatever else the step returned: outputs of thousands of tokens are kept."""
    runs = [[9, 7], [8], [7, 7, 7]]
    piece = make()
    requests = [asking(slot, 0) for slot in range(3)]
    results = piece.update_requests(
        piece.sample_async(batch([], requests), outputs_with_logprobs(*runs))
    )
    for result, run in zip(results, runs, strict=True):
        (part,) = result.logprobs._parts
        assert part._entries.untyped_storage().nbytes() == len(run) * ENTRY_WIDTH * 4


def test_a_host_that_made_the_state_itself() -> None:
    request = asking(0, 0)
    piece = make()
    state = piece.sample_async(batch([], [request]), outputs_with_logprobs([7, 9]))
    own = SampleStateMTP(scheduled_requests=batch([], [request]), host=state.host)
    (result,) = piece.update_requests(own)
    assert [list(one) for one in result.logprobs] == [[7], [9]]


def test_where_a_host_keeps_them() -> None:
    class Result:
        def __init__(self) -> None:
            self.log_probs: list[Any] = []

        def append_log_probs(self, log_probs: list[Any]) -> None:
            self.log_probs.append(log_probs)

    request = asking(0, 0)
    request.py_result = Result()
    piece = make()
    piece.update_requests(piece.sample_async(batch([], [request]), outputs_with_logprobs([7, 8])))
    assert request.py_result.log_probs == [[[{7: Logprob(-0.5, 1)}]], [[{8: Logprob(-1.5, 2)}]]]


def test_nothing_is_copied_without_a_request_for_it() -> None:
    piece = make()
    state = piece.sample_async(batch([], [asking(0, None)]), outputs_with_logprobs([7]))
    assert state.host.log_probs is None


def test_a_step_without_logprobs_fails_only_requests_that_want_them() -> None:
    requests = [asking(0, 1), asking(1, None)]
    piece = make()
    results = piece.update_requests(piece.sample_async(batch([], requests), outputs([7], [8])))
    assert [result.token_ids for result in results] == [[], [8]]
    assert requests[0].finish_reason is FinishReason.ERROR
    assert "logprobs" in requests[0].py_error


def test_r31_unserved_options_are_refused_by_name() -> None:
    """R31: a plugin whose worker gives none, and all that it does not; of the prompt the host gives
    them."""
    piece = make(served_options=())
    with pytest.raises(ConfigError, match="request 100: not supported with MTP: logprobs=2"):
        piece.validate_request(asking(0, 2, prompt_logprobs=1))
    options = {"temperature": 1.0, "min_p": 0.2, "bad_words": [[3, 4]]}
    with pytest.raises(ConfigError, match="request 100: not supported with MTP: ") as refused:
        piece.validate_request(asking(0, 2, prompt_logprobs=1, **options))
    message = str(refused.value)
    assert all(f"{name}=" in message for name in ("logprobs", *options))
    assert "prompt_logprobs" not in message


@pytest.mark.parametrize(("mode", "served"), [("raw", {"logprobs_mode"}), ("processed", set())])
def test_r31_another_logprobs_mode_than_the_configs_is_refused(mode, served) -> None:
    """Also without an admission in front, as in a loop of one's own."""
    given = make(served_options={"logprobs"} | ({"logprobs_mode"} - served))
    given.validate_request(asking(0, 2, logprobs_mode=mode))
    other = make(served_options={"logprobs"} | served)
    other.validate_request(asking(0, 2))
    with pytest.raises(ConfigError, match=f"not supported with MTP: logprobs_mode='{mode}'"):
        other.validate_request(asking(0, 2, logprobs_mode=mode))

"""The rows of request options that Megatron's sampling reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.megatron.sampling import sampling_class
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import sample_tokens
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import REQUEST_COLUMNS, TableColumns
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.speculative.state.slot_table import SlotTable

MAX_REQUESTS, VOCAB, SEED = 6, 50, 1234
COLUMNS = TableColumns(REQUEST_COLUMNS)
OPTIONS = ((1.0, 0, 0.0), (0.7, 1, 0.0), (1.3, 5, 0.0), (0.9, 0, 0.8))
Request = tuple[int, float, int, float]


def request(number: int, options: int | None = None) -> Request:
    return (number, *OPTIONS[(number if options is None else options) % len(OPTIONS)])


def make_sampling() -> Any:
    sampling = sampling_class(object, "reference")()
    sampling._rng = torch.Generator().manual_seed(SEED)
    return sampling


def make_context(requests: Sequence[Request], num_paused: int = 0) -> SimpleNamespace:
    """The fields of Megatron's context, all on the CPU; paused requests come first."""
    ids = torch.full((MAX_REQUESTS,), -1, dtype=torch.int32)
    metadata = {
        "temperature": torch.ones(MAX_REQUESTS),
        "top_k": torch.zeros(MAX_REQUESTS, dtype=torch.int32),
        "top_p": torch.zeros(MAX_REQUESTS),
    }
    for index, (request_id, *options) in enumerate(requests):
        ids[index] = request_id
        if index >= num_paused:
            for values, value in zip(metadata.values(), options, strict=True):
                values[index - num_paused] = value
    return SimpleNamespace(
        config=SimpleNamespace(async_sched_mode=SimpleNamespace(value="legacy")),
        request_ids=ids,
        active_request_metadata=metadata,
        request_kv_length_offsets=10 + torch.arange(MAX_REQUESTS, dtype=torch.int32),
        request_query_lengths=torch.ones(MAX_REQUESTS, dtype=torch.int32),
        paused_request_count=num_paused,
        total_request_count=len(requests),
        num_speculative_tokens=0,
    )


def sample(sampling: Any, requests: Sequence[Request], num_paused: int = 0) -> list[int]:
    context, count = make_context(requests, num_paused), len(requests) - num_paused
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = sampling.sample_kernel(logits, count, context, no_top_k=False, no_top_p=False)
    seed, position = sampling._rng.initial_seed(), 10 + num_paused
    assert torch.equal(tokens, reference(logits, requests[num_paused:], seed, position))
    return list(tokens.tolist())


def reference(
    logits: torch.Tensor, requests: Sequence[Request], seed: int, position: int
) -> torch.Tensor:
    """Sample with a table whose rows are built for this step alone."""
    rows = [
        COLUMNS.row(
            {
                "temperature": 0.0 if top_k == 1 else temperature,
                "top_k": top_k,
                "top_p": top_p or 1.0,
                "seed": seed_words(None, number, seed),
                "number": number,
            }
        )
        for number, temperature, top_k, top_p in requests
    ]
    count = torch.arange(len(rows))
    slots = SlotRows(torch.tensor(rows, dtype=torch.int32), count, COLUMNS)
    rows_of_logits = LogitRows(0, 1, position + count)
    return sample_tokens(logits, rows_of_logits, slots, backend=Backend.TORCH).to(torch.int64)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each write to a slot table."""
    counts: list[int] = []
    write = SlotTable.write

    def counted(self: SlotTable, slots: Any) -> torch.Tensor:
        counts.append(len(slots))
        return write(self, slots)

    monkeypatch.setattr(SlotTable, "write", counted)
    return counts


def test_the_row_of_a_request_is_written_once(written: list[int]) -> None:
    sampling = make_sampling()
    first = [request(number) for number in range(4)]
    for requests, num_paused in (
        (first, 0),
        (first, 0),
        (first, 2),
        ([first[3], first[0], first[2]], 0),  # moved; request 1 has finished
        ([*first, request(7)], 1),
    ):
        sample(sampling, requests, num_paused)
    assert written == [4, 1]


def test_rows_of_finished_requests_are_used_again(written: list[int]) -> None:
    sampling, rng = make_sampling(), random.Random(0)
    active: list[Request] = []
    for number in range(200):
        active = rng.sample(active, rng.randint(0, min(len(active), MAX_REQUESTS - 1)))
        active.insert(rng.randint(0, len(active)), request(number))
        sample(sampling, active)
    assert sum(written) == 200


def test_an_id_that_returns_with_other_options_gets_another_row() -> None:
    sampling = make_sampling()
    requests = [request(number) for number in range(4)]
    others = [request(number, number + 1) for number in range(4)]
    assert sample(sampling, requests) != sample(sampling, others)
    sample(sampling, requests)


def test_requests_that_share_an_id_do_not_share_a_row_with_others() -> None:
    sampling = make_sampling()
    sample(sampling, [request(1), request(1), request(2)])
    sample(sampling, [request(3), request(4), request(1), request(2)])


def test_steps_with_and_without_inference_mode() -> None:
    sampling = make_sampling()
    with torch.inference_mode():
        sample(sampling, [request(0)])
    sample(sampling, [request(0), request(1)])


def test_another_seed_gives_other_rows() -> None:
    sampling = make_sampling()
    requests = [request(number, 0) for number in range(MAX_REQUESTS)]
    tokens = sample(sampling, requests)
    sampling._rng.manual_seed(SEED + 1)
    assert sample(sampling, requests) != tokens
    sampling._rng.manual_seed(SEED)
    assert sample(sampling, requests) == tokens

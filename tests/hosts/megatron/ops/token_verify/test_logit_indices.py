"""Story, reference and kernel of the rows whose logits are needed."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron.ops.token_verify import launch, required_logit_indices
from mtp_plugin.kernels.backend import Backend
from tests.doors import check_strided_arguments
from tests.hosts.megatron.ops.token_verify import story
from tests.speculative.ops.on_device import (
    DEVICE,
    INDEX_DTYPES,
    forbid_launches,
    poisoned,
    replay_in_graph,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


@both
def test_two_decodes_and_two_prompts(backend: Backend) -> None:
    """`0 1 | 2 3 | 4 5 6 | 7`: all rows of the first two, the last ones of the others."""
    status, lengths = vector([0, 0, 1, 1], torch.int32), vector([2, 2, 3, 1], torch.int32)
    expected = vector([0, 1, 2, 3, 6, 7])
    call = partial(required_logit_indices, backend=backend)
    assert torch.equal(call(status, lengths, 2, 2), expected)
    assert torch.equal(call(status, lengths, 2, 2, num_speculative_tokens=1), expected)
    out = poisoned(8, dtype=torch.int32)
    assert call(status, lengths, 2, 2, out=out) is out
    assert torch.equal(out, vector([0, 1, 2, 3, 6, 7, 0, 0], torch.int32))


@both
@given(
    num_decodes=st.integers(0, 6),
    num_prefills=st.integers(0, 6),
    ordered=st.booleans(),
    num_drafts=st.sampled_from([0, 1, 4, 40]) | st.none(),
    surplus=st.sampled_from([0, 1, 70]) | st.none(),
    dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    backend: Backend,
    num_decodes: int,
    num_prefills: int,
    ordered: bool,
    num_drafts: int | None,
    surplus: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also decode requests of different lengths, and prefill requests in between."""
    dice = random.Random(seed)
    rows = (dice.randrange(5) if num_drafts is None else num_drafts + 1 for _ in range(num_decodes))
    requests = [(True, length) for length in rows]
    requests += [(False, dice.randrange(0, 50)) for _ in range(num_prefills)]
    if not ordered:
        dice.shuffle(requests)
    entries = len(story.rows_with_logits(requests))
    out = None if surplus is None else poisoned(entries + surplus, dtype=dtype)
    # rows behind the batch belong to nobody
    indices = required_logit_indices(
        vector([0 if is_decode else 1 for is_decode, _ in requests] + [0], dtype),
        vector([length for _, length in requests] + [1000], dtype),
        num_decodes,
        num_prefills,
        num_speculative_tokens=num_drafts,
        out=out,
        backend=backend,
    )
    expected = story.rows_with_logits(requests, entries + (surplus or 0))
    assert torch.equal(indices, vector(expected, indices.dtype))
    assert indices.dtype == (torch.int64 if surplus is None else dtype)


@both
def test_a_padded_graph_shape(backend: Backend) -> None:
    """Two real decode requests in a shape of four: entries of padding point at row 0."""
    status, lengths = vector([0] * 4, torch.int32), vector([3, 3, 0, 0], torch.int32)
    indices = required_logit_indices(
        status, lengths, 4, 0, num_speculative_tokens=2, backend=backend
    )
    assert torch.equal(indices, vector([0, 1, 2, 3, 4, 5] + [0] * 6))


@both
def test_more_rows_than_the_host_counted_stay_out(backend: Backend) -> None:
    out = poisoned(6)
    status, lengths = vector([0, 0, 1]), vector([3, 3, 9])
    required_logit_indices(status, lengths, 2, 1, out=out[:4], backend=backend)
    assert torch.equal(out, vector([0, 1, 2, 3, -777, -777]))


@both
def test_an_empty_batch_launches_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
    empty = vector([])
    assert required_logit_indices(empty, empty, 0, 0, backend=backend).shape == (0,)
    out = poisoned(2)
    required_logit_indices(empty, empty, 0, 0, out=out, backend=backend)
    assert torch.equal(out, vector([0, 0]))


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lengths": vector([2])}, "query_lengths: expected .* at least 2 entries"),
        ({"prefill_status": vector([0.0, 1.0], torch.float32)}, "prefill_status: .*float32"),
        ({"num_decode": -1}, "num_decode: expected 0 or more, got -1"),
        ({"num_speculative_tokens": -2}, "num_speculative_tokens: expected 0 or more, got -2"),
        ({"out": poisoned(2)}, "out: expected .* at least 3 entries"),
        ({"out": poisoned(3, dtype=torch.bool)}, "out: expected .*got torch.bool"),
    ],
    ids=["lengths", "status", "count", "drafts", "short", "dtype"],
)
def test_calls_that_do_not_fit(backend: Backend, change: dict, message: str) -> None:
    arguments = {
        "prefill_status": vector([0, 1]),
        "query_lengths": vector([2, 5]),
        "num_decode": 1,
        "num_prefill": 1,
        "num_speculative_tokens": 1,
    }
    with pytest.raises(TensorContractError, match=message):
        required_logit_indices(**(arguments | change), backend=backend)


@both
def test_strided_arguments(backend: Backend) -> None:
    """Nothing is copied on the way, so what is not in one piece is refused by name."""
    arguments = {
        "prefill_status": vector([0, 1, 1]),
        "query_lengths": vector([2, 5, 3]),
        "num_decode": 1,
        "num_prefill": 2,
        "out": poisoned(4),
    }
    names = "prefill_status", "query_lengths", "out"
    refused = {name: f"{name}: expected a contiguous" for name in names}
    check_strided_arguments(required_logit_indices, arguments, refused=refused, backend=backend)


@pytest.mark.gpu
def test_graph_replays_with_changed_lengths() -> None:
    num_decodes, num_prefills, num_drafts = 300, 60, 3
    status = vector([0] * num_decodes + [1] * num_prefills, torch.int32)
    lengths = vector([num_drafts + 1] * num_decodes + [7] * num_prefills, torch.int32)
    out = poisoned(num_decodes * (num_drafts + 1) + num_prefills + 9)

    def change() -> None:
        lengths[num_decodes:] = torch.randint(
            1, 2048, (num_prefills,), dtype=torch.int32, device=DEVICE
        )
        out.fill_(-777)

    def step() -> torch.Tensor:
        return required_logit_indices(
            status, lengths, num_decodes, num_prefills, out=out, backend=Backend.TRITON
        )

    replay_in_graph(step, change)
    expected = required_logit_indices(
        status,
        lengths,
        num_decodes,
        num_prefills,
        num_speculative_tokens=num_drafts,
        backend=Backend.TORCH,
    )
    assert torch.equal(out[:-9], expected)
    assert not out[-9:].any()


@pytest.mark.gpu
@both
def test_a_graph_cannot_read_lengths_back(backend: Backend) -> None:
    status, lengths = vector([0, 1]), vector([2, 5])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        lengths.add_(0)  # an empty capture would warn
        with pytest.raises(TensorContractError, match="expected num_speculative_tokens or out"):
            required_logit_indices(status, lengths, 1, 1, backend=backend)

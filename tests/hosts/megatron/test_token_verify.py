"""`verify_speculative_tokens` and `required_logit_indices` match the example."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import token_verify_triton
from mtp_plugin.hosts.megatron.token_verify import (
    required_logit_indices,
    verify_speculative_tokens,
)
from mtp_plugin.ops.backend import Backend
from tests.hosts.megatron import example
from tests.hosts.megatron.batches import flat_tokens, random_decodes
from tests.hosts.megatron.example import Decode
from tests.op_arguments import check_arguments
from tests.ops.letters import ids
from tests.ops.on_device import (
    DEVICE,
    INDEX_DTYPES,
    forbid_launches,
    poisoned,
    replay_in_graph,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


@both
@pytest.mark.parametrize(
    ("read", "outputs", "accepted"),
    [
        ("abcd", "bcxy", 3),
        ("abcd", "bcde", 4),
        ("abcd", "xcde", 1),  # a match after a miss does not count
        ("aaaa", "aaba", 3),
        ("abb.", "bbzz", 3),  # a missing draft
        ("a", "b", 1),
    ],
    ids=["two_of_three", "all", "none", "repeated", "missing", "no_drafts"],
)
def test_verify_letters(backend: Backend, read: str, outputs: str, accepted: int) -> None:
    assert Decode(ids(read), ids(outputs)).num_accepted() == accepted
    last, mask, tokens = verify_speculative_tokens(
        vector(ids(read)), vector(ids(outputs)), 1, 0, len(read) - 1, backend=backend
    )
    assert torch.equal(last, vector([accepted - 1]))
    assert torch.equal(mask, vector(i < accepted for i in range(len(read))).to(torch.bool))
    assert torch.equal(tokens, vector(ids(read)))


@both
def test_three_decodes_and_two_prefills(backend: Backend) -> None:
    """1, 2 and 0 of 2 drafts are accepted; requests do not affect each other."""
    read, outputs = ids("abc def ghi p q"), ids("bxy efz xxx r s")
    inputs = vector([read])
    verified = verify_speculative_tokens(inputs, vector(outputs), 3, 2, 2, backend=backend)
    assert verified.input_tokens.shape == (11,)
    assert verified.input_tokens.data_ptr() == inputs.data_ptr()
    assert torch.equal(verified.last_one_indices, vector([1, 5, 6, 9, 10]))
    expected = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert torch.equal(verified.accepted_tokens_mask, vector(expected).to(torch.bool))


@both
@settings(max_examples=20)
@given(
    num_decodes=st.integers(0, 5) | st.just(37),
    num_prefills=st.integers(0, 4) | st.just(33),
    num_padding=st.integers(0, 3) | st.just(40),
    num_drafts=st.sampled_from([0, 1, 3, 4]),
    dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 2**32),
)
def test_verify_any_batch(
    backend: Backend,
    num_decodes: int,
    num_prefills: int,
    num_padding: int,
    num_drafts: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    rng = random.Random(seed)
    decodes = random_decodes(rng, num_decodes, num_drafts)
    prefills = [rng.randrange(3) for _ in range(num_prefills)]
    inputs, outputs = flat_tokens(decodes, prefills, [1] * num_padding, dtype)
    out = (
        poisoned(num_decodes + num_prefills),
        poisoned(inputs.shape[0], dtype=torch.bool),
    )
    before = inputs.clone(), outputs.clone()
    verified = verify_speculative_tokens(
        inputs, outputs, num_decodes, num_prefills, num_drafts, out=out, backend=backend
    )
    last, mask = example.verify(decodes, num_prefills, num_padding)
    assert torch.equal(verified.last_one_indices, vector(last))
    assert torch.equal(verified.accepted_tokens_mask, vector(mask, torch.bool))
    assert verified.last_one_indices is out[0]
    assert verified.accepted_tokens_mask is out[1]
    assert torch.equal(inputs, before[0])
    assert torch.equal(outputs, before[1])


@both
def test_inputs_and_outputs_may_differ_in_type(backend: Backend) -> None:
    arguments = vector(ids("abc"), torch.int32), vector(ids("bcd"), torch.int64), 1, 0, 2
    verified = verify_speculative_tokens(*arguments, backend=backend)
    assert torch.equal(verified.last_one_indices, vector([2]))


@both
def test_verify_empty_batch_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch, token_verify_triton)
    empty = vector([])
    last, mask, tokens = verify_speculative_tokens(empty, empty, 0, 0, 3, backend=backend)
    assert last.shape == mask.shape == tokens.shape == (0,)
    assert (last.dtype, mask.dtype) == (torch.int64, torch.bool)
    out = poisoned(0), poisoned(2, dtype=torch.bool)
    verify_speculative_tokens(vector([5, 5]), empty, 0, 0, 3, out=out, backend=backend)
    assert not out[1].any()


def arguments() -> dict:
    return {
        "input_tokens": vector([1, 2, 3, 4]),
        "output_tokens": vector([1, 2, 3, 4]),
        "num_decode_requests": 1,
        "num_prefill_requests": 1,
        "num_speculative_tokens": 2,
        "out": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": vector(range(8)).view(2, 4)}, r"input_tokens: .*got .*\[2, 4\]"),
        ({"num_decode_requests": -1}, "num_decode_requests: expected an integer >= 0, got -1"),
        ({"num_prefill_requests": -1}, "num_prefill_requests: expected an integer >= 0, got -1"),
        (
            {"num_speculative_tokens": -1},
            "num_speculative_tokens: expected .* >= 0, got -1",
        ),
        ({"out": (poisoned(3), poisoned(4, dtype=torch.bool))}, r"out, last_one_indices: .*\[2\]"),
        ({"out": (poisoned(2), poisoned(4))}, "out, accepted_tokens_mask: .*torch.bool"),
        ({"out": (poisoned(4)[::2], poisoned(4))}, "out, last_one_indices: .*contiguous"),
        ({"out": (poisoned(2), poisoned(8, dtype=torch.bool)[::2])}, "out, accepted_.*contiguous"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_verify_wrong_arguments_are_refused(change: dict, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        verify_speculative_tokens(**(arguments() | change), backend=Backend.TORCH)


@both
def test_verify_arguments(backend: Backend) -> None:
    """Nothing is copied: tensors that are not contiguous are refused by name, like wrong ones."""
    names = "input_tokens", "output_tokens"
    refused = {name: f"{name}: expected contiguous" for name in names}
    free = {"input_tokens: dimensions"}  # one row of tokens
    check_arguments(
        verify_speculative_tokens, arguments(), refused=refused, free=free, backend=backend
    )


@pytest.mark.gpu
def test_verify_graph_replays_with_changed_tokens() -> None:
    num_decodes, num_drafts, num_prefills = 256, 3, 5
    total = num_decodes * (num_drafts + 1) + num_prefills

    def tokens() -> torch.Tensor:
        return torch.randint(0, 3, (total,), device=DEVICE)

    inputs, outputs = tokens(), tokens()
    out = poisoned(num_decodes + num_prefills), poisoned(total, dtype=torch.bool)
    sizes = num_decodes, num_prefills, num_drafts

    def change() -> None:
        for tensor in (inputs, outputs):
            tensor.copy_(tokens())
        out[0].fill_(-777)
        out[1].fill_(True)

    def step() -> None:
        verify_speculative_tokens(inputs, outputs, *sizes, out=out, backend=Backend.TRITON)

    replay_in_graph(step, change)
    expected = verify_speculative_tokens(inputs, outputs, *sizes, backend=Backend.TORCH)
    assert torch.equal(out[0], expected.last_one_indices)
    assert torch.equal(out[1], expected.accepted_tokens_mask)


# --- required_logit_indices ---


@both
def test_logit_indices_two_decodes_and_two_prompts(backend: Backend) -> None:
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
@settings(max_examples=20)
@given(
    num_decodes=st.integers(0, 6),
    num_prefills=st.integers(0, 6),
    ordered=st.booleans(),
    num_drafts=st.sampled_from([0, 1, 4, 40]) | st.none(),
    surplus=st.sampled_from([0, 1, 70]) | st.none(),
    dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 2**32),
)
def test_logit_indices_any_batch(
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
    rng = random.Random(seed)
    rows = (rng.randrange(5) if num_drafts is None else num_drafts + 1 for _ in range(num_decodes))
    requests = [(True, length) for length in rows]
    requests += [(False, rng.randrange(0, 50)) for _ in range(num_prefills)]
    if not ordered:
        rng.shuffle(requests)
    entries = len(example.rows_with_logits(requests))
    out = None if surplus is None else poisoned(entries + surplus, dtype=dtype)
    # rows after the batch belong to no request
    indices = required_logit_indices(
        vector([0 if is_decode else 1 for is_decode, _ in requests] + [0], dtype),
        vector([length for _, length in requests] + [1000], dtype),
        num_decodes,
        num_prefills,
        num_speculative_tokens=num_drafts,
        out=out,
        backend=backend,
    )
    expected = example.rows_with_logits(requests, entries + (surplus or 0))
    assert torch.equal(indices, vector(expected, indices.dtype))
    assert indices.dtype == (torch.int64 if surplus is None else dtype)


@both
def test_logit_indices_a_padded_graph_shape(backend: Backend) -> None:
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
def test_logit_indices_empty_batch_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch, token_verify_triton)
    empty = vector([])
    assert required_logit_indices(empty, empty, 0, 0, backend=backend).shape == (0,)
    out = poisoned(2)
    required_logit_indices(empty, empty, 0, 0, out=out, backend=backend)
    assert torch.equal(out, vector([0, 0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_decode": -1}, "num_decode: expected an integer >= 0, got -1"),
        (
            {"num_speculative_tokens": -2},
            "num_speculative_tokens: expected .* >= 0, got -2",
        ),
        ({"out": poisoned(2)}, r"out: expected .*\[>= 3\]"),
        ({"out": poisoned(3, dtype=torch.bool)}, "out: expected .*got torch.bool"),
    ],
    ids=["count", "drafts", "short", "dtype"],
)
def test_logit_indices_wrong_arguments_are_refused(change: dict, message: str) -> None:
    arguments = {
        "prefill_status": vector([0, 1]),
        "query_lengths": vector([2, 5]),
        "num_decode": 1,
        "num_prefill": 1,
        "num_speculative_tokens": 1,
    }
    with pytest.raises(TensorContractError, match=message):
        required_logit_indices(**(arguments | change), backend=Backend.TORCH)


@both
def test_logit_indices_arguments(backend: Backend) -> None:
    """Nothing is copied: tensors that are not contiguous are refused by name, like wrong ones."""
    arguments = {
        "prefill_status": vector([0, 1, 1]),
        "query_lengths": vector([2, 5, 3]),
        "num_decode": 1,
        "num_prefill": 2,
        "out": poisoned(4),
    }
    names = "prefill_status", "query_lengths", "out"
    refused = {name: f"{name}: expected contiguous" for name in names}
    free = {"out: shorter"}
    check_arguments(required_logit_indices, arguments, refused=refused, free=free, backend=backend)


@pytest.mark.gpu
def test_logit_indices_graph_replays_with_changed_lengths() -> None:
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

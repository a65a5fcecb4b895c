"""Story, reference and kernel of the verification."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron.ops.token_verify import launch, verify_speculative_tokens
from mtp_plugin.kernels.backend import Backend
from tests.doors import check_strided_arguments
from tests.hosts.megatron.ops.token_verify import story
from tests.hosts.megatron.ops.token_verify.batches import flat_tokens, random_decodes
from tests.hosts.megatron.ops.token_verify.story import Decode
from tests.speculative.ops.letters import ids
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
@pytest.mark.parametrize(
    ("read", "emitted", "standing"),
    [
        ("abcd", "bcxy", 3),
        ("abcd", "bcde", 4),
        ("abcd", "xcde", 1),  # a match behind a miss does not count
        ("aaaa", "aaba", 3),
        ("abb.", "bbzz", 3),  # a missing draft
        ("a", "b", 1),
    ],
    ids=["two_of_three", "all", "none", "repeated", "missing", "no_drafts"],
)
def test_letters(backend: Backend, read: str, emitted: str, standing: int) -> None:
    assert Decode(ids(read), ids(emitted)).num_standing() == standing
    last, mask, tokens = verify_speculative_tokens(
        vector(ids(read)), vector(ids(emitted)), 1, 0, len(read) - 1, backend=backend
    )
    assert torch.equal(last, vector([standing - 1]))
    assert torch.equal(mask, vector(i < standing for i in range(len(read))).to(torch.bool))
    assert torch.equal(tokens, vector(ids(read)))


@both
def test_three_decodes_and_two_prefills(backend: Backend) -> None:
    """1, 2 and 0 of 2 drafts stand; nothing bleeds over from one request into the next."""
    read, emitted = ids("abc def ghi p q"), ids("bxy efz xxx r s")
    inputs = vector([read])
    verified = verify_speculative_tokens(inputs, vector(emitted), 3, 2, 2, backend=backend)
    assert verified.input_tokens.shape == (11,)
    assert verified.input_tokens.data_ptr() == inputs.data_ptr()
    assert torch.equal(verified.last_one_indices, vector([1, 5, 6, 9, 10]))
    expected = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert torch.equal(verified.accepted_tokens_mask, vector(expected).to(torch.bool))


@both
@given(
    num_decodes=st.integers(0, 5) | st.just(37),
    num_prefills=st.integers(0, 4) | st.just(33),
    num_padding=st.integers(0, 3) | st.just(40),
    num_drafts=st.sampled_from([0, 1, 3, 4]),
    dtype=st.sampled_from(INDEX_DTYPES),
    seed=st.integers(0, 2**32),
)
def test_any_batch(
    backend: Backend,
    num_decodes: int,
    num_prefills: int,
    num_padding: int,
    num_drafts: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    dice = random.Random(seed)
    decodes = random_decodes(dice, num_decodes, num_drafts)
    prefills = [dice.randrange(3) for _ in range(num_prefills)]
    inputs, outputs = flat_tokens(decodes, prefills, [1] * num_padding, dtype)
    out = (
        poisoned(num_decodes + num_prefills),
        poisoned(inputs.shape[0], dtype=torch.bool),
    )
    before = inputs.clone(), outputs.clone()
    verified = verify_speculative_tokens(
        inputs, outputs, num_decodes, num_prefills, num_drafts, out=out, backend=backend
    )
    last, mask = story.verify(decodes, num_prefills, num_padding)
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
def test_an_empty_batch_launches_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
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


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": vector([1, 2, 3])}, "input_tokens: expected .* at least 4 entries"),
        ({"input_tokens": vector([1.5] * 4, torch.float32)}, "input_tokens: .*got torch.float32"),
        ({"input_tokens": vector(range(8)).view(2, 4)}, r"input_tokens: .*got .*\[2, 4\]"),
        ({"output_tokens": vector(range(3))}, "output_tokens: expected .* at least 4"),
        ({"output_tokens": vector(range(8))[::2]}, "output_tokens: .*contiguous.* strides"),
        ({"output_tokens": torch.zeros(4, dtype=torch.int64, device="meta")}, "got .* on meta"),
        ({"num_decode_requests": -1}, "num_decode_requests: expected 0 or more, got -1"),
        ({"num_prefill_requests": -1}, "num_prefill_requests: expected 0 or more, got -1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: expected 0 or more, got -1"),
        ({"out": (poisoned(3), poisoned(4, dtype=torch.bool))}, r"out, last_one_indices: .*\[2\]"),
        ({"out": (poisoned(2), poisoned(4))}, "out, accepted_tokens_mask: .*torch.bool"),
        ({"out": (poisoned(4)[::2], poisoned(4))}, "out, last_one_indices: .*contiguous"),
        ({"out": (poisoned(2), poisoned(8, dtype=torch.bool)[::2])}, "out, accepted_.*contiguous"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_calls_that_do_not_fit(backend: Backend, change: dict, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        verify_speculative_tokens(**(arguments() | change), backend=backend)


@both
def test_strided_arguments(backend: Backend) -> None:
    """Nothing is copied on the way, so what is not in one piece is refused by name."""
    names = "input_tokens", "output_tokens"
    refused = {name: f"{name}: expected a contiguous" for name in names}
    check_strided_arguments(
        verify_speculative_tokens, arguments(), refused=refused, backend=backend
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("num_decodes", [1, 64, 256, 4096])
def test_graph_replays_with_changed_tokens(num_drafts: int, num_decodes: int) -> None:
    num_prefills = 5
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

"""Drafts of logits: example, torch reference and Triton agree, and nothing else is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import draft_argmax, propose, write_drafts
from tests.op_arguments import check_arguments, poisoned_memory
from tests.ops.bits import same_bits
from tests.ops.draft import example
from tests.ops.draft.loop import Loop, real_logits
from tests.ops.on_device import (
    DEVICE,
    poisoned,
    read_back_forbidden,
    vector,
)
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided

both = pytest.mark.parametrize("backend", Backend)


@settings(max_examples=40)
@given(
    requests=st.integers(0, 5),
    k=st.integers(1, 7),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 2),
    shift=st.booleans(),
    advance=st.booleans(),
    kv=st.booleans(),
    max_position=st.sampled_from([None, 30]),
    is_sampled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_draft_is_written_for_every_reader(
    requests, k, vocab, dtype, gap, shift, advance, kv, max_position, is_sampled, seed
) -> None:
    """The argmax of logits, or a token that was sampled before; -1, no token, counts as 0."""
    rng = torch.Generator().manual_seed(seed)
    logits = strided(odd_rows(rng, requests, vocab, dtype), gap)
    before = logits.clone()
    column = random.Random(seed).randrange(k)

    drafts = vector([example.proposal(row) for row in logits.double().tolist()], torch.int32)
    expected = Loop.of(seed, requests, k)
    expected.drafts[:requests, column] = drafts
    expected.following[:requests, column + 2] = drafts
    if shift:
        expected.shifted[expected.last_rows + column + 1] = drafts
    if advance:
        expected.positions[:requests] += 1
        if max_position is not None:
            expected.positions[:requests].clamp_max_(max_position)
        expected.kv_lens[:requests] += int(kv)
    for backend in Backend:
        loop = Loop.of(seed, requests, k)
        with poisoned_memory():
            output = loop.column(column, shift, advance, kv, max_position)
            if is_sampled:
                write_drafts(torch.where(drafts > 0, drafts, -1), output, backend=backend)
            else:
                propose(logits, output, backend=backend)
        loop.assert_same(expected)
    assert same_bits(logits, before)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_draft_argmax(rows, vocab, dtype, seed) -> None:
    logits = strided(odd_rows(torch.Generator().manual_seed(seed), rows, vocab, dtype), 1)
    before = logits.clone()
    expected = vector([example.proposal(row) for row in logits.double().tolist()], torch.int32)
    for backend in Backend:
        with poisoned_memory():
            drafts = draft_argmax(logits, backend=backend)
        assert same_bits(drafts, expected)
    assert same_bits(logits, before)


@both
def test_arguments(backend: Backend) -> None:
    logits = odd_rows(torch.Generator().manual_seed(2), 3, 9, torch.float32).to(DEVICE)
    refused = {"logits": "logits: expected row-contiguous"}
    free = {"logits: shorter", "logits: elsewhere"}
    check_arguments(draft_argmax, {"logits": logits}, refused=refused, free=free, backend=backend)
    output = replace(
        Loop.of(2, 3, 2).column(0, True, True, True, 30),
        drafts=poisoned(3, 2, dtype=torch.int32),
        next_tokens=poisoned(3, 3, dtype=torch.int32),
        vocab_ids=vector(range(3, 12), torch.int32),
    )
    refused |= {
        "output.drafts": "drafts: expected row-contiguous torch.int32 tensor [3, >= 1]",
        "output.next_tokens": "next_tokens: expected row-contiguous torch.int32 tensor [3, >= 2]",
        "output.shifted_ids": "shifted_ids: expected contiguous integer tensor",
        "output.positions": "positions: expected contiguous integer tensor [3]",
        "output.kv_lens": "kv_lens: expected contiguous integer tensor [>= 3]",
        "output.vocab_ids": "vocab_ids: expected contiguous torch.int32",
    }
    arguments = {"logits": logits, "output": output}
    free = {f"{name}: elsewhere" for name in ("logits", *(f"output.{n}" for n in vars(output)))}
    free |= {f"output.{name}: shorter" for name in ("shifted_ids", "kv_lens")}
    free |= {"output.last_rows: type"}
    check_arguments(propose, arguments, refused=refused, free=free, backend=backend)


@both
def test_arguments_of_write_drafts(backend: Backend) -> None:
    def write(drafts: torch.Tensor) -> list[torch.Tensor]:
        loop = Loop.of(1, 4, 2)
        write_drafts(drafts, loop.column(1, shift=True), backend=backend)
        return [loop.drafts, loop.following, loop.shifted]

    drafts = vector([4, -1, 9, 2], torch.int32)
    check_arguments(write, {"drafts": drafts}, free={"drafts: elsewhere"})


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": 3}, r"drafts: .* \[2, >= 4\].* got .* \[2, 3\]"),
        ({"column": -1}, "column: expected an integer >= 0, got -1"),
        ({"last_rows": None}, r"last_rows: expected tensor \[2\], got None"),
        ({"positions": vector([1, 2, 3])}, r"positions: .* \[2\], got .* \[3\]"),
    ],
)
def test_wrong_outputs_are_refused(backend: Backend, change: Any, message: str) -> None:
    output = replace(Loop.of(3, 2, 3).column(0, True, True, True), **change)
    with pytest.raises(TensorContractError, match=message):
        propose(torch.zeros(2, 5, device=DEVICE), output, backend=backend)


def test_logits_without_columns_are_refused() -> None:
    logits = torch.zeros(2, 0, device=DEVICE)
    for op, others in ((draft_argmax, ()), (propose, (Loop.of(3, 2, 1).column(0),))):
        with pytest.raises(TensorContractError, match=r"logits: expected .*tensor"):
            op(logits, *others, backend=Backend.TORCH)


REAL = [(1, 7, 129280), (17, 1, 151935), (64, 3, 129280), (256, 3, 151935), (1024, 3, 151935)]


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    stride, rows, vocab = 2**29 + 24, 6, 151935
    device_memory(12)
    near = real_logits(rows, vocab, 3, torch.bfloat16)
    buffer = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far = buffer.as_strided((rows, vocab), (stride, 1))
    far.copy_(near)
    assert (rows - 1) * stride > 2**31
    assert torch.equal(draft_argmax(far, backend=Backend.TRITON), best_ids(near).int())


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab"), REAL)
def test_in_a_cuda_graph(requests: int, k: int, vocab: int) -> None:
    """All depths in one graph, replayed over other logits and other loops."""
    dtype = DTYPES[requests % 3]
    logits = [real_logits(requests, vocab, depth, dtype) for depth in range(k)]
    loop = Loop.of(1, requests, k)

    def step() -> None:
        for column in range(k):
            output = loop.column(column, True, True, True, 55)
            propose(logits[column], output, backend=Backend.TRITON)

    graph, _ = captured(step)
    for seed in (10, 20):
        fresh = Loop.of(1, requests, k)  # the same rows, other positions
        fresh.positions += seed
        fresh.kv_lens += seed
        for depth in range(k):
            logits[depth].copy_(real_logits(requests, vocab, seed + depth, dtype))
        for field in fields(loop):
            getattr(loop, field.name).copy_(getattr(fresh, field.name))
        graph.replay()
        torch.cuda.synchronize()
        for column in range(k):
            output = fresh.column(column, True, True, True, 55)
            propose(logits[column], output, backend=Backend.TORCH)
        loop.assert_same(fresh)
    with read_back_forbidden():
        step()

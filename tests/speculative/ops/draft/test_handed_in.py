"""Outputs and scratch handed in: everything is written there, and nothing is allocated beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.top_k import Top1Partials, top1_partials
from mtp_plugin.speculative.ops.draft import launch, reference
from tests.kernels.top_k.launches import poison
from tests.kernels.top_k.rows import DTYPES, VOCABS, odd_rows, strided
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft.test_kernel import Loop, real_logits
from tests.speculative.ops.on_device import DEVICE, poisoned, replay_in_graph

both = pytest.mark.parametrize("ops", [reference, launch], ids=["reference", "kernel"])


def poisoned_scratch(rows: int, vocab: int) -> Top1Partials:
    scratch = Top1Partials.unwritten(rows, vocab, DEVICE)
    for field in fields(scratch):
        poison(getattr(scratch, field.name))
    return scratch


def poisoned_pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return poison(torch.empty(rows, device=DEVICE)), poisoned(rows, dtype=torch.int32)


@both
@settings(max_examples=12)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(rows=5, vocab=4999, dtype=torch.float32, seed=1)  # cut into pieces
def test_outputs_take_the_result(
    ops: ModuleType, rows: int, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    logits = strided(odd_rows(torch.Generator().manual_seed(seed), rows, vocab, dtype), 2)
    out, scratch = poisoned(rows, dtype=torch.int32), poisoned_scratch(rows, vocab)
    assert ops.draft_argmax(logits, out, scratch) is out
    assert same_bits(out, ops.draft_argmax(logits))
    if ops is launch:  # what others read of the partials stays as it was reduced
        assert same_bits(scratch.values, top1_partials(logits).values)

    loop, plain = Loop.of(seed, rows, 1), Loop.of(seed, rows, 1)
    place = (0, True, True, True, None)
    ops.propose(logits, loop.column(*place), scratch)
    ops.propose(logits, plain.column(*place))
    loop.assert_same(plain)

    columns = vocab - 1  # the last one is padding
    pair = poisoned_pair(rows)
    scratch = poisoned_scratch(rows, max(columns, 1))
    values, ids = ops.local_top1(logits, 7, columns, out=pair, scratch=scratch)
    assert values is pair[0]
    assert ids is pair[1]
    expected = ops.local_top1(logits, 7, columns)
    assert same_bits(values, expected[0])
    assert same_bits(ids, expected[1])

    gathered = torch.stack([values, values]), torch.stack([ids + 3, ids])
    merged = poisoned(rows, dtype=torch.int32)
    assert ops.merge_top1(*gathered, out=merged) is merged
    assert same_bits(merged, ops.merge_top1(*gathered))
    assert same_bits(merged, ids)


@both
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("drafts", lambda ops, logits, bad: ops.draft_argmax(logits, bad)),
        ("drafts", lambda ops, logits, bad: ops.merge_top1(logits.t(), logits.t().int(), bad)),
        ("top1, ids", lambda ops, logits, bad: ops.local_top1(logits, 0, 9, (logits[0, :4], bad))),
    ],
    ids=["draft_argmax", "merge_top1", "local_top1"],
)
def test_outputs_that_do_not_fit(
    ops: ModuleType, name: str, call: Callable[[ModuleType, torch.Tensor, torch.Tensor], Any]
) -> None:
    logits = torch.zeros(4, 9, device=DEVICE)
    vector = poisoned(8, dtype=torch.int32)
    for bad, came in (
        (vector[:3], r"torch.int32 \[3\]"),
        (vector[:4].long(), r"torch.int64 \[4\]"),
        (vector[::2], r"strides \[2\]"),
        (vector[:4].to("meta"), "on meta"),
    ):
        with pytest.raises(
            TensorContractError, match=rf"{name}: expected contiguous torch.int32 \[4\].*{came}"
        ):
            call(ops, logits, bad)


@both
def test_values_that_do_not_fit(ops: ModuleType) -> None:
    logits, (values, ids) = torch.zeros(4, 9, device=DEVICE), poisoned_pair(4)
    with pytest.raises(TensorContractError, match=r"top1, values: .*torch.float32 \[4\] .*float64"):
        ops.local_top1(logits, 0, 9, (values.double(), ids))


@pytest.mark.parametrize("name", ["propose", "draft_argmax", "local_top1"])
def test_scratch_that_does_not_fit(name: str) -> None:
    logits, scratch = torch.zeros(4, 3000, device=DEVICE), poisoned_scratch(4, 2000)
    arguments = {
        "propose": [Loop.of(0, 4, 1).column(0, False, False, False, None)],
        "draft_argmax": [],
        "local_top1": [0, 3000],
    }
    with pytest.raises(TensorContractError, match=r"scratch, values: .*\[4, 2\].*got .*\[4, 1\]"):
        getattr(launch, name)(logits, *arguments[name], scratch=scratch)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 129280), (64, 129280), (256, 151935)])
def test_nothing_is_allocated(rows: int, vocab: int) -> None:
    """All ops of a draft in one graph with outputs and scratch, replayed over other logits."""
    logits, other = (real_logits(rows, vocab, seed, torch.bfloat16) for seed in (1, 2))
    share = -(-vocab // 2)
    drafts, merged = (poisoned(rows, dtype=torch.int32) for _ in range(2))
    values = poison(torch.empty(2, rows, device=DEVICE))
    ids = poisoned(2, rows, dtype=torch.int32)
    whole, half = poisoned_scratch(rows, vocab), poisoned_scratch(rows, share)
    last = poisoned_scratch(rows, vocab - share)
    loop = Loop.of(1, rows, 1)
    place = loop.column(0, True, True, True, 55)

    def step() -> None:
        launch.propose(logits, place, whole)
        launch.draft_argmax(logits, drafts, whole)
        launch.local_top1(logits, 0, share, (values[0], ids[0]), half)
        launch.local_top1(logits[:, share:], share, vocab - share, (values[1], ids[1]), last)
        launch.merge_top1(values, ids, merged)

    replay_in_graph(step, lambda: logits.copy_(other))
    expected = reference.draft_argmax(other)
    for written in (drafts, merged, loop.drafts[:rows, 0]):
        assert torch.equal(written, expected)

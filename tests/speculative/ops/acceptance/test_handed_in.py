"""Outputs and scratch handed in: everything is written there, and nothing is allocated beside."""

from __future__ import annotations

from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.top_k import RelaxedPartials, Top1Partials
from mtp_plugin.speculative.ops.acceptance import RelaxedAccepted, launch, reference
from mtp_plugin.speculative.step import Accepted
from tests.kernels.top_k.launches import poison
from tests.speculative.ops.acceptance.test_kernel import (
    Case,
    assert_same,
    cases,
    make_case,
    real_case,
    undecided,
)
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned, replay_in_graph

both = pytest.mark.parametrize("ops", [reference, launch], ids=["reference", "kernel"])
rules = pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])


def outputs(case: Case, relaxed: bool, thinking: bool = True) -> dict[str, Any]:
    """Poisoned, but for the phase, which has no value to spare."""
    rows, vocab = case.logits.shape
    out: Accepted | RelaxedAccepted
    if relaxed:
        out = RelaxedAccepted.unwritten(case.num_contexts, len(case.drafts), case.k, DEVICE)
        scratch: Top1Partials = RelaxedPartials.unwritten(rows, vocab, DEVICE)
        poison(out.margin)
        out.thinking.fill_(thinking)
    else:
        out = Accepted.unwritten(case.requests, case.k, DEVICE)
        scratch = Top1Partials.unwritten(rows, vocab, DEVICE)
    accepted = out.accepted if isinstance(out, RelaxedAccepted) else out
    for record in (accepted, scratch):
        for field in fields(record):
            poison(getattr(record, field.name))
    return {"out": out, "scratch": scratch}


def accept(ops: ModuleType, case: Case, relaxed: bool, **options: Any) -> Any:
    if relaxed:
        return ops.accept_relaxed(case.logits, case.drafts, case.rule, **case.shape, **options)
    return ops.accept_strict(case.logits, case.drafts, **case.shape, **options)


@both
@settings(max_examples=12)
@given(case=cases, last=st.booleans())
def test_strict_outputs_take_the_result(ops: ModuleType, case: Case, last: bool) -> None:
    handed = outputs(case, relaxed=False)
    following = poisoned(case.requests, 2, dtype=torch.int32)
    accepted = accept(ops, case, False, last_tokens=following[:, 0] if last else None, **handed)
    assert accepted is handed["out"]
    expected, told = case.strict(ops)
    assert_same(accepted, expected)
    assert torch.equal(following[:, 0], told[:, 0]) if last else (following == POISON).all()


@both
@settings(max_examples=12)
@given(case=cases, last=st.booleans(), thinking=st.booleans())
def test_relaxed_outputs_take_the_result(
    ops: ModuleType, case: Case, last: bool, thinking: bool
) -> None:
    handed = outputs(case, True, thinking)
    following = poisoned(case.requests, 2, dtype=torch.int32)
    result = accept(ops, case, True, last_tokens=following[:, 0] if last else None, **handed)
    assert result is handed["out"]
    expected, told = case.relaxed(ops)
    assert_same(result.accepted, expected.accepted)
    assert torch.equal(result.thinking, expected.thinking)
    assert same_bits(result.margin, expected.margin)
    assert torch.equal(following[:, 0], told[:, 0]) if last else (following == POISON).all()


def test_scratch_serves_one_call_after_the_other() -> None:
    """Nothing of an earlier batch shows in a later one."""
    handed = outputs(make_case(0, num_generations=3, k=2, vocab=2049), relaxed=True)
    for seed in range(1, 5):
        case = make_case(seed, num_generations=3, k=2, vocab=2049, smooth=True)
        result = accept(launch, case, True, **handed)
        expected, _ = case.relaxed()
        assert_same(result.accepted, expected.accepted)
        assert same_bits(result.margin, expected.margin)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


@both
@rules
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": int32(3, 2)}, r"tokens: expected contiguous torch.int32 \[3, 3\] .*\[3, 2\]"),
        ({"num_accepted": int32(3).long()}, "num_accepted: expected .*got torch.int64"),
        ({"status": int32(6)[::2]}, r"status: expected contiguous .*strides \[2\]"),
        ({"tokens": torch.zeros(3, 3, device="meta").int()}, "tokens: .*on meta"),
    ],
    ids=["size", "type", "gaps", "device"],
)
def test_outputs_that_do_not_fit(
    ops: ModuleType, relaxed: bool, change: dict[str, Any], message: str
) -> None:
    case = make_case(1, num_contexts=1, num_generations=2, k=2, vocab=64)
    out = outputs(case, relaxed)["out"]
    changed = replace(out.accepted if relaxed else out, **change)
    with pytest.raises(TensorContractError, match=f"accepted, {message}"):
        accept(ops, case, relaxed, out=replace(out, accepted=changed) if relaxed else changed)


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thinking": int32(3)}, r"thinking: expected contiguous torch.bool \[3\]"),
        ({"margin": torch.zeros(3, 2)}, r"margin: expected contiguous torch.float32 \[2, 2\]"),
    ],
    ids=["thinking", "margin"],
)
def test_relaxed_outputs_that_do_not_fit(
    ops: ModuleType, change: dict[str, Any], message: str
) -> None:
    case = make_case(1, num_contexts=1, num_generations=2, k=2, vocab=64)
    with pytest.raises(TensorContractError, match=f"accepted, {message}"):
        accept(ops, case, True, out=replace(outputs(case, True)["out"], **change))


@rules
def test_scratch_of_another_batch_is_refused(relaxed: bool) -> None:
    case = make_case(1, num_generations=2, k=2, vocab=64)
    other = make_case(1, num_generations=3, k=2, vocab=64)
    scratch = outputs(other, relaxed)["scratch"]
    with pytest.raises(TensorContractError, match=r"scratch, values: .*\[6, 1\] .*got .*\[9, 1\]"):
        accept(launch, case, relaxed, scratch=scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["strict", "forced", "relaxed"])
@pytest.mark.parametrize(("batch", "k", "vocab"), [(1, 3, 129280), (64, 3, 151935)])
def test_nothing_is_allocated(batch: int, k: int, vocab: int, kind: str) -> None:
    """Captured once with outputs and scratch, replayed with other logits, drafts and phases."""
    relaxed = kind == "relaxed"
    mine, other = (real_case(batch, k, vocab, seed, torch.bfloat16) for seed in (1, 20))
    handed = outputs(mine, relaxed)
    last = poisoned(batch, 2, dtype=torch.int32)
    options: dict[str, Any] = {}
    if kind == "forced":
        options["forced_matches"] = torch.arange(batch, dtype=torch.int32, device=DEVICE) % (k + 2)

    def change() -> None:
        for field in fields(handed["scratch"]):
            poison(getattr(handed["scratch"], field.name))
        for name in ("thinking", "topk", "delta"):
            getattr(mine.rule, name).copy_(getattr(other.rule, name))
        mine.logits.copy_(other.logits)
        mine.drafts.copy_(other.drafts)
        mine.shape["draft_lens"].copy_(other.shape["draft_lens"])

    replay_in_graph(
        lambda: accept(launch, mine, relaxed, last_tokens=last[:, 0], **options, **handed), change
    )
    following = poisoned(batch, 2, dtype=torch.int32)
    expected = accept(reference, other, relaxed, last_tokens=following[:, 0], **options)
    if relaxed:
        sure = ~undecided(expected.margin, other.rule, 0)
        assert_same(handed["out"].accepted, expected.accepted, sure)
        assert torch.equal(handed["out"].thinking[sure], expected.thinking[sure])
    else:
        sure = torch.ones(batch, dtype=torch.bool, device=DEVICE)
        assert_same(handed["out"], expected)
    assert torch.equal(last[sure], following[sure])

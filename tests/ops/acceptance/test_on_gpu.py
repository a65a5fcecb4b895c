"""Acceptance on a device, with real shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mtp_plugin.ops.acceptance import accept
from mtp_plugin.ops.acceptance.accept_reference import _with_rows
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted
from tests.ops.acceptance.cases import (
    KINDS,
    Case,
    Thinker,
    assert_implementations_agree,
    assert_nothing_else_written,
    assert_same,
    copied,
    ragged,
    relaxed_rule,
)
from tests.ops.acceptance.margins import undecided
from tests.ops.acceptance.random_cases import chosen_rows, smooth_case
from tests.ops.on_device import DEVICE, POISON, poisoned, read_back_forbidden
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES, best_ids

pytestmark = pytest.mark.gpu

REAL = [
    pytest.param(1, 3, 129280, id="1xk3"),
    pytest.param(5, 7, 151935, id="5xk7"),
    pytest.param(64, 0, 151935, id="64xk0"),
    pytest.param(128, 7, 129280, id="128xk7"),
    pytest.param(256, 3, 151935, id="256xk3"),
]


def real_case(batch: int, k: int, vocab: int, seed: int, dtype: torch.dtype) -> Case:
    """Smooth rows, some odd ones among them, ragged drafts."""
    case = smooth_case(batch, k, vocab, seed, dtype)
    rng = torch.Generator().manual_seed(seed + 1)
    case.logits[1::37] = torch.nan
    case.logits[2::11, ::3] = -torch.inf
    case.logits[3::13, 7::4001] = torch.inf
    case.logits[4::9, 1::5] = torch.nan
    right = best_ids(case.logits).view(batch, k + 1)[:, :k].int()
    lucky = torch.rand(right.shape, generator=rng).to(DEVICE) < 0.6
    drafts = torch.where(lucky & (right < vocab), right, case.drafts)
    drafts.masked_fill_(torch.rand(right.shape, generator=rng).to(DEVICE) < 0.03, -1)
    lens = torch.randint(0, k + 1, (batch,), generator=rng, dtype=torch.int32).to(DEVICE)
    return chosen_rows(replace(case, drafts=drafts, options={"draft_lens": lens}), seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "k", "vocab"), [(5, 7, 151935), (256, 3, 129280)])
def test_ragged_rows_of_real_shapes(batch: int, k: int, vocab: int, kind: str) -> None:
    case = ragged(real_case(batch, k, vocab, 3, torch.bfloat16), seed=3)
    close, decided = assert_implementations_agree(case, kind)
    assert close <= max(2, decided // 10)
    first = case.accept(kind, Backend.TRITON)
    for _ in range(5):  # a race would show
        assert_same(case.accept(kind, Backend.TRITON), first)
    kept = case.accept(kind, Backend.TRITON, keeps_rows=True).accepted
    expected = _with_rows(first.accepted, case.layout, case.first_rows)
    for name in ("tokens", "num_accepted", "status", "rows"):
        assert torch.equal(getattr(kept, name), getattr(expected, name)), name


def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    stride, k, batch, vocab = 2**29 + 24, 3, 2, 151935
    rows = batch * (k + 1)
    device_memory(12)
    near = real_case(batch, k, vocab, 2, torch.bfloat16)
    near = replace(near, relaxed=relaxed_rule([Thinker(topk=3, limit=2e-4)] * batch, 5, 6))
    buffer = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far = buffer.as_strided((rows, vocab), (stride, 1))
    far.copy_(near.logits)
    assert (rows - 1) * stride > 2**31
    case = replace(near, logits=far)
    for kind in KINDS:
        mine, same = (one.accept(kind, Backend.TRITON) for one in (case, near))
        assert_same(mine, same)
    assert_implementations_agree(near, "strict")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "k", "vocab"), REAL)
def test_in_a_cuda_graph(batch: int, k: int, vocab: int, kind: str) -> None:
    """Captured once, replayed with other logits, drafts, lengths, phases and counts."""
    dtype = DTYPES[batch % 3]
    mine = real_case(batch, k, vocab, 1, dtype)
    last = poisoned(batch, 2, dtype=torch.int32)
    rules = mine.rules(kind)
    if rules.relaxed is not None:
        rules = replace(rules, relaxed=copied(mine.relaxed))

    def step() -> Accepted:
        return accept(
            mine.layout,
            mine.logits,
            mine.drafts,
            rules,
            **mine.options,
            last_tokens=last[:, 0],
            backend=Backend.TRITON,
        )

    graph, outputs = captured(step)
    for seed in (20, 30):
        other = real_case(batch, k, vocab, seed, dtype)
        mine.logits.copy_(other.logits)
        mine.drafts.copy_(other.drafts)
        mine.options["draft_lens"].copy_(other.options["draft_lens"])
        mine.forced.copy_(other.forced)
        mine.choices.copy_(other.choices)
        mine.forced_ids.copy_(other.forced_ids)
        rules_of_other = other.rules(kind)
        sure = ~undecided(other.margins(rules_of_other), rules_of_other, other.layout)
        expected = other.accept(kind, Backend.TORCH)
        runs = {"replayed": graph.replay, "eager": step}
        for name, run in runs.items():
            if rules.relaxed is not None:
                # other requests at other slots; the pool is a column of the table
                slots = rules.relaxed.slots
                slots.table.copy_(other.relaxed.slots.table)
                slots.slot_ids.copy_(other.relaxed.slots.slot_ids)
            last.fill_(POISON)
            torch.cuda.synchronize()
            with read_back_forbidden():
                given = run()
            torch.cuda.synchronize()
            found = outputs if name == "replayed" else given
            for part in ("tokens", "num_accepted", "status"):
                mine_part = getattr(found, part)
                assert torch.equal(mine_part, getattr(outputs, part)), (name, part)
                assert torch.equal(mine_part[sure], getattr(expected.accepted, part)[sure]), part
            assert torch.equal(last[sure, 0], expected.following[sure, 0])
            assert (last[:, 1] == POISON).all()
            if rules.relaxed is not None:
                assert_nothing_else_written(other.relaxed, rules.relaxed, range(batch))
                after = rules.relaxed.slots.read("thinking", slice(0, batch))
                assert torch.equal(after[sure], expected.noted[sure])
                in_force = rules.relaxed.delta_in_force[rules.relaxed.slots.of(slice(0, batch))]
                assert torch.equal(in_force[sure], expected.in_force[sure])

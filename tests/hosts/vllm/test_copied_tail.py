"""A tail of copied text after MTP drafts: what workers add to drafts, and the gate."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin.hosts.vllm import copied_tail
from mtp_plugin.hosts.vllm.copied_tail import CopiedTail
from mtp_plugin.hosts.vllm.scheduled_draft_len import lengths_of
from mtp_plugin.hosts.vllm.tail_gate import MATCHES, TailGate
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import VerifiedBy
from mtp_plugin.speculative.rows.request_slots import DRAFT_LIMIT
from tests.hosts.vllm.fake_vllm import make_config
from tests.hosts.vllm.rows import NUM_SLOTS, VOCAB, Batch, make_ops, output_of, verify
from tests.ops.on_device import DEVICE, vector

K, LENGTH, WIDTH = 5, 2, 40
COPIED = [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
"""With the drafts 4, 5, 6 the last 7 tokens occurred before; 7 and 8 followed."""
NEW = list(range(20, 33))


@pytest.fixture(autouse=True)
def fitting_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_tail, "part_problems", lambda _part: [])


def make_tail(backend: Backend = Backend.TORCH, **changes: Any) -> tuple[CopiedTail, Any]:
    """A tail, and the states of slot 2, which copies, and slot 5, which does not."""
    ops = make_ops(backend, num_drafts=K, keeps_draft_probs=True, **changes)
    tokens = torch.zeros(NUM_SLOTS, WIDTH, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE)
    for slot, text in ((2, COPIED), (5, NEW)):
        tokens[slot, : len(text)] = vector(text, torch.int32)
        lengths[slot] = len(text)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths)
    )
    return CopiedTail(ops, states, LENGTH, VOCAB), states


def propose(tail: CopiedTail, num_drafts: int | None = None, sampled: int = 1) -> torch.Tensor:
    """The drafts of a step with slots 5 and 2, for both of which MTP layers draft 4, 5, 6."""
    drafts = torch.zeros(2, K, dtype=torch.int64, device=DEVICE)

    def mtp(num_speculative_tokens: int) -> torch.Tensor:
        drafts[:, :num_speculative_tokens] = vector([4, 5, 6])[:num_speculative_tokens]
        return drafts

    batch = SimpleNamespace(idx_mapping=vector([5, 2]), idx_mapping_np=np.array([5, 2]))
    return tail.propose(mtp, batch, vector([sampled] * 2), num_drafts, is_dummy=False)


def row_batch(num_drafts: int) -> Any:
    """The rows of vLLM's ``InputBatch`` that verifies the drafts of `propose`."""
    width = num_drafts + 1
    return SimpleNamespace(
        num_draft_tokens_per_req=np.array([num_drafts] * 2),
        expanded_idx_mapping=vector([5] * width + [2] * width),
        expanded_local_pos=vector([*range(width)] * 2),
        idx_mapping_np=np.array([5, 2]),
    )


def matches_of(tail: CopiedTail) -> list[bool]:
    """What a step brings to the host for slots 5 and 2."""
    matches, slots = getattr(tail.add_matches(SimpleNamespace(), row_batch(K)), MATCHES)
    tail._has_match.logical_not_()  # of the next step: the copy stays
    copied = matches[slots].tolist()
    tail._has_match.logical_not_()
    return copied


@pytest.mark.parametrize("backend", Backend)
def test_the_tail_is_what_followed_the_text_and_its_drafts(backend: Backend) -> None:
    tail, _ = make_tail(backend)
    drafts = propose(tail)
    assert drafts.tolist() == [[4, 5, 6, 0, 0], [4, 5, 6, 7, 8]]
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), drafts], 1).view(-1)
    verified = tail.without_absent(rows, row_batch(K))
    assert verified.tolist() == [0, 4, 5, 6, -1, -1, 0, 4, 5, 6, 7, 8]
    assert matches_of(tail) == [False, True]


def test_ids_beyond_the_vocabulary_are_not_drafted() -> None:
    """Placeholders of images, which the model cannot embed."""
    tail, states = make_tail()
    states.all_token_ids.gpu[2, 7] = VOCAB + 9
    assert propose(tail)[1].tolist() == [4, 5, 6, VOCAB - 1, 8]


def test_steps_without_a_tail_still_look_for_matches() -> None:
    tail, _ = make_tail()
    drafts = propose(tail, num_drafts=K - LENGTH)
    assert drafts[:, K - LENGTH :].tolist() == [[0] * LENGTH] * 2
    rows = vector([0, 4, 5, 6] * 2)
    assert tail.without_absent(rows, row_batch(K - LENGTH)) is rows
    assert matches_of(tail) == [False, True]


def test_five_equal_tokens_and_unfinished_prompts_are_no_match() -> None:
    tail, states = make_tail()
    states.all_token_ids.gpu[2, 10] = 50  # 2, 3, 4, 5, 6 are left
    assert propose(tail)[1].tolist() == [4, 5, 6, 0, 0]
    tail, _ = make_tail()
    propose(tail, sampled=0)
    assert not any(matches_of(tail))


def test_a_request_that_cannot_use_a_tail_is_no_match() -> None:
    """Nor is one whose slot belonged to a request that matched."""
    for limit, is_match in ((K - LENGTH, False), (K - LENGTH + 1, True)):
        tail, _ = make_tail()
        tail._ops.slots.stage(2, {DRAFT_LIMIT: limit}, seed=0)
        tail._ops.slots.apply()
        propose(tail)
        assert matches_of(tail)[1] == is_match
    tail.forget(2)
    assert not any(matches_of(tail))


def test_fewer_mtp_drafts_end_the_pattern_where_they_end() -> None:
    """The length that a controller chose, which a step without a tail may have."""
    tail, _ = make_tail()
    drafts = propose(tail, num_drafts=2)
    assert drafts[1].tolist() == [4, 5, 0, 0, 0]
    assert matches_of(tail) == [False, True]


def test_copied_tokens_have_probability_one_until_the_next_tail() -> None:
    tail, states = make_tail()
    probs = tail._ops.draft_probs
    assert probs is not None
    probs[:, : K - LENGTH] = 0.5  # of the MTP layers: stay
    expected = probs.clone()
    propose(tail)
    expected[2, 3, 7] = expected[2, 4, 8] = 1.0
    assert torch.equal(probs, expected)
    states.all_token_ids.gpu[2, 7:9] = vector([11, 12], torch.int32)
    propose(tail)
    expected[2, 3:] = 0.0
    expected[2, 3, 11] = expected[2, 4, 12] = 1.0
    assert torch.equal(probs, expected)
    probs.fill_(float("nan"))  # sleep of level 2
    tail.restore()
    assert torch.equal(probs[:, 3:], torch.zeros_like(probs[:, 3:]))


@pytest.mark.parametrize("method", [VerifiedBy.REJECTION, VerifiedBy.BLOCK])
def test_methods_by_probability_keep_the_distribution_with_a_tail(method: VerifiedBy) -> None:
    """One request that copies, verified with 1,200 seeds: the token of the first tail column is
    sampled from the target's distribution, whether the copied one is accepted or not."""
    logits = torch.full((K + 1, VOCAB), -30.0, device=DEVICE)
    for row, token in enumerate((4, 5, 6)):
        logits[row, token] = 30.0  # the MTP drafts are certain
    logits[3, [7, 8, 9]] = torch.tensor([0.5, 0.2, 0.3], device=DEVICE).log()
    logits[4, [8, 1]] = torch.tensor([0.6, 0.4], device=DEVICE).log()
    columns = {2: {"temperature": 1.0, "verification": method}}
    counts: Counter[int] = Counter()
    for seed in range(1200 // NUM_SLOTS):
        tail, states = make_tail(
            columns=dict.fromkeys(range(NUM_SLOTS), columns[2]),
            seeds={slot: seed * NUM_SLOTS + slot for slot in range(NUM_SLOTS)},
        )
        probs = tail._ops.draft_probs
        assert probs is not None
        for column, token in enumerate((4, 5, 6)):
            probs[:, column, token] = 1.0
        states.all_token_ids.gpu[:] = states.all_token_ids.gpu[2].clone()
        states.total_len.gpu[:] = len(COPIED)
        slots = list(range(NUM_SLOTS))
        drafts = vector([[4, 5, 6, 0, 0]] * NUM_SLOTS)
        batch = SimpleNamespace(idx_mapping=vector(slots), idx_mapping_np=np.array(slots))
        drafts = tail.propose(
            lambda num_speculative_tokens, given=drafts: given,  # noqa: ARG005
            batch,
            vector([1] * NUM_SLOTS),
            None,
            is_dummy=False,
        )
        given = Batch(slots, drafts.tolist(), [100] * NUM_SLOTS, logits.repeat(NUM_SLOTS, 1))
        for output in output_of(verify(tail._ops, given)):
            assert output[:3] == [4, 5, 6]
            counts[output[3]] += 1
            assert len(output) == (4 if output[3] != 7 else 5 if output[4] != 8 else 6)
    total = counts.total()
    for token, share in ((7, 0.5), (8, 0.2), (9, 0.3)):
        assert abs(counts[token] / total - share) < 4 * (share * (1 - share) / total) ** 0.5


# ---- the gate


def step(num_drafts: int, matches: list[bool] | None) -> tuple[Any, Any]:
    """``SchedulerOutput`` and ``ModelRunnerOutput`` of a step with requests a, b and so on."""
    names = list("abcdefgh"[: len(matches or "ab")])
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={name: [-1] * num_drafts for name in names},
        num_invalid_spec_tokens=None,
        num_spec_tokens_to_schedule=num_drafts,
    )
    output = SimpleNamespace(req_ids=names)
    if matches is not None:
        setattr(output, MATCHES, matches)
    return scheduled, output


def test_steps_are_long_after_a_match_alone() -> None:
    gate = lengths_of(
        make_config({"tail": {"ngram": 4}}, speculative_config__num_speculative_tokens=7)
    )
    assert gate is not None
    no, yes = [False] * 8, [False] * 7 + [True]
    lengths = []
    for matches in (None, no, yes, None, no):
        lengths.append(gate.choose(None))
        gate.record(*step(lengths[-1], matches))
    lengths.append(gate.choose(None))
    assert lengths == [3, 3, 3, 7, 7, 3]


@pytest.mark.parametrize(("size", "held"), [(1, 5), (2, 3), (4, 2), (5, 1)])
def test_a_match_counts_for_more_steps_of_few_requests(size: int, held: int) -> None:
    gate = TailGate(3, 7)
    gate.record(*step(3, [True] * size))
    lengths = []
    for _ in range(6):
        lengths.append(gate.choose(None))
        gate.record(*step(lengths[-1], [False] * size))
    assert lengths == [7] * held + [3] * (6 - held)


def test_columns_without_a_match_are_no_drafts_in_metrics() -> None:
    gate = TailGate(3, 7)
    for matches, expected in (([False, True], {"a": 4}), ([True, True], None)):
        scheduled, output = step(7, matches)
        gate.record(scheduled, output)
        assert scheduled.num_invalid_spec_tokens == expected
    scheduled, output = step(7, [False, True])
    scheduled.num_invalid_spec_tokens = {"a": 6, "b": 1}  # of a grammar
    gate.record(scheduled, output)
    assert scheduled.num_invalid_spec_tokens == {"a": 6, "b": 1}
    scheduled, output = step(3, [False, True])
    gate.record(scheduled, output)
    assert scheduled.num_invalid_spec_tokens is None


def test_a_controller_chooses_the_drafts_of_steps_without_a_tail() -> None:
    seen = []
    lengths = SimpleNamespace(choose=lambda _: 1, record=lambda *given: seen.append(given))
    gate = TailGate(3, 7, lengths)
    assert gate.choose(None) == 1
    scheduled, output = step(1, [True, False])
    gate.record(scheduled, output)
    assert gate.choose(None) == 7
    gate.record(*step(7, [True, False]))  # makes a tail
    for _ in range(3):
        made = step(7, [False, False])
        made[0].num_spec_tokens_to_schedule = 1
        gate.record(*made)  # verifies one
    assert gate.choose(None) == 1
    assert seen == [(scheduled, output)]

"""Withheld drafts, relaxed acceptance, rejection and block verification on ragged rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.examples.top2 import Top2Verification
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.requests import request_facts
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import (
    DraftedBy,
    Role,
    VerifiedBy,
    rejection_reference,
)
from mtp_plugin.ops.step import StepLayout
from mtp_plugin.plugin import (
    CustomVerification,
    register_verification,
    unregister_verification,
)
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions, method_problems
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import RowOps
from mtp_plugin.verifications import custom_codes
from tests.distribution.shares import tail
from tests.hosts.vllm.rows import (
    NUM_DRAFTS,
    NUM_SLOTS,
    VOCAB,
    Batch,
    draft,
    make_batch,
    make_ops,
    output_of,
    sample,
    verify,
    with_drafts,
)
from tests.ops.on_device import DEVICE, vector

BACKENDS = pytest.mark.parametrize("backend", Backend)
SIZES = pytest.mark.parametrize("sizes", [[4] * 6, [4, 2, 1, 3, 4, 4]], ids=["uniform", "ragged"])

# ---- withheld drafts


def with_accepted_drafts(ops: RowOps, batch: Batch) -> Batch:
    choices = sample(ops, batch).tolist()
    drafts = [
        choices[first : first + size - 1]
        for first, size in zip(batch.first_rows, batch.sizes, strict=False)
    ]
    return Batch(batch.indices, drafts, batch.positions, batch.logits)


@SIZES
def test_drafts_beyond_the_limit_of_a_request_are_not_accepted(sizes: list[int]) -> None:
    batch = with_accepted_drafts(make_ops(), make_batch(3, sizes))
    every = output_of(verify(make_ops(), batch))
    assert list(map(len, every)) == sizes
    limits = dict(zip(batch.indices, [0, 1, None, 2, None, 3], strict=True))
    columns = {i: {"draft_limit": limit} for i, limit in limits.items() if limit is not None}
    ops = make_ops(columns=columns)
    limited = [output_of(verify(ops, batch))]
    if min(sizes) == NUM_DRAFTS + 1:
        positions, indices = vector(batch.positions), vector(batch.indices)
        accepted = ops.verify_uniform(
            batch.logits, batch.input_ids(), positions, indices, indices.cpu().numpy()
        )
        limited.append(output_of(accepted))
    for outputs in limited:
        for index, output, tokens in zip(batch.indices, outputs, every, strict=True):
            limit = limits[index]
            assert output == (tokens if limit is None else tokens[: limit + 1])


# ---- relaxed acceptance

BEGIN, END, STOP = 5, 7, 11
THINKING = VllmOptions(thinking_begin_token=BEGIN, thinking_end_token=END)


def relaxed_columns(seed: int) -> dict[int, dict[str, Any]]:
    rng = random.Random(seed)
    return {
        index: {
            "temperature": 0.8 if index % 6 == 5 else 0.0,
            "thinking": int(index % 3 > 0),
            "relaxed_topk": rng.choice([1, 3, 6, VOCAB]),
            "relaxed_limit": rng.choice([0.0, 0.2, 0.6, 1.0]),
            "stop_ids": (STOP,),
        }
        for index in range(NUM_SLOTS)
    }


def with_likely_drafts(batch: Batch, seed: int) -> Batch:
    """Drafts among the most probable tokens of their rows; special tokens are frequent."""
    rng = random.Random(seed)
    logits = batch.logits.clone()
    for row in range(logits.shape[0]):
        if rng.random() < 0.4:
            logits[row, rng.choice([BEGIN, END, STOP])] = logits[row].max() + rng.choice([-0.5, 1])
    tops = logits.topk(5, 1).indices.tolist()
    drafts = [
        [
            rng.choice([tops[row][0]] * 4 + tops[row][1:] + [-1])
            for row in range(first, first + size - 1)
        ]
        for first, size in zip(batch.first_rows, batch.sizes, strict=False)
    ]
    return Batch(batch.indices, drafts, batch.positions, logits)


def as_uniform(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R*(K+1)] of the batch, the last one repeated, and drafts [R, K] with -1 for absent."""
    rows, drafts = [], []
    for first, size, given in zip(batch.first_rows, batch.sizes, batch.drafts, strict=False):
        rows += [first + min(i, size - 1) for i in range(NUM_DRAFTS + 1)]
        drafts.append(given + [-1] * (NUM_DRAFTS - len(given)))
    return vector(rows), vector(drafts, torch.int32)


@SIZES
@pytest.mark.thinned("seed")
@pytest.mark.parametrize("seed", range(3))
def test_relaxed_acceptance_equals_accept_on_uniform_rows(sizes: list[int], seed: int) -> None:
    """Over several steps, so that the phase of each request changes."""
    ops, other, strict = (
        make_ops(options=options, columns=relaxed_columns(seed))
        for options in (THINKING, THINKING, None)
    )
    rule_slots = other.slots
    lengths = [0, 0]
    for step in range(4):
        batch = with_likely_drafts(make_batch(10 * seed + step, sizes), seed + step)
        rows, drafts = as_uniform(batch)
        expected = accept(
            StepLayout((), len(sizes), NUM_DRAFTS, vector([], torch.int32), None),
            batch.logits[rows],
            drafts,
            AcceptanceRules(
                choices=sample(other, batch).to(torch.int32)[rows],
                relaxed=RelaxedRule(
                    rule_slots.of(vector(batch.indices)), rule_slots.delta_in_force, BEGIN, END
                ),
            ),
            backend=Backend.TORCH,
        )
        found = verify(ops, batch)
        assert output_of(found) == output_of(expected)
        assert torch.equal(ops.slots.table, rule_slots.table)
        assert torch.equal(ops.slots.delta_in_force, rule_slots.delta_in_force)
        lengths[0] += int(verify(strict, batch).num_accepted.sum())
        lengths[1] += int(found.num_accepted.sum())
    assert lengths[1] > lengths[0]


def one_request(
    ops: RowOps, logits: torch.Tensor, drafts: Sequence[int], slot: int = 0
) -> list[int]:
    (output,) = output_of(verify(ops, Batch([slot], [list(drafts)], [9], logits)))
    return output


def relaxed_ops(**columns: Any) -> RowOps:
    given = {"temperature": 0.0, "thinking": 1, "relaxed_topk": VOCAB, "relaxed_limit": 1.0}
    return make_ops(options=THINKING, columns={0: {**given, **columns}})


def rising_logits(rows: int = NUM_DRAFTS + 1) -> torch.Tensor:
    """The argmax is VOCAB - 1; all tokens are within a delta of 1."""
    return torch.linspace(0, 1, VOCAB, device=DEVICE).repeat(rows, 1)


def test_masked_tokens_are_never_accepted() -> None:
    logits = rising_logits()
    assert one_request(relaxed_ops(), logits, [30, 31, 32]) == [30, 31, 32, VOCAB - 1]
    logits[1, 31] = float("-inf")
    assert one_request(relaxed_ops(), logits, [30, 31, 32]) == [30, VOCAB - 1]


def test_requests_with_a_temperature_are_never_relaxed() -> None:
    logits = rising_logits()
    strict = make_ops(columns={0: {"temperature": 0.9}})
    choices = sample(strict, Batch([0], [[0] * 3], [9], logits)).tolist()
    drafts = [token - 1 for token in choices[:3]]
    assert one_request(relaxed_ops(temperature=0.9), logits, drafts) == choices[:1]


@pytest.mark.parametrize("token", [BEGIN, END, STOP])
def test_special_tokens_are_accepted_only_as_argmax(token: int) -> None:
    ops = relaxed_ops(stop_ids=(STOP,))
    assert one_request(ops, rising_logits(), [token, 30, 30]) == [VOCAB - 1]
    logits = rising_logits()
    logits[0, token] = 2.0
    assert one_request(ops, logits, [token, -1, -1])[0] == token


def phase_of(ops: RowOps, slot: int = 0) -> tuple[int, float]:
    thinking = ops.slots.of(vector([slot])).read("thinking", slice(0, 1))
    return int(thinking), float(ops.slots.delta_in_force[slot])


def test_the_phase_follows_steps_with_and_without_drafts() -> None:
    ops = relaxed_ops(thinking=0)
    no_drafts = vector([0]), vector([1]).bool()
    assert phase_of(ops) == (0, 0.0)
    assert one_request(ops, rising_logits(), [30, 30, 30]) == [VOCAB - 1]
    ops.follow_phase(vector([BEGIN]), *no_drafts)
    assert phase_of(ops) == (1, 1.0)
    assert len(one_request(ops, rising_logits(), [30, 30, 30])) == 4
    ops.follow_phase(vector([20]), *no_drafts)
    assert phase_of(ops) == (1, 1.0)
    logits = rising_logits()
    logits[1, END] = 2.0
    assert one_request(ops, logits, [30, END, 30]) == [30, END, VOCAB - 1]  # strict after the end
    assert phase_of(ops) == (0, 0.0)
    logits[0, BEGIN] = 2.0
    assert one_request(ops, logits, [-1, -1, -1]) == [BEGIN]
    assert phase_of(ops) == (1, 1.0)
    ops.follow_phase(vector([END]), *no_drafts)
    assert phase_of(ops) == (0, 0.0)


def test_unfinished_prompts_change_neither_phase_nor_step() -> None:
    columns = {
        0: {"thinking": 1, "relaxed_topk": 3, "relaxed_limit": 0.5},
        1: {"thinking": 0, "relaxed_limit": 0.5, "verification": VerifiedBy.REJECTION},
    }
    ops = make_ops(options=THINKING, columns=columns, keeps_draft_probs=True)
    before = ops.slots.table[:NUM_SLOTS].clone(), ops.slots.delta_in_force[:NUM_SLOTS].clone()
    logits = rising_logits(2)
    logits[0, END] = logits[1, BEGIN] = 50.0
    batch = Batch([0, 1], [[], []], [9, 9], logits)
    verify(ops, batch, unfinished=[0, 1])
    ops.follow_phase(vector([END, BEGIN]), vector([0, 1]), vector([0, 0]).bool())
    assert torch.equal(ops.slots.table[:NUM_SLOTS], before[0])
    assert torch.equal(ops.slots.delta_in_force[:NUM_SLOTS], before[1])
    verify(ops, batch)
    assert phase_of(ops, 0) == (0, 0.0)
    assert phase_of(ops, 1) == (1, 0.5)
    steps = ops.slots.of(vector([1])).read("draft_step", slice(0, 1))
    assert steps.tolist() == [1]


# ---- rejection and block

METHODS = (VerifiedBy.COUPLED, VerifiedBy.REJECTION, VerifiedBy.BLOCK)


def method_columns() -> Mapping[int, Mapping[str, Any]]:
    return {
        index: {
            "verification": METHODS[index % 3],
            "draft_sampling": DraftedBy.PLAIN if index % 3 else DraftedBy.COUPLED,
        }
        for index in range(NUM_SLOTS)
    }


def mixed_ops(backend: Backend = Backend.TORCH) -> RowOps:
    ops = make_ops(backend, columns=method_columns(), keeps_draft_probs=True)
    generator = torch.Generator().manual_seed(5)
    probs = torch.rand(ops.draft_probs.shape, generator=generator)
    ops.draft_probs.copy_(probs / probs.sum(2, keepdim=True))
    return ops


@pytest.mark.thinned("seed")
@pytest.mark.parametrize("seed", range(4))
@SIZES
def test_other_methods_do_not_change_coupled_and_greedy_requests(
    sizes: list[int], seed: int
) -> None:
    batch = make_batch(seed, sizes)
    batch = with_drafts(batch, sample(mixed_ops(), batch).tolist(), seed)
    together = output_of(verify(mixed_ops(), batch))
    # slots of temperature 0 are greedy with every method
    plain = [r for r, slot in enumerate(batch.indices) if slot % 3 == 0 or slot % 5 == 0]
    assert 0 < len(plain) < len(sizes)
    alone = output_of(verify(make_ops(), batch.of(plain)))
    assert [together[r] for r in plain] == alone


@pytest.mark.thinned("seed", cases=2)
@pytest.mark.parametrize("seed", range(4))
@SIZES
def test_backends_agree_on_batches_of_all_methods(sizes: list[int], seed: int) -> None:
    batch = make_batch(seed, sizes)
    batch = with_drafts(batch, sample(mixed_ops(), batch).tolist(), seed)
    torch_output, triton_output = (output_of(verify(mixed_ops(b), batch)) for b in Backend)
    assert torch_output == triton_output


@pytest.mark.parametrize("seed", range(4))
def test_rejection_and_block_give_the_same_on_ragged_and_uniform_rows(seed: int) -> None:
    batch = make_batch(seed, [4] * 6)
    batch = with_drafts(batch, sample(mixed_ops(), batch).tolist(), seed)
    uniform = output_of(verify(mixed_ops(), batch))
    extra = next(slot for slot in range(NUM_SLOTS) if slot not in batch.indices)
    ragged = Batch(
        [*batch.indices, extra],
        [*batch.drafts, []],
        [*batch.positions, 3],
        torch.cat([batch.logits, batch.logits[:1]]),
    )
    assert output_of(verify(mixed_ops(), ragged))[:-1] == uniform


def test_drafts_that_rejection_verifies_have_noise_of_their_own() -> None:
    """With equal logits, coupled drafts are the target's tokens and these are not."""
    ops = mixed_ops()
    positions = vector(range(16))
    for slot in (6, 1, 11, 8):  # of these methods, all sampled
        method = METHODS[slot % 3]
        flat, indices = torch.zeros(16, VOCAB, device=DEVICE), vector([slot] * 16)
        drafts = draft(ops, flat, indices, positions)
        equal = (drafts == ops.sample(flat, indices, positions)).sum()
        assert equal == 16 if method == VerifiedBy.COUPLED else equal < 10


@BACKENDS
def test_draft_probs_of_padding_rows_go_to_the_last_row(backend: Backend) -> None:
    ops = mixed_ops(backend)
    before = ops.draft_probs.clone()
    batch = make_batch(1, [1] * 4)
    batch.logits[2:] = float("nan")
    indices = vector([1, 2, -1, -1])  # rejection, block, padding
    draft(ops, batch.logits, indices, vector(batch.positions), step=1)
    changed = (ops.draft_probs != before).any(2)
    changed[NUM_SLOTS] = False
    assert changed.nonzero().tolist() == [[1, 1], [2, 1]]
    torch.testing.assert_close(ops.draft_probs[[1, 2], 1].sum(1), torch.ones(2, device=DEVICE))


# ---- distributions

ROWS = 20_000
SMALL_VOCAB = 12
SHARP = {"temperature": 0.9, "top_k": 9, "top_p": 0.95}


def many_ops(
    method: VerifiedBy, *, min_p: float = 0.0, draft_ids: Sequence[int] | None = None
) -> RowOps:
    settings = EngineSettings(VllmOptions(), 2, True, draft_ids=draft_ids)
    slots = RequestSlots(ROWS, torch.device("cpu"), settings)
    columns = {**SHARP, "verification": method, "draft_sampling": DraftedBy.PLAIN, "min_p": min_p}
    slots.stage(0, columns, 0)
    slots.apply()
    slots.table[:ROWS] = slots.table[0]
    slots.table[:ROWS, slots.columns.offset("seed")] = torch.arange(ROWS, dtype=torch.int32)
    slots.verified_by[:] = method
    return RowOps(slots, settings, Backend.TORCH, SMALL_VOCAB)


def distribution_tails(
    method: VerifiedBy,
    defect: str | None = None,
    *,
    min_p: float = 0.0,
    bias: float = 0.0,
    draft_ids: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Chi-square of the first and the second output token of many requests with two drafts.

    Even and odd slots have different draft distributions. The second token is compared among
    requests that have one; block verification does not keep it alone, so that its value is 1.
    Drafts see ``min_p``, but not the ``bias`` of two tokens.
    """
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(3, SMALL_VOCAB, generator=generator) * 1.5
    drafter = target[:2] + torch.randn(2, 2, SMALL_VOCAB, generator=generator)  # [parity, K, V]
    target[:, [1, 4]] += bias
    whole = drafter
    if draft_ids is not None:
        drafter = drafter[..., list(draft_ids)]
    ops = many_ops(method, min_p=min_p, draft_ids=draft_ids)
    slots = torch.arange(ROWS)
    positions = torch.full((ROWS,), 40)
    drafts = torch.stack(
        [draft(ops, drafter[slots % 2, k], slots, positions, column=k, step=k) for k in range(2)], 1
    )
    if defect == "slot":
        ops.draft_probs[:ROWS] = ops.draft_probs[:ROWS].roll(1, 0)
    elif defect == "step":
        ops.draft_probs.copy_(ops.draft_probs.flip(1))
    elif defect == "whole":  # not renormalized over the list
        shares = (whole / SHARP["temperature"]).softmax(-1)[..., list(draft_ids or ())].sum(-1)
        for parity in range(2):
            ops.draft_probs[parity:ROWS:2] *= shares[parity].unsqueeze(1)
    # a few requests without drafts make the rows ragged
    sizes = [3 if index % 50 else 1 for index in range(ROWS)]
    rows = torch.cat([target if size == 3 else target[:1] for size in sizes])
    kept = [given if size == 3 else [] for given, size in zip(drafts.tolist(), sizes, strict=True)]
    output = output_of(verify(ops, Batch(list(range(ROWS)), kept, [40] * ROWS, rows)))
    weights = (target / SHARP["temperature"]).softmax(1)
    tails = []
    for index in range(2):
        order = weights[index].argsort(descending=True)[: int(SHARP["top_k"])]
        mass = weights[index][order] / weights[index][order].sum()
        order = order[(mass.cumsum(0) - mass < SHARP["top_p"]) & (mass >= min_p * mass[0])]
        shares = torch.zeros(SMALL_VOCAB).index_copy(0, order, weights[index][order])
        shares /= shares.sum()
        found = [tokens[index] for tokens in output if len(tokens) > index]
        assert len(found) > ROWS / 10
        counts = torch.bincount(torch.tensor(found), minlength=SMALL_VOCAB)
        tails.append(tail(counts.tolist(), (shares * len(found)).tolist()))
    return tails[0], tails[1] if method == VerifiedBy.REJECTION else 1.0


LISTED = (0, 2, 3, 5, 8, 10, 11)


@pytest.mark.parametrize("draft_ids", [None, range(7), LISTED])
@pytest.mark.parametrize("method", METHODS[1:])
def test_output_has_the_distribution_of_the_target(
    method: VerifiedBy, draft_ids: Sequence[int] | None
) -> None:
    assert min(distribution_tails(method, draft_ids=draft_ids)) > 1e-3


@pytest.mark.parametrize("method", METHODS[1:])
def test_probabilities_that_are_not_those_of_the_list_are_noticed(method: VerifiedBy) -> None:
    assert min(distribution_tails(method, "whole", draft_ids=LISTED)) < 1e-5


@pytest.mark.parametrize("method", METHODS[1:])
def test_min_p_and_a_bias_that_drafts_do_not_see_keep_the_distribution(
    method: VerifiedBy,
) -> None:
    assert min(distribution_tails(method, min_p=0.2, bias=2.0)) > 1e-3


@pytest.mark.parametrize("defect", ["slot", "step"])
def test_probabilities_of_another_draft_are_noticed(defect: str) -> None:
    for method in METHODS[1:]:
        assert min(distribution_tails(method, defect)) < 1e-5


def test_shared_noise_of_draft_and_recovered_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = SimpleNamespace(ACCEPTANCE=Role.ACCEPTANCE, RECOVERED=Role.PLAIN_DRAFT)
    monkeypatch.setattr(rejection_reference, "Role", shared)
    assert min(distribution_tails(VerifiedBy.REJECTION)) < 1e-5


# ---- methods from outside the package


@SIZES
def test_a_registered_method_decides_for_its_requests_alone(sizes: list[int]) -> None:
    """Every second request accepts drafts among the two most probable tokens."""
    register_verification("top2", Top2Verification())
    try:
        plain, ops = make_ops(), make_ops()
        batch = make_batch(3, sizes)
        rng, choices = random.Random(3), sample(plain, batch).tolist()
        top2 = batch.logits.topk(2, dim=-1).indices.tolist()
        rows = [range(f, f + s) for f, s in zip(batch.first_rows, sizes, strict=False)]
        drafts = [[rng.choice([choices[row], *top2[row]]) for row in each[:-1]] for each in rows]
        batch = Batch(batch.indices, drafts, batch.positions, batch.logits)
        coupled = output_of(verify(plain, batch))
        for index in batch.indices[::2]:
            ops.slots.verified_by[index] = custom_codes()["top2"]
            column = ops.slots.columns.offset("verification")
            ops.slots.table[index, column] = custom_codes()["top2"]
        output = output_of(verify(ops, batch))
        assert output[1::2] == coupled[1::2]
        for each, own, tokens in zip(rows[::2], drafts[::2], output[::2], strict=True):
            accepted = 0
            while accepted < len(own) and own[accepted] in (
                choices[each[accepted]],
                *top2[each[accepted]],
            ):
                accepted += 1
            assert tokens == [*own[:accepted], choices[each[accepted]]]
        assert sum(map(len, output)) > sum(map(len, coupled))
    finally:
        unregister_verification("top2")


@SIZES
def test_method_that_fails_ends_no_engine(
    sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests get the tokens of the target, without drafts."""

    class Failing(CustomVerification):
        description = "fails"

        def num_accepted(self, *_: torch.Tensor) -> torch.Tensor:
            raise ValueError("no idea")

    register_verification("failing", Failing())
    try:
        ops = make_ops()
        batch = with_accepted_drafts(ops, make_batch(3, sizes))
        full = output_of(verify(ops, batch))
        for index in batch.indices[::2]:
            ops.slots.verified_by[index] = custom_codes()["failing"]
            column = ops.slots.columns.offset("verification")
            ops.slots.table[index, column] = custom_codes()["failing"]
        for _ in range(2):
            output = output_of(verify(ops, batch))
            assert output[::2] == [tokens[:1] for tokens in full[::2]]
            assert output[1::2] == full[1::2]
        (record,) = caplog.records
        assert "failing" in record.getMessage()
    finally:
        unregister_verification("failing")


def test_a_registered_method_is_a_choice_of_requests() -> None:
    register_verification("top2", Top2Verification())
    try:
        settings = EngineSettings(VllmOptions(), NUM_DRAFTS)
        assert not method_problems("name", "top2", settings)
        assert "block, top2, got 'other'" in method_problems("name", "other", settings)[0]
    finally:
        unregister_verification("top2")


class AcceptAll(CustomVerification):
    """Accepts every draft, and reads its logit."""

    description = "accepts every draft"

    def __init__(self) -> None:
        self.num_calls = 0

    def num_accepted(
        self, logits: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
    ) -> torch.Tensor:
        self.num_calls += 1
        logits[:, :-1].gather(-1, draft_tokens.unsqueeze(-1))
        logits.gather(-1, target_tokens.unsqueeze(-1))
        return torch.full((len(logits),), NUM_DRAFTS, device=logits.device)


def add_requests(ops: RowOps, method: str, indices: Sequence[int] = range(NUM_SLOTS)) -> None:
    """Stage greedy requests that name a method."""
    stops = {"all_stop_token_ids": set(), "ignore_eos": False, "min_tokens": 0}
    params = SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, **stops)
    for index in indices:
        options = RequestOptions(method)
        values = ops.slots.values(request_facts(params, options, 1), options, (1,))
        ops.slots.stage(index, values, index)
    ops.slots.apply()


@SIZES
def test_absent_drafts_disturb_no_method_and_are_not_accepted(sizes: list[int]) -> None:
    register_verification("all", AcceptAll())
    try:
        ops, batch = make_ops(), make_batch(3, sizes)
        batch.drafts[0][1] = -1
        add_requests(ops, "all")
        accepted = verify(ops, batch)
    finally:
        unregister_verification("all")
    assert accepted.num_accepted.tolist() == [2, *sizes[1:]]
    assert not accepted.status.any()


def test_requests_of_a_method_go_on_after_it_is_unregistered() -> None:
    """They are verified strictly once the engine creates the modes of another new method."""
    ops, batch = make_ops(), make_batch(3, [4] * 6)
    register_verification("first", AcceptAll())
    try:
        add_requests(ops, "first")
    finally:
        unregister_verification("first")
    register_verification("second", AcceptAll())
    try:
        add_requests(ops, "second", batch.indices[:1])
        counts = verify(ops, batch).num_accepted.tolist()
    finally:
        unregister_verification("second")
    assert counts[0] == NUM_DRAFTS + 1
    assert max(counts[1:]) < NUM_DRAFTS + 1


def test_a_method_that_is_registered_again_replaces_the_one_before() -> None:
    before, after = AcceptAll(), AcceptAll()
    register_verification("again", before)
    try:
        ops = make_ops()
        unregister_verification("again")
        register_verification("again", after)
        add_requests(ops, "again")
        verify(ops, make_batch(3, [4] * 6))
    finally:
        unregister_verification("again")
    assert (before.num_calls, after.num_calls) == (0, 1)


def test_methods_that_no_request_names_are_not_called() -> None:
    methods = {"one": AcceptAll(), "other": AcceptAll()}
    for name, method in methods.items():
        register_verification(name, method)
    try:
        ops = make_ops()
        add_requests(ops, "one")
        verify(ops, make_batch(3, [4] * 6))
    finally:
        for name in methods:
            unregister_verification(name)
    assert [method.num_calls for method in methods.values()] == [1, 0]


def test_synthetic_acceptance_with_draft_probs_samples_drafts() -> None:
    """``rejection_sample_method: synthetic`` with ``draft_sample_method: probabilistic``."""
    rates, batch = [0.5] * NUM_DRAFTS, make_batch(3, [1] * 4)
    drafts = [
        draft(
            make_ops(rates=rates, keeps_draft_probs=keeps),
            batch.logits,
            vector(batch.indices),
            vector(batch.positions),
        )
        for keeps in (False, True)
    ]
    assert torch.equal(*drafts)

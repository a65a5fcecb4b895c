"""R28: the suite sees what it is for: each of these defects, planted, fails it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.ops.sampling import Role, sample_tokens
from mtp_plugin.ops.sampling import rejection_reference as rejection
from mtp_plugin.ops.sampling import sample_reference as draws
from mtp_plugin.ops.step import Accepted, SlotRows
from mtp_plugin.speculative.verification import VerificationInputs, Verifier, draft_rules, verifier
from tests.distribution.chain import Language, Ways, texts
from tests.distribution.test_emitted import (
    EDITED,
    LEAST_TAIL,
    VOCAB,
    ban_tails,
    budget_tails,
    edited_tail,
    least_tail,
)
from tests.ops.on_device import DEVICE

Plant = Callable[[pytest.MonkeyPatch], None]


def residual_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    right = rejection._Case.next_tokens

    def wrong(case: Any, *others: torch.Tensor) -> torch.Tensor:
        moved = replace(case, q=case.q.roll(1, dims=1))
        return right(moved, *others)

    patch.setattr(rejection._Case, "next_tokens", wrong)


def cuts_without_renormalisation(patch: pytest.MonkeyPatch) -> None:
    """Of the target alone: what the cuts leave keeps the share that it had."""
    right = rejection._Case.of.__func__

    def wrong(cls: Any, logits: torch.Tensor, rows: Any, slots: Any, *others: Any) -> Any:
        case = right(cls, logits, rows, slots, *others)
        scores = draws.scaled(logits.float(), torch.ones(len(logits), device=DEVICE))
        mass = scores.exp().sum(dim=1).view(case.p.shape[:2])
        return replace(case, p=torch.where(case.p > 0, case.scores.exp() / mass.unsqueeze(2), 0))

    patch.setattr(rejection._Case, "of", classmethod(wrong))


def one_uniform_for_all_tests(patch: pytest.MonkeyPatch) -> None:
    right = rejection._Case.of.__func__

    def wrong(cls: Any, *inputs: Any) -> Any:
        case = right(cls, *inputs)
        return replace(case, tests=case.tests[:, :1].expand_as(case.tests))

    patch.setattr(rejection._Case, "of", classmethod(wrong))


def coupled_noise_under_rejection(patch: pytest.MonkeyPatch) -> None:
    """The token after a rejected draft is sampled with the noise of the draft."""
    patch.setattr(rejection, "gumbel", lambda *a: draws.gumbel(*a[:3], Role.PLAIN_DRAFT, *a[4:]))


def rejection_draws_of_the_target(patch: pytest.MonkeyPatch) -> None:
    """What follows a rejected draft is of p, as if nothing had been tested."""
    right = rejection._Case.next_tokens

    def wrong(case: Any, *others: torch.Tensor) -> torch.Tensor:
        return right(replace(case, is_present=torch.zeros_like(case.is_present)), *others)

    patch.setattr(rejection._Case, "next_tokens", wrong)


def residual_after_an_absent_draft(patch: pytest.MonkeyPatch) -> None:
    """The token after the last present draft is sampled as if the next had been rejected."""
    right = rejection._Case.next_tokens

    def wrong(case: Any, *others: torch.Tensor) -> torch.Tensor:
        return right(replace(case, is_present=torch.ones_like(case.is_present)), *others)

    patch.setattr(rejection._Case, "next_tokens", wrong)


def block_without_a_step(patch: pytest.MonkeyPatch) -> None:
    """The noise that decided on later drafts is used again."""
    for module in (rejection, draws):
        patch.setattr(
            module, "noise_steps", lambda slots, requests: torch.zeros_like(slots.of(requests))
        )


BOTH = ("rejection", "block")
PLANTED: list[tuple[Plant, tuple[str, ...]]] = [
    (residual_of_the_row_before, BOTH),
    (cuts_without_renormalisation, BOTH),
    (one_uniform_for_all_tests, BOTH),
    (coupled_noise_under_rejection, BOTH),
    (rejection_draws_of_the_target, BOTH),
    (residual_after_an_absent_draft, BOTH),
    (block_without_a_step, ("block",)),
]


@pytest.mark.parametrize(
    ("plant", "modes"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_defects_are_seen_r28(
    plant: Plant, modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    number, options = 16_000, {"temperature": 1.0, "top_k": 4}
    language = Language.of(11, VOCAB, likeness=0.3)
    ways = [Ways(mode, "plain", options) for mode in modes]
    absent = plant is residual_after_an_absent_draft
    text, _ = texts(language, ways, number=number, draft_len=3, length=4, absent=absent)
    tails = [least_tail(mine, language, options) for mine in text.split(number)]
    assert max(tails) < LEAST_TAIL / 50


def test_a_penalty_that_counts_rejected_drafts_is_seen_r28(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right_verify, right_note = Verifier.verify, verifier.update_token_history
    steps: list[VerificationInputs] = []

    def verify(self: Verifier, inputs: VerificationInputs, **others: Any) -> Accepted:
        steps.append(inputs)
        return right_verify(self, inputs, **others)

    def note(accepted: Accepted, slots: SlotRows, **others: Any) -> None:
        right_note(accepted, slots, **others)
        pools, drafts = slots.pools, steps[-1].draft_tokens
        assert pools is not None
        rows = slots.read("count_row", slice(0, len(accepted.tokens))).long()
        drafts = drafts.view(len(rows), -1).long()
        matches = accepted.num_accepted - 1
        for column in range(drafts.shape[1]):
            rejected = (column >= matches).to(torch.int16)
            pools.counts[rows, drafts[:, column]] += rejected

    monkeypatch.setattr(Verifier, "verify", verify)
    monkeypatch.setattr(verifier, "update_token_history", note)
    for pair in (("rejection", "plain"), ("block", "plain")):
        least, _ = edited_tail(pair, number=3000)
        assert least < LEAST_TAIL / 50


RESIDUAL = [("rejection", "plain"), ("block", "plain")]


def test_bans_that_look_at_a_rejected_draft_are_seen_r28(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejected draft, not its replacement, is the last token of the history."""
    right_verify, right_note = Verifier.verify, verifier.update_token_history
    drafts: list[torch.Tensor] = []

    def verify(self: Verifier, inputs: VerificationInputs, **others: Any) -> Accepted:
        drafts.append(inputs.draft_tokens)
        return right_verify(self, inputs, **others)

    def note(accepted: Accepted, slots: SlotRows, **others: Any) -> None:
        tokens = accepted.tokens.clone()
        mine = drafts[-1].view(len(tokens), -1)
        columns = torch.arange(mine.shape[1], device=DEVICE)
        is_rejected = columns == accepted.num_accepted.unsqueeze(1) - 1
        tokens[:, :-1] = torch.where(is_rejected, mine, tokens[:, :-1])
        right_note(replace(accepted, tokens=tokens), slots, **others)

    monkeypatch.setattr(Verifier, "verify", verify)
    monkeypatch.setattr(verifier, "update_token_history", note)
    for pair in (("coupled", "coupled"), *RESIDUAL):
        tails, _ = ban_tails([pair], draft_len=2)
        assert max(tails) < LEAST_TAIL / 50


def test_draft_probs_without_masks_are_seen_r28(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept draft probabilities are those without masked tokens."""
    right = draft_rules.keep_draft_probs

    def wrong(
        logits: torch.Tensor,
        rows: Any,
        slots: SlotRows,
        truncation: torch.Tensor,
        pool: torch.Tensor,
        **others: Any,
    ) -> None:
        assert slots.pools is not None
        everything = torch.full_like(slots.pools.allowed, -1)
        free = replace(slots, pools=replace(slots.pools, allowed=everything))
        sample_tokens(logits, rows, free, as_drafts=True, truncation=truncation, **others)
        right(logits, rows, free, truncation, pool, **others)

    monkeypatch.setattr(draft_rules, "keep_draft_probs", wrong)
    tails, _ = ban_tails(RESIDUAL, draft_len=3, number=2500)
    assert max(tails) < LEAST_TAIL / 50


@pytest.mark.parametrize(
    ("pair", "pools"), [(RESIDUAL[0], ("bias",)), (RESIDUAL[1], ("counts", "seen"))], ids="-".join
)
def test_draft_probs_without_logits_processing_are_seen_r28(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], pools: tuple[str, ...]
) -> None:
    """The kept draft probabilities are those without a bias, or without token counts."""
    right = draft_rules.keep_draft_probs

    def wrong(logits: torch.Tensor, rows: Any, slots: SlotRows, *others: Any, **more: Any) -> None:
        right(logits, rows, without(slots, pools), *others, **more)

    monkeypatch.setattr(draft_rules, "keep_draft_probs", wrong)
    least, _ = edited_tail(pair, number=40_000)
    assert least < LEAST_TAIL / 50


@pytest.mark.parametrize("pair", EDITED, ids="-".join)
def test_drafts_without_their_bias_are_seen_r28(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    """Neither drafts nor their kept probabilities see the bias: fewer drafts are accepted."""
    for name in ("sample_tokens", "keep_draft_probs"):
        right = getattr(draft_rules, name)

        def wrong(logits: Any, rows: Any, slots: Any, *o: Any, right: Any = right, **m: Any) -> Any:
            return right(logits, rows, without(slots, ("bias",)), *o, **m)

        monkeypatch.setattr(draft_rules, name, wrong)
    least, share = edited_tail(pair, number=5_000)
    assert least > LEAST_TAIL
    assert share < EDITED[pair] - 0.1


def without(slots: SlotRows, pools: tuple[str, ...]) -> SlotRows:
    """The same with nothing in some pools."""
    assert slots.pools is not None
    empty = {name: torch.zeros_like(getattr(slots.pools, name)) for name in pools}
    return replace(slots, pools=replace(slots.pools, **empty))


def test_probs_of_forced_drafts_are_seen_r28(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced draft counts as sampled: drafts after it are accepted too often."""
    right = rejection._Case.of.__func__

    def wrong(cls: Any, *inputs: Any) -> Any:
        case, free = (
            right(cls, *inputs),
            right(cls, *inputs[:-1], replace(inputs[-1], forced_ids=None)),
        )
        return replace(case, q=free.q)

    monkeypatch.setattr(rejection._Case, "of", classmethod(wrong))
    tails = budget_tails([("block", "plain")], draft_len=4, number=8000)
    assert max(tails) < LEAST_TAIL / 50

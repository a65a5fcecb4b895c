"""The set of modes that a worker holds: one reduction, each mode its own rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LOGITS_PROCESSING_OPTIONS
from mtp_plugin.ops.sampling import DRAFT_COLUMNS, SAMPLING_OPTIONS
from mtp_plugin.ops.step import SamplingKind, SlotRows, StepLayout
from mtp_plugin.speculative.drafting import make_verification_inputs
from mtp_plugin.speculative.host import DecodingOptions, HostStep
from mtp_plugin.speculative.verification import (
    StrictVerification,
    VerificationInputs,
    VerificationMode,
    Verifier,
)
from mtp_plugin.speculative.verification import verifier as verifier_module
from mtp_plugin.speculative.verification.draft_rules import GreedyDrafts
from tests.ops.chunks import check_sums, reference_sums
from tests.ops.on_device import DEVICE
from tests.ops.slots import slot_rows

K, VOCAB = 2, 8
OPTIONS = DecodingOptions(K), DEVICE


class EveryOther(VerificationMode):
    """Accepts all drafts of every other request; records its calls."""

    name = "every-other"
    served_options = frozenset({"n"})

    def __init__(self) -> None:
        super().__init__(*OPTIONS)
        self.calls: list[Any] = []

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        layout = inputs.layout
        self.calls.append((backend, inputs.logits.isinf().any().item()))
        mine = torch.arange(layout.num_generations, device=DEVICE) % 2 == 0
        return replace(rules, forced_matches=torch.where(mine, layout.draft_len, -1))


def step(slots: SlotRows | None = None, *, contexts: int = 0, **options: Any) -> VerificationInputs:
    """Four requests; the target's choices are 1, 2, 3, and only the first draft is right.

    After prompts of one token, for which the target chooses 6.
    """
    lens = torch.ones(contexts, dtype=torch.int32, device=DEVICE)
    rows = contexts + 4 * (K + 1)
    layout = StepLayout((1,) * contexts, 4, K, lens, torch.arange(rows, device=DEVICE))
    logits = torch.zeros(rows, VOCAB, device=DEVICE)
    logits[:contexts, 6] = 1.0
    logits[contexts:].view(4, K + 1, VOCAB)[:, range(K + 1), range(1, K + 2)] = 1.0
    if slots is not None:
        options |= {"slots": slots, "slot_ids": slots.slot_ids, "manager": object()}
    drafts = torch.tensor([1, 7] * 4, dtype=torch.int32, device=DEVICE)
    return make_verification_inputs(HostStep(layout, drafts, **options), logits)


@pytest.mark.parametrize("backend", Backend)
def test_every_mode_decides_its_own_rows(backend: Backend, monkeypatch: Any) -> None:
    reductions = []
    accept = verifier_module.accept
    monkeypatch.setattr(
        verifier_module, "accept", lambda *a, **kw: reductions.append(a) or accept(*a, **kw)
    )
    mode = EveryOther()
    last = torch.full((4,), -777, dtype=torch.int32, device=DEVICE)
    verifier = Verifier([StrictVerification(*OPTIONS), mode])
    accepted = verifier.verify(step(), last_tokens=last, backend=backend)
    forced, strict = [1, 7, 3], [1, 2, -1]
    assert accepted.tokens.tolist() == [forced, strict, forced, strict]
    assert last.tolist() == [3, 2, 3, 2]
    assert mode.calls == [(backend, False)]
    assert len(reductions) == 1
    choices = StrictVerification.served_options
    assert verifier.served_options == LOGITS_PROCESSING_OPTIONS | SAMPLING_OPTIONS | choices | {"n"}


HELD_BACK = {"prompt_len": 1, "min_tokens": 10**6, "stop_ids": [2]}


@pytest.mark.parametrize("backend", Backend)
def test_modes_read_logits_without_early_stops(backend: Backend) -> None:
    """A stop id that comes too early is masked for every mode, and back in place afterwards."""
    inputs = step(slot_rows([HELD_BACK] * 4), sampling_kind=SamplingKind.PROCESSED)
    before, mode = inputs.logits.clone(), EveryOther()
    accepted = Verifier([mode]).verify(inputs, backend=backend)
    assert mode.calls == [(backend, True)]
    assert 2 not in accepted.tokens
    assert torch.equal(inputs.logits, before)


@pytest.mark.parametrize("backend", Backend)
def test_greedy_step_reads_no_logits_processing(backend: Backend) -> None:
    """A greedy step reads no slots."""
    inputs, mode = step(slot_rows([HELD_BACK] * 4)), EveryOther()
    accepted = Verifier([mode]).verify(inputs, backend=backend)
    assert mode.calls == [(backend, False)]
    assert accepted.tokens.tolist() == [[1, 7, 3], [1, 2, -1]] * 2


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("keeps_scores", [False, True])
@pytest.mark.parametrize("only_samples", [False, True])
def test_step_that_only_samples_returns_sums(
    only_samples: bool, keeps_scores: bool, backend: Backend
) -> None:
    """Of raw rows: not with logits processing, or with processed log-probabilities."""
    requests = [{"temperature": 1.0, "top_p": 0.9, "logprobs": n} for n in (-1, 0, 2, -1)]
    values = [
        {**request, "top_k": 0, "min_p": 0.0, "seed": (n, 1)} for n, request in enumerate(requests)
    ]
    inputs = step(
        slot_rows(values),
        sampling_kind=SamplingKind.SAMPLED if only_samples else SamplingKind.PROCESSED,
    )
    verifier = Verifier([StrictVerification(*OPTIONS)], keeps_scores=keeps_scores)
    accepted = verifier.verify(inputs, backend=backend)
    assert (accepted.sums is not None) == (only_samples and not keeps_scores)
    assert (accepted.scores is not None) == keeps_scores
    if accepted.sums is not None:
        is_needed = torch.tensor([False, True, True, False]).repeat_interleave(K + 1).to(DEVICE)
        check_sums(accepted.sums, reference_sums(inputs.logits), is_needed)


def test_modes_with_different_draft_rules_are_refused() -> None:
    mode = EveryOther()
    mode.draft_rule = GreedyDrafts()
    with pytest.raises(ConfigError, match="the draft rule of strict, got every-other with"):
        Verifier([StrictVerification(*OPTIONS), mode])


class AllOfRejection(VerificationMode):
    """Accepts all drafts of requests with ``rejection``, and gives them token 5."""

    name = "all"
    verifications = ("rejection",)

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        rows, generations = len(inputs.logits), inputs.layout.num_generations
        return replace(
            rules,
            choices=torch.full((rows,), 5, dtype=torch.int32, device=DEVICE),
            forced_matches=torch.full((generations,), K, dtype=torch.uint8, device=DEVICE),
        )


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.SAMPLED])
@pytest.mark.parametrize("backend", Backend)
def test_decisions_about_requests_with_another_method_are_dropped(
    backend: Backend, kind: SamplingKind
) -> None:
    """Also target tokens of a greedy step, a number of drafts of an unsigned type, and prompts."""
    methods = [1, 0, 0, 1, 0, 1]
    requests = [{"temperature": 0.0, "verification": method} for method in methods]
    slots = slot_rows(requests, columns=DRAFT_COLUMNS)
    verifier = Verifier([StrictVerification(*OPTIONS), AllOfRejection(*OPTIONS)])
    accepted = verifier.verify(step(slots, contexts=2, sampling_kind=kind), backend=backend)
    prompt, strict, own = [6, -1, -1], [1, 2, -1], [1, 7, 5]
    assert accepted.tokens.tolist() == [prompt, prompt, strict, own, strict, own]

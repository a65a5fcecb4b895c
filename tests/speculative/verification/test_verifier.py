"""The set of modes that a worker holds: one reduction, each mode its own rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, Verdict
from mtp_plugin.speculative.step import RowParameters, StepLayout
from mtp_plugin.speculative.verification import (
    ModeOptions,
    StrictVerification,
    VerificationInputs,
    VerificationMode,
    Verifier,
)
from mtp_plugin.speculative.verification import verifier as verifier_module
from mtp_plugin.speculative.verification.draft_rules import GreedyDrafts

K, VOCAB = 2, 8
OPTIONS = ModeOptions(SimpleNamespace(), K, torch.device("cpu"))


class EveryOther(VerificationMode):
    """Accepts all drafts of every other request; notes what it is asked."""

    name = "every-other"

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.calls: list[Any] = []

    @override
    def verify(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        *,
        backend: Backend,
    ) -> AcceptanceRules:
        self.calls.append(("verify", backend, inputs.logits.isinf().any().item()))
        mine = torch.arange(layout.num_generations) % 2 == 0
        return replace(rules, forced_matches=torch.where(mine, layout.draft_len, -1))

    @override
    def settle(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        verdict: Verdict,
    ) -> None:
        self.calls.append(("settle", verdict.accepted.num_accepted.tolist()))


def step(parameters: RowParameters | None = None) -> tuple[StepLayout, VerificationInputs]:
    """Four requests; the target's choices are 1, 2, 3, and only the first draft is right."""
    layout = StepLayout((), 4, K, torch.empty(0, dtype=torch.int32), torch.arange(4 * (K + 1)))
    logits = torch.zeros(4 * (K + 1), VOCAB)
    logits.view(4, K + 1, VOCAB)[:, range(K + 1), range(1, K + 2)] = 1.0
    spec = SimpleNamespace(
        draft_tokens=torch.tensor([1, 7] * 4, dtype=torch.int32), row_parameters=parameters
    )
    return layout, VerificationInputs.read(layout, logits, None, spec)


@pytest.mark.parametrize("backend", Backend)
def test_every_mode_decides_its_own_rows(backend: Backend, monkeypatch: Any) -> None:
    reductions = []
    accept = verifier_module.accept
    monkeypatch.setattr(
        verifier_module, "accept", lambda *a, **kw: reductions.append(a) or accept(*a, **kw)
    )
    mode = EveryOther()
    layout, inputs = step()
    last = torch.full((4,), -777, dtype=torch.int32)
    accepted = Verifier([StrictVerification(OPTIONS), mode]).verify(
        layout, inputs, last_tokens=last, backend=backend
    )
    forced, strict = [1, 7, 3], [1, 2, -1]
    assert accepted.tokens.tolist() == [forced, strict, forced, strict]
    assert last.tolist() == [3, 2, 3, 2]
    assert mode.calls == [("verify", backend, False), ("settle", [3, 2, 3, 2])]
    assert len(reductions) == 1


def test_modes_read_logits_without_early_stops() -> None:
    """A stop id that comes too early is masked for every mode, and back in place afterwards."""
    stops = torch.full((4, 1), 2, dtype=torch.int32)
    layout, inputs = step(RowParameters(stops, torch.full((4,), 10**6, dtype=torch.int32)))
    before, mode = inputs.logits.clone(), EveryOther()
    accepted = Verifier([mode]).verify(layout, inputs, backend=Backend.TORCH)
    assert mode.calls[0] == ("verify", Backend.TORCH, True)
    assert 2 not in accepted.tokens
    assert torch.equal(inputs.logits, before)


def test_modes_of_a_set_draw_their_drafts_alike() -> None:
    mode = EveryOther()
    mode.draft_rule = GreedyDrafts()
    with pytest.raises(ConfigError, match="drafts are drawn as those of strict are, got every-oth"):
        Verifier([StrictVerification(OPTIONS), mode])


def test_a_set_holds_something() -> None:
    with pytest.raises(ConfigError, match="expected at least one mode, got none"):
        Verifier([])

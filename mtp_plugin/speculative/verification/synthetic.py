"""Synthetic verification: draws decide how many drafts stand, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.ops.synthetic_acceptance import (
    SyntheticRule,
    forced_matches,
    synthetic_rule,
)
from mtp_plugin.speculative.step import StepLayout
from mtp_plugin.speculative.verification.contract import (
    ModeOptions,
    VerificationInputs,
    VerificationMode,
)


class SyntheticVerification(VerificationMode):
    """Accepts drafts by draws of ``synthetic_seed`` at the rates of ``synthetic_acceptance``."""

    name = "synthetic"
    verification = "synthetic"

    def __init__(self, options: ModeOptions) -> None:
        super().__init__(options)
        mtp = options.config.mtp
        shares = mtp.acceptance_shares(options.max_draft_len)
        # captured graphs read the rates where they lie
        self.rule = synthetic_rule(shares, mtp.synthetic_seed, options.device)

    @override
    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rule = SyntheticRule(to(self.rule.thresholds), to(self.rule.seed))

    @classmethod
    @override
    def check(cls, config: Any, max_draft_len: int) -> None:
        expect(
            not getattr(config, "use_relaxed_acceptance_for_thinking", False),
            ConfigError,
            "synthetic acceptance cannot be relaxed; expected "
            "use_relaxed_acceptance_for_thinking: false",
        )
        config.mtp.acceptance_shares(max_draft_len)

    @classmethod
    @override
    def label(cls, config: Any, max_draft_len: int) -> Label | None:
        shares = config.mtp.acceptance_shares(max_draft_len)
        return Label(
            name=cls.name,
            settings=" / ".join(f"{share:.0%}" for share in shares),
            note="for benchmarks: drafts are accepted by draw, the text is not the model's",
            is_drawn=True,
        )

    @override
    def verify(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        *,
        backend: Backend,
    ) -> AcceptanceRules:
        if layout.draft_len == 0:
            return rules
        numbers = None if inputs.parameters is None else inputs.parameters.request_numbers
        forced = forced_matches(layout, self.rule, numbers, backend=backend)
        return replace(rules, forced_matches=forced)

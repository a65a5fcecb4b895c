"""Synthetic verification: accept drafts at random at given rates, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.synthetic_acceptance import (
    SyntheticRule,
    synthetic_acceptance,
    synthetic_rule,
)
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode


class SyntheticVerification(VerificationMode):
    """Accepts drafts at the rates of ``synthetic_acceptance`` and ignores the logits.

    Random numbers are keyed by ``synthetic_seed``, the request's number and the token's position.
    """

    name = "synthetic"
    verifications = ("synthetic",)
    reads_rows = False

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        rates = options.mtp.acceptance_shares(options.max_draft_len)
        # captured graphs read these buffers
        self.rule = synthetic_rule(rates, options.mtp.synthetic_seed, device)

    @override
    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rule = SyntheticRule(to(self.rule.thresholds), to(self.rule.seed))

    @classmethod
    @override
    def check(cls, options: DecodingOptions) -> None:
        expect(
            not options.use_relaxed_acceptance_for_thinking,
            ConfigError,
            "synthetic acceptance cannot be relaxed; expected "
            "use_relaxed_acceptance_for_thinking: false",
        )
        options.mtp.acceptance_shares(options.max_draft_len)

    @classmethod
    @override
    def label(cls, options: DecodingOptions) -> Label | None:
        rates = options.mtp.acceptance_shares(options.max_draft_len)
        return Label(
            name=cls.name,
            settings=" / ".join(f"{rate:.0%}" for rate in rates),
            note="for benchmarks: drafts are accepted at random, the output is not the model's",
            is_drawn=True,
        )

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        draft_len = inputs.layout.draft_len
        if draft_len == 0:
            return rules
        positions = inputs.first_positions()
        # without a manager all requests have number 0
        slots = inputs.slots if inputs.missing_slots is None else inputs.expect_slots()
        generations = slice(inputs.layout.num_contexts, inputs.layout.num_requests)
        forced = synthetic_acceptance(
            positions[generations],
            draft_len,
            self.rule,
            None if slots is None else slots.part(generations),
            backend=backend,
        )
        return replace(rules, forced_matches=forced)

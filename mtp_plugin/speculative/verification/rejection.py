"""Rejection and block verification: drafts stand by the odds of their draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import Number
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.ops.sampling import (
    STEP_COLUMN,
    ProposedDrafts,
    TargetSamples,
    rejection_sample,
)
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode


class RejectionVerification(VerificationMode):
    """Claims the generations whose requests draw and ask for ``rejection`` or ``block``.

    What they emit is distributed as the target's own draws are, whatever drafts; it is the same
    again for the same schedule and K only. Reads the manager's ``draft_probs``.
    """

    name = "rejection"
    verifications = ("rejection", "block")
    columns = (STEP_COLUMN,)
    reads_truncation = True

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._by_block = "block" in options.mtp.verifications

    @classmethod
    @override
    def count_draft_probs(cls, options: DecodingOptions) -> int:
        return options.max_draft_len if options.mtp.draft_sampling != "greedy" else 0

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        step, truncation = inputs.step, inputs.truncation
        if rules.choices is None or truncation is None:  # everybody is greedy
            return rules
        result = rejection_sample(
            inputs.logits,
            inputs.expect_rows(),
            step.sampling_slots(),
            ProposedDrafts(step.draft_tokens, step.draft_probs, step.draft_lens),
            TargetSamples(rules.choices, truncation, rules.forced_ids),
            by_block=self._by_block,
            backend=backend,
        )
        return replace(rules, choices=result.tokens, forced_matches=result.num_accepted)

    @override
    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:
        # a preempted request has taken no more steps than it emitted tokens: noise is not met again
        return {STEP_COLUMN.name: max(len(tokens) - facts.stop.prompt_len, 0)}

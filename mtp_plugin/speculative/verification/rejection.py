"""Rejection sampling: accept drafts by the ratio of target and draft probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import (
    STEP_COLUMN,
    ProposedDrafts,
    TargetSamples,
    rejection_sample,
)
from mtp_plugin.requests.columns import Number
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode


class RejectionVerification(VerificationMode):
    """Rejection sampling of drafts, one by one (``rejection``) or as a block (``block``).

    Owns the generations that sample and select one of these methods. Their output has the
    distribution of non-speculative decoding; it depends on the schedule and on K, so equal seeds
    give equal output only if these are equal too. Reads ``draft_probs`` of the manager.
    """

    name = "rejection"
    verifications = ("rejection", "block")
    columns = (STEP_COLUMN,)
    reads_truncation = True
    reads_method = True

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._by_block = "block" in options.mtp.verifications

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        truncation = inputs.truncation
        if rules.choices is None or truncation is None:  # all requests are greedy
            return rules
        result = rejection_sample(
            inputs.logits,
            inputs.expect_rows(),
            inputs.expect_slots(),
            ProposedDrafts(inputs.draft_tokens, inputs.draft_probs, inputs.draft_lens),
            TargetSamples(rules.choices, truncation, rules.forced_ids),
            by_block=self._by_block,
            backend=backend,
        )
        return replace(rules, choices=result.tokens, forced_matches=result.num_accepted)

    @override
    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:
        # a request has taken no more steps than it has output tokens: no noise is used twice
        return {STEP_COLUMN.name: max(len(tokens) - facts.stop.prompt_len, 0)}

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
from mtp_plugin.speculative.ops.sampling import STEP_COLUMN
from mtp_plugin.speculative.ops.sampling.residual import judge
from mtp_plugin.speculative.verification.contract import VerificationInputs, VerificationMode


class ResidualVerification(VerificationMode):
    """Claims the generations whose requests draw and ask for ``rejection`` or ``block``.

    What they emit is distributed as the target's own draws are, whatever drafts; it is the same
    again for the same schedule and K only. Reads the manager's ``draft_probs``.
    """

    name = "residual"
    verifications = ("rejection", "block")
    columns = (STEP_COLUMN,)
    reads_cuts = True

    @classmethod
    @override
    def count_draft_probs(cls, options: DecodingOptions) -> int:
        return options.max_draft_len if options.mtp.draft_sampling != "greedy" else 0

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        step, cuts = inputs.step, inputs.cuts
        if rules.choices is None or cuts is None:  # everybody is greedy
            return rules
        draft_lens = step.draft_lens
        if rules.forced_ids is not None:
            draft_lens = self._up_to_forced(inputs, rules.forced_ids)
        judgement = judge(
            inputs.logits,
            inputs.expect_rows(),
            step.drawn_slots(),
            step.draft_tokens,
            step.draft_probs,
            cuts,
            rules.choices,
            draft_lens=draft_lens,
            backend=backend,
        )
        choices = judgement.choices
        if rules.forced_ids is not None:
            choices = torch.where(rules.forced_ids >= 0, rules.forced_ids, choices)
        return replace(rules, choices=choices, forced_matches=judgement.matches)

    @staticmethod
    def _up_to_forced(inputs: VerificationInputs, forced: torch.Tensor) -> torch.Tensor:
        """Drafts of each generation that may stand [G] int32: none from the first row on whose
        token is forced, as no odds decide there."""
        layout, told = inputs.layout, inputs.step.draft_lens
        rows = forced[layout.num_contexts :].view(layout.num_generations, layout.step_rows)
        places = torch.arange(layout.step_rows, dtype=torch.int32, device=forced.device)
        first = torch.where(rows >= 0, places, layout.draft_len).amin(dim=1)
        return first if told is None else torch.minimum(first, told.to(first.dtype))

    @override
    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:
        # a preempted request has taken no more steps than it emitted tokens: noise is not met again
        return {STEP_COLUMN.name: max(len(tokens) - facts.stop.prompt_len, 0)}

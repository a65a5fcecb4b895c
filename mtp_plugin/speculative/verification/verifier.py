"""The set of verification modes that a worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import STRICT, accept
from mtp_plugin.speculative.ops.logits import early_stops_masked
from mtp_plugin.speculative.step import Accepted, StepLayout
from mtp_plugin.speculative.verification.contract import VerificationInputs, VerificationMode
from mtp_plugin.speculative.verification.draft_rules import DraftRule


class Verifier:
    """Target logits -> accepted tokens, by every mode of a set.

    Each mode decides its own rows; one reduction of the logits serves them all.

    Raises:
        ConfigError: modes that want their drafts drawn in different ways, or none at all.
    """

    def __init__(self, modes: Sequence[VerificationMode]) -> None:
        expect(len(modes) > 0, ConfigError, "verification: expected at least one mode, got none")
        self.modes = tuple(modes)
        self.draft_rule: DraftRule = modes[0].draft_rule
        others = [mode.name for mode in modes if mode.draft_rule is not self.draft_rule]
        expect(
            not others,
            ConfigError,
            f"verification: expected modes whose drafts are drawn as those of {modes[0].name} are, "
            f"got {', '.join(others)} beside it",
        )

    def verify(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        *,
        last_tokens: torch.Tensor | None = None,
        backend: Backend,
    ) -> Accepted:
        """Accept a step's drafts.

        Args:
            last_tokens: [R] int32, any stride: takes each request's last emitted token.

        Raises:
            TensorContractError, MetadataError: an input that does not fit the others.
        """
        with self._without_early_stops(layout, inputs, backend) as masked:
            if masked is not inputs.logits:
                inputs = replace(inputs, logits=masked)
            rules = STRICT
            for mode in self.modes:
                rules = mode.verify(layout, inputs, rules, backend=backend)
            verdict = accept(
                layout,
                masked,
                inputs.draft_tokens,
                rules,
                draft_lens=inputs.draft_lens,
                final_context=inputs.final_context,
                last_tokens=last_tokens,
                backend=backend,
            )
            for mode in self.modes:
                mode.settle(layout, inputs, rules, verdict)
        return verdict.accepted

    @staticmethod
    def _without_early_stops(
        layout: StepLayout, inputs: VerificationInputs, backend: Backend
    ) -> AbstractContextManager[torch.Tensor]:
        parameters = inputs.parameters
        if parameters is None or parameters.min_tokens_end is None:
            return nullcontext(inputs.logits)
        return early_stops_masked(layout, inputs.logits, parameters, backend=backend)

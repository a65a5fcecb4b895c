"""Verifies a step with all verification modes of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.acceptance import STRICT, AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_mask import mask_disallowed_tokens
from mtp_plugin.ops.logit_rows import LOGITS_PROCESSING_OPTIONS, LogitRows, ThinkingRule
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling import (
    SAMPLING_OPTIONS,
    TRUNCATION_SIZE,
    processed_scores,
    sample_tokens,
)
from mtp_plugin.ops.step import Accepted, SamplingKind
from mtp_plugin.ops.thinking_budget import force_thinking_end, update_thinking_state
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.speculative.verification.draft_rules import DraftRule
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode


class Verifier:
    """Samples the target tokens of a step and accepts its drafts.

    Each mode adds rules for the rows that it verifies; one launch then accepts for all modes.

    Args:
        thinking: the rule of thinking budgets; None: budgets are not supported.
        keeps_scores: also return the processed scores, for ``logprobs_mode: processed``.

    Raises:
        ConfigError: no modes, or modes with different draft rules.
    """

    def __init__(
        self,
        modes: Sequence[VerificationMode],
        thinking: ThinkingRule | None = None,
        *,
        keeps_scores: bool = False,
    ) -> None:
        expect(len(modes) > 0, ConfigError, "verification: expected at least one mode, got none")
        self.modes = tuple(modes)
        self.thinking = thinking
        self.keeps_scores = keeps_scores
        self.draft_rule: DraftRule = modes[0].draft_rule
        others = [mode.name for mode in modes if mode.draft_rule is not self.draft_rule]
        expect(
            not others,
            ConfigError,
            f"verification: expected modes with the draft rule of {modes[0].name}, got "
            f"{', '.join(others)} with another one",
        )

    @property
    def served_options(self) -> frozenset[str]:
        """Return the request options that sampling, logits processing or a mode supports, without
        those that a mode refuses."""
        served = (LOGITS_PROCESSING_OPTIONS | SAMPLING_OPTIONS).union(
            *(m.served_options for m in self.modes)
        )
        if self.thinking is not None:
            served |= {"thinking_token_budget"}
        return served.difference(*(mode.refused_options for mode in self.modes))

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``to`` to all tensors, as ``nn.Module._apply`` does."""
        for mode in self.modes:
            mode.move(to)
        if self.thinking is not None:
            self.thinking = self.thinking.moved(to)

    def verify(
        self,
        inputs: VerificationInputs,
        *,
        last_tokens: torch.Tensor | None = None,
        backend: Backend,
    ) -> Accepted:
        """Verify the drafts of a step, and update the slots with the output tokens.

        Args:
            last_tokens: [R] int32, any stride: set to each request's last output token.

        Raises:
            TensorContractError, MetadataError: inputs that do not fit each other.
        """
        if inputs.step.sampling_kind is SamplingKind.GREEDY:
            return self._accept(inputs, STRICT, last_tokens, backend)
        step, slots = inputs.step, inputs.step.sampling_slots()
        rows = LogitRows.of_target(step.layout, step.draft_tokens)
        inputs = replace(inputs, rows=rows)
        if step.sampling_kind is SamplingKind.SAMPLED:
            return self._accept_sampled(inputs, last_tokens, backend)
        with mask_disallowed_tokens(inputs.logits, rows, slots, backend=backend) as logits:
            accepted = self._accept_sampled(replace(inputs, logits=logits), last_tokens, backend)
        drafted = rows.positions if step.layout.draft_len else None
        update_token_history(accepted, slots, positions=drafted, backend=backend)
        if self.thinking is not None:
            update_thinking_state(accepted, slots, self.thinking, backend=backend)
        return accepted

    def _accept_sampled(
        self, inputs: VerificationInputs, last_tokens: torch.Tensor | None, backend: Backend
    ) -> Accepted:
        """Sample the target tokens, and verify the drafts with them and the modes' rules."""
        logits, slots = inputs.logits, inputs.step.sampling_slots()
        if self.keeps_scores or any(mode.reads_truncation for mode in self.modes):
            truncation = torch.empty(
                len(logits), TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
            )
            inputs = replace(inputs, truncation=truncation)
        # partial sums are of raw logits, but a PROCESSED step reads processed logits
        is_processed = inputs.step.sampling_kind is SamplingKind.PROCESSED
        is_raw = not is_processed and not self.keeps_scores
        sums = RowSums.unwritten(logits) if is_raw else None
        target_tokens = sample_tokens(
            logits,
            inputs.expect_rows(),
            slots,
            truncation=inputs.truncation,
            sums=sums,
            backend=backend,
        )
        forced = None
        if self.thinking is not None and is_processed:
            forced = force_thinking_end(
                inputs.layout,
                inputs.step.draft_tokens,
                slots,
                self.thinking,
                target_tokens,
                backend=backend,
            )
        rules = AcceptanceRules(choices=target_tokens, forced_ids=forced, processed_slots=slots)
        accepted = self._accept(inputs, rules, last_tokens, backend)
        if not self.keeps_scores or inputs.truncation is None:
            return replace(accepted, sums=sums)
        scores = processed_scores(
            logits, inputs.expect_rows(), slots, inputs.truncation, forced, backend=backend
        )
        return replace(accepted, scores=scores)

    def _accept(
        self,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        last_tokens: torch.Tensor | None,
        backend: Backend,
    ) -> Accepted:
        """Verify drafts by ``rules``, to which each mode adds its own."""
        step = inputs.step
        for mode in self.modes:
            rules = mode.verify(inputs, rules, backend=backend)
        accepted = accept(
            step.layout,
            inputs.logits,
            step.draft_tokens,
            rules,
            draft_lens=step.draft_lens,
            final_context=step.final_context,
            last_tokens=last_tokens,
            backend=backend,
        )
        for mode in self.modes:
            mode.mark_failed(inputs, accepted)
        return accepted

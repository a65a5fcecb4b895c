"""The set of verification modes that a worker holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import LOGITS_PROCESSING_OPTIONS, LogitRows, ThinkingRule
from mtp_plugin.speculative.ops.acceptance import STRICT, AcceptanceRules, accept
from mtp_plugin.speculative.ops.logit_mask import mask_disallowed_tokens
from mtp_plugin.speculative.ops.sampling import (
    SAMPLING_OPTIONS,
    TRUNCATION_SIZE,
    processed_scores,
    sample_tokens,
)
from mtp_plugin.speculative.ops.thinking_budget import force_thinking_end, update_thinking_state
from mtp_plugin.speculative.ops.token_history import update_token_history
from mtp_plugin.speculative.row_sums import RowSums
from mtp_plugin.speculative.step import Accepted, SamplingKind
from mtp_plugin.speculative.verification.draft_rules import DraftRule
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode


class Verifier:
    """Target logits -> accepted tokens, by every mode of a set.

    Each mode decides its own rows; one reduction of the logits serves them all.

    Args:
        thinking: what budgets of thinking go by; None: no request has one.
        keeps_scores: log-probabilities are of what tokens were chosen from, so that is kept.

    Raises:
        ConfigError: modes that want their drafts drawn in different ways, or none at all.
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
            f"verification: expected modes whose drafts are drawn as those of {modes[0].name} are, "
            f"got {', '.join(others)} beside it",
        )

    @property
    def served_options(self) -> frozenset[str]:
        """Options of a request that draws, edits of the logits or some mode give, and no mode
        refuses."""
        served = (LOGITS_PROCESSING_OPTIONS | SAMPLING_OPTIONS).union(
            *(m.served_options for m in self.modes)
        )
        if self.thinking is not None:
            served |= {"thinking_token_budget"}
        return served.difference(*(mode.refused_options for mode in self.modes))

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors of modes and budgets, as ``nn.Module.to`` does those of a module."""
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
        """Accept a step's drafts, and move what modes keep per slot on by what was emitted.

        Args:
            last_tokens: [R] int32, any stride: takes each request's last emitted token.

        Raises:
            TensorContractError, MetadataError: an input that does not fit the others.
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
        """What the modes accept, where the target's tokens are drawn."""
        logits, slots = inputs.logits, inputs.step.sampling_slots()
        if self.keeps_scores or any(mode.reads_truncation for mode in self.modes):
            truncation = torch.empty(
                len(logits), TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
            )
            inputs = replace(inputs, truncation=truncation)
        # what is edited in part is no raw row
        is_processed = inputs.step.sampling_kind is SamplingKind.PROCESSED
        is_raw = not is_processed and not self.keeps_scores
        sums = RowSums.unwritten(logits) if is_raw else None
        choices = sample_tokens(
            logits,
            inputs.expect_rows(),
            slots,
            truncation=inputs.truncation,
            sums=sums,
            backend=backend,
        )
        forced = None
        if self.thinking is not None and is_processed:
            where = inputs.layout, inputs.step.draft_tokens, slots
            forced = force_thinking_end(*where, self.thinking, choices, backend=backend)
        rules = AcceptanceRules(choices=choices, forced_ids=forced, edited_by=slots)
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
        """What the modes accept, each of its own rows."""
        step = inputs.step
        for mode in self.modes:
            rules = mode.verify(inputs, rules, backend=backend)
        return accept(
            step.layout,
            inputs.logits,
            step.draft_tokens,
            rules,
            draft_lens=step.draft_lens,
            final_context=step.final_context,
            last_tokens=last_tokens,
            backend=backend,
        )

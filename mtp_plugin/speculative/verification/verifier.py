"""Verifies a step with all verification modes of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.acceptance import STRICT, AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_mask import mask_disallowed_tokens
from mtp_plugin.ops.logit_rows import LOGITS_PROCESSING_OPTIONS, ThinkingRule
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
from mtp_plugin.speculative.verification.mode import (
    VerificationInputs,
    VerificationMode,
    argmax_tokens,
)
from mtp_plugin.verifications import METHODS


class Verifier:
    """Samples the target tokens of a step and accepts its drafts.

    Each mode adds rules for the rows that it verifies; one launch then accepts for all modes.

    Args:
        thinking: the rule of thinking budgets; None: budgets are not supported.
        keeps_scores: also return the processed scores, for ``logprobs_mode: processed``.
        keeps_sums: also return log-sum-exp partials, from which log-probabilities are computed.
        fills_tokens: for an engine that embeds every id: in steps that sample, a request whose row
            has no finite logit gets token 0, and tokens are int64, 0 after the accepted ones. By
            default it gets none, and `STATUS_NO_FINITE_LOGIT`.
        keeps_rows: as in `accept`.

    Raises:
        ConfigError: no modes, or modes with different draft rules.
    """

    def __init__(
        self,
        modes: Sequence[VerificationMode],
        thinking: ThinkingRule | None = None,
        *,
        keeps_scores: bool = False,
        keeps_sums: bool = True,
        fills_tokens: bool = False,
        keeps_rows: bool = False,
    ) -> None:
        expect(len(modes) > 0, ConfigError, "verification: expected at least one mode, got none")
        self.modes = tuple(modes)
        self.thinking = thinking
        self.keeps_scores = keeps_scores
        self.keeps_sums = keeps_sums
        self.fills_tokens = fills_tokens
        self.keeps_rows = keeps_rows
        self._methods = frozenset[str]().union(*(mode.methods for mode in modes))
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
        kind = inputs.sampling_kind
        if kind is SamplingKind.GREEDY:
            return self._accept(inputs, STRICT, self._requested(inputs), last_tokens, backend)
        if kind is SamplingKind.SAMPLED:
            return self._accept_sampled(inputs, last_tokens, backend)
        rows, slots = inputs.expect_rows(), inputs.expect_slots()
        with mask_disallowed_tokens(inputs.logits, rows, slots, backend=backend) as logits:
            accepted = self._accept_sampled(replace(inputs, logits=logits), last_tokens, backend)
        drafted = rows.positions if inputs.layout.draft_len else None
        update_token_history(accepted, slots, positions=drafted, backend=backend)
        if self.thinking is not None:
            update_thinking_state(accepted, slots, self.thinking, backend=backend)
        return accepted

    def _accept_sampled(
        self, inputs: VerificationInputs, last_tokens: torch.Tensor | None, backend: Backend
    ) -> Accepted:
        """Sample the target tokens, and verify the drafts with them and the modes' rules."""
        logits, rows, slots = inputs.logits, inputs.expect_rows(), inputs.expect_slots()
        modes = self._requested(inputs)
        if self.keeps_scores or any(mode.reads_truncation for mode in modes):
            truncation = torch.empty(
                len(logits), TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
            )
            inputs = replace(inputs, truncation=truncation)
        # partial sums are of raw logits, but a PROCESSED step reads processed logits
        is_processed = inputs.sampling_kind is SamplingKind.PROCESSED
        is_raw = self.keeps_sums and not is_processed and not self.keeps_scores
        sums = RowSums.unwritten(logits) if is_raw else None
        # modes that read rows have to know which have no token
        is_filled = self.fills_tokens and not any(mode.reads_rows for mode in modes)
        target_tokens = sample_tokens(
            logits,
            rows,
            slots if inputs.row_slots is None else inputs.row_slots,
            truncation=inputs.truncation,
            sums=sums,
            fills=torch.int32 if is_filled else None,
            checked=inputs.checked,
            backend=backend,
        )
        forced = None
        if self.thinking is not None and is_processed:
            forced = force_thinking_end(
                inputs.layout,
                inputs.draft_tokens,
                slots,
                self.thinking,
                target_tokens,
                backend=backend,
            )
        rules = AcceptanceRules(
            choices=target_tokens,
            forced_ids=forced,
            processed_slots=slots if is_processed else None,
        )
        accepted = self._accept(inputs, rules, modes, last_tokens, backend)
        if not self.keeps_scores or inputs.truncation is None:
            return accepted if sums is None else replace(accepted, sums=sums)
        scores = processed_scores(logits, rows, slots, inputs.truncation, forced, backend=backend)
        return replace(accepted, scores=scores)

    def _accept(
        self,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        modes: Sequence[VerificationMode],
        last_tokens: torch.Tensor | None,
        backend: Backend,
    ) -> Accepted:
        """Verify drafts by ``rules``, to which each mode adds its own."""
        reads_rows = any(mode.reads_rows for mode in modes)
        if reads_rows:
            inputs, rules = inputs.expand(rules)
        for mode in modes:
            decided = mode.verify(inputs, rules, backend=backend)
            if mode.methods and not mode.reads_method and len(self._methods) > 1:
                decided = _of_own_requests(mode, inputs, rules, decided)
            rules = decided
        if self.fills_tokens and reads_rows and rules.choices is not None:
            rules = replace(rules, choices=rules.choices.clamp_min(0))
        accepted = accept(
            inputs.layout,
            inputs.logits,
            inputs.draft_tokens,
            rules,
            draft_lens=inputs.draft_lens,
            final_context=inputs.final_context,
            last_tokens=last_tokens,
            first_rows=inputs.first_rows,
            keeps_rows=self.keeps_rows,
            fills=torch.int64 if self.fills_tokens else None,
            checked=inputs.checked,
            backend=backend,
        )
        for mode in modes:
            mode.mark_failed(inputs, accepted)
        return accepted

    def _requested(self, inputs: VerificationInputs) -> list[VerificationMode]:
        """Return the modes that requests of the step may need."""
        wanted = inputs.methods
        return [
            mode
            for mode in self.modes
            if wanted is None or not mode.methods or not wanted.isdisjoint(mode.methods)
        ]


def _of_own_requests(
    mode: VerificationMode,
    inputs: VerificationInputs,
    before: AcceptanceRules,
    after: AcceptanceRules,
) -> AcceptanceRules:
    """Return ``after``, as a mode decided, for requests that select the mode, else ``before``."""
    layout = inputs.layout
    generations = slice(layout.num_contexts, layout.num_requests)
    of_requests = inputs.expect_slots().read("verification", generations)
    own = torch.zeros_like(of_requests, dtype=torch.bool)
    for name in mode.methods:
        own |= of_requests == METHODS[name].code
    matches, choices = after.forced_matches, after.choices
    if matches is not None and matches is not before.forced_matches:
        others = before.forced_matches
        if others is None:
            others = torch.full_like(of_requests, -1)
        matches = torch.where(own, matches, others)  # unsigned integers become signed
    if choices is not None and choices is not before.choices:
        tokens = argmax_tokens(inputs.logits) if before.choices is None else before.choices
        rows = torch.cat(
            [own.new_zeros(layout.num_contexts), own.repeat_interleave(layout.step_rows)]
        )
        choices = torch.where(rows, choices, tokens)
    return replace(after, forced_matches=matches, choices=choices)

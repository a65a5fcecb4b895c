"""How drafts are drawn from a draft layer's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.host import HostStep
from mtp_plugin.speculative.logit_rows import LogitRows, ThinkingRule
from mtp_plugin.speculative.ops.draft import propose, propose_processed, write_drafts
from mtp_plugin.speculative.ops.sampling import TRUNCATION_SIZE, keep_draft_probs, sample_tokens
from mtp_plugin.speculative.step import DraftOutput, SamplingKind


@dataclass(frozen=True)
class DraftPass:
    """One pass of the draft loop, a row of logits per request."""

    step: HostStep
    num_accepted: torch.Tensor  # [R] int32: tokens that the target emitted
    place: DraftOutput  # where the drafts go
    thinking: ThinkingRule | None = None  # what budgets of thinking go by

    @property
    def rows(self) -> LogitRows:
        """Those of the logits."""
        place = self.place
        layout = self.step.layout
        return LogitRows.of_drafts(layout, self.num_accepted, place.column, place.drafts)

    def behind(self, rows: LogitRows) -> LogitRows | None:
        """Those of the drafts behind these; None: none follow."""
        column = self.place.column + 1
        return replace(rows, column=column) if column < self.step.layout.draft_len else None


class DraftRule(Protocol):
    """How one pass of the draft loop draws its drafts, and what is kept of them."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        """Put the drafts of ``logits`` [R, V] where the pass says."""


class GreedyDrafts:
    """The id of the highest value behind what requests have done to their logits; nothing else of
    the draft is kept."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        step, place = draft_pass.step, draft_pass.place
        if step.sampling_kind is not SamplingKind.PROCESSED:
            propose(logits, place, backend=backend)
            return
        rows = draft_pass.rows
        slots = step.sampling_slots()
        behind, thinking = draft_pass.behind(rows), draft_pass.thinking
        propose_processed(logits, place, rows, slots, behind, thinking, backend=backend)


class SampledDrafts:
    """As every request's slot says: what the target would draw of these logits with the same noise,
    a draw of its own whose distribution is kept, or the highest value's id; this last in greedy
    steps."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        step, place = draft_pass.step, draft_pass.place
        if step.sampling_kind is SamplingKind.GREEDY:
            propose(logits, place, backend=backend)
            return
        rows = draft_pass.rows
        kept, pool = step.sampling_slots(), step.draft_probs
        slots = kept.as_drafts_read()
        truncation = None
        if pool is not None:
            truncation = torch.empty(
                len(logits), TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
            )
        drafts = sample_tokens(
            logits,
            rows,
            slots,
            as_drafts="draft_sampling" in slots.columns,
            vocab_ids=place.vocab_ids,
            truncation=truncation,
            backend=backend,
        )
        if pool is not None and truncation is not None:
            keep_draft_probs(
                logits, rows, slots, truncation, pool, vocab_ids=place.vocab_ids, backend=backend
            )
        is_processed = step.sampling_kind is SamplingKind.PROCESSED
        thinking = draft_pass.thinking if is_processed else None
        write_drafts(drafts, place, draft_pass.behind(rows), kept, thinking, backend=backend)


GREEDY_DRAFTS = GreedyDrafts()
SAMPLED_DRAFTS = SampledDrafts()

"""How drafts are chosen from a draft layer's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose, propose_processed, write_drafts
from mtp_plugin.ops.logit_rows import LogitRows, ThinkingRule
from mtp_plugin.ops.sampling import TRUNCATION_SIZE, keep_draft_probs, sample_tokens
from mtp_plugin.ops.step import DraftOutput, SamplingKind

if TYPE_CHECKING:
    from mtp_plugin.speculative.host import HostStep


@dataclass(frozen=True)
class DraftPass:
    """One pass of the draft loop, with one row of logits per request."""

    step: HostStep
    num_accepted: torch.Tensor  # [R] int32: output tokens of the step
    output: DraftOutput  # where the drafts are written
    thinking: ThinkingRule | None = None  # None: no request has a thinking budget

    @property
    def rows(self) -> LogitRows:
        output, layout = self.output, self.step.layout
        return LogitRows.of_drafts(layout, self.num_accepted, output.column, output.drafts)

    def next_rows(self, rows: LogitRows) -> LogitRows | None:
        """Return the rows of the next pass; None after the last."""
        column = self.output.column + 1
        return replace(rows, column=column) if column < self.step.layout.draft_len else None


class DraftRule(Protocol):
    """Chooses the drafts of one pass of the draft loop."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        """Write the drafts of ``logits`` [R, V] to ``draft_pass.output``."""


class GreedyDrafts:
    """Drafts are the argmax of the processed logits; no draft probabilities are kept."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        step, output = draft_pass.step, draft_pass.output
        if step.sampling_kind is not SamplingKind.PROCESSED:
            propose(logits, output, backend=backend)
            return
        rows = draft_pass.rows
        slots = step.sampling_slots()
        following, thinking = draft_pass.next_rows(rows), draft_pass.thinking
        propose_processed(logits, output, rows, slots, following, thinking, backend=backend)


class SampledDrafts:
    """Drafts are coupled, plain or greedy, as the slot of each request says; greedy in steps whose
    requests are all greedy. Draft probabilities of plain drafts are kept in ``draft_probs``."""

    def propose(self, logits: torch.Tensor, draft_pass: DraftPass, *, backend: Backend) -> None:
        step, output = draft_pass.step, draft_pass.output
        if step.sampling_kind is SamplingKind.GREEDY:
            propose(logits, output, backend=backend)
            return
        rows = draft_pass.rows
        kept, pool = step.sampling_slots(), step.draft_probs
        slots = kept.for_drafts()
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
            vocab_ids=output.vocab_ids,
            truncation=truncation,
            backend=backend,
        )
        if pool is not None and truncation is not None:
            keep_draft_probs(
                logits, rows, slots, truncation, pool, vocab_ids=output.vocab_ids, backend=backend
            )
        is_processed = step.sampling_kind is SamplingKind.PROCESSED
        thinking = draft_pass.thinking if is_processed else None
        write_drafts(drafts, output, draft_pass.next_rows(rows), kept, thinking, backend=backend)


GREEDY_DRAFTS = GreedyDrafts()
SAMPLED_DRAFTS = SampledDrafts()

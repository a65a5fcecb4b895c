"""Our ops on vLLM's rows of logits.

Rows are vLLM's: requests in any order, 1 to K+1 rows of logits each (``cu_num_logits``). Every row
is sampled with the options and the seed of its request and the position of its token alone, so
that the output of coupled requests depends on neither K nor the batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mtp_plugin.errors import PluginError, TensorContractError
from mtp_plugin.hosts.vllm.options import EngineSettings
from mtp_plugin.hosts.vllm.precompile import Precompilation
from mtp_plugin.hosts.vllm.request_slots import DRAFT_LIMIT, RequestSlots
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import (
    TRUNCATION_SIZE,
    ProposedDrafts,
    TargetSamples,
    VerifiedBy,
    keep_draft_probs,
    rejection_sample,
    sample_tokens,
)
from mtp_plugin.ops.step import Accepted, SlotRows, StepLayout
from mtp_plugin.ops.synthetic_acceptance import (
    SyntheticRule,
    synthetic_acceptance,
    synthetic_rule,
)
from mtp_plugin.speculative.verification import count_accepted, custom_verifications
from mtp_plugin.verifications import custom_codes

_logger = logging.getLogger("vllm.mtp_plugin")


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that verifies drafts; N rows of R requests."""

    logits: torch.Tensor  # [N, V] after the logits processors
    drafts: torch.Tensor  # [N] input token of each row, no draft in a request's first; < 0: absent
    positions: torch.Tensor  # [N] of the input tokens
    row_indices: torch.Tensor  # [N] request state index of each row
    offsets: torch.Tensor  # [N] 0 to K: row within its request
    cu_num_logits: torch.Tensor  # [R + 1] first row of each request
    indices: torch.Tensor  # [R] request state indices
    host_indices: Any  # [R] the same as a numpy array
    seq_lens: torch.Tensor  # [R] tokens of each request after the step
    prefill_lens: torch.Tensor
    """[max_num_reqs] tokens that a request starts with; vLLM drops the token of a request that has
    not reached them."""


class DraftRows(NamedTuple):
    """The rows that propose one draft of each of R requests."""

    logits: torch.Tensor  # [R, V]
    indices: torch.Tensor  # [R] request state indices; -1 for padding rows, which may hold NaN
    positions: torch.Tensor  # [R]
    column: int  # the draft follows the token at position + column
    step: torch.Tensor  # [] integer, on the device: which draft of the step it is


class RowOps:
    """Sampling of target and draft rows, and verification, for one engine."""

    def __init__(
        self, slots: RequestSlots, settings: EngineSettings, backend: Backend, vocab: int
    ) -> None:
        self.slots = slots
        self.settings = settings
        self.num_drafts = settings.num_drafts
        self.backend = backend
        self.precompilation: Precompilation | None = None
        """The first launch waits for it."""
        device = slots.table.device
        self._no_contexts = torch.zeros(0, dtype=torch.int32, device=device)
        self._columns = torch.arange(1, self.num_drafts + 1, device=device)
        self._failed: set[str] = set()  # methods from outside that have failed
        self._synthetic: SyntheticRule | None = None
        if settings.synthetic_rates is not None:
            self._synthetic = synthetic_rule(settings.synthetic_rates, 0, device)
        self.draft_probs: torch.Tensor | None = None
        """[S, K, V] float32: distributions of the drafts of rejection sampling."""
        if settings.keeps_draft_probs:
            shape = (len(slots.table), self.num_drafts, vocab)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=device)
            self._last_probs = torch.zeros((shape[0], 1, vocab), dtype=torch.float32, device=device)

    # ---- sampling

    def sample(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        positions: torch.Tensor,
        truncation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample the token after each row.

        Args:
            logits: [N, V]. indices: [N] request state index of each row. positions: [N] position
                of each row's token. truncation: [N, TRUNCATION_SIZE] float32, written.

        Returns:
            [N] int32, valid token ids; 0 for a row without finite value, since a request that gets
            no token would never end in vLLM.
        """
        self._wait_for_kernels()
        rows, slots = LogitRows(0, 1, positions), self.slots.of(indices)
        return sample_tokens(
            logits, rows, slots, truncation=truncation, backend=self.backend
        ).clamp_min(0)

    def sample_drafts(self, draft: DraftRows) -> torch.Tensor:
        """Sample a draft token per row.

        Coupled drafts have the noise of the target token that they predict; those of rejection
        sampling have noise of their own, and their distribution is kept.

        Returns:
            [R] int64, valid token ids.
        """
        self._wait_for_kernels()
        logits, backend = draft.logits, self.backend
        rows = LogitRows(0, 1, draft.positions, column=draft.column)
        slots = self.slots.of_padded(draft.indices)
        if self.draft_probs is None:
            return valid_ids(sample_tokens(logits, rows, slots, backend=backend))
        truncation = self._truncation(logits)
        drafts = sample_tokens(
            logits, rows, slots, as_drafts=True, truncation=truncation, backend=backend
        )
        # kept as draft 0, then moved: a captured graph serves every draft of a step
        first = LogitRows(0, 1, draft.positions)
        keep_draft_probs(logits, first, slots, truncation, self._last_probs, backend=backend)
        kept = slots.slot_ids.to(torch.int64)
        step = draft.step.to(torch.int64).view(1)  # as a scalar the host would read it
        self.draft_probs[kept, step] = self._last_probs[kept, 0]
        return valid_ids(drafts)

    def _truncation(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.empty(
            logits.shape[0], TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
        )

    def _wait_for_kernels(self) -> None:
        if self.precompilation is not None:
            seconds, self.precompilation = self.precompilation.finish(), None
            _logger.info("mtp_plugin waited %.1f s for its kernels to be compiled", seconds)

    # ---- verification

    def verify(self, step: StepRows) -> Accepted:
        """Sample the target tokens of all rows, and accept the leading drafts of every request."""
        slots = self.slots
        codes = set(slots.verified_by[step.host_indices].tolist())
        by_probs = not codes.isdisjoint((VerifiedBy.REJECTION, VerifiedBy.BLOCK))
        by_method = [(name, code) for name, code in custom_codes().items() if code in codes]
        truncation = self._truncation(step.logits) if by_probs else None
        choices = self.sample(step.logits, step.row_indices, step.positions, truncation)
        drafts = step.drafts
        if slots.has_draft_limit[step.host_indices].any():
            limits = slots.of(step.row_indices).read(DRAFT_LIMIT, slice(0, len(drafts)))
            drafts = drafts.masked_fill(step.offsets > limits, -1)

        requests, width = step.indices.shape[0], self.num_drafts + 1
        logits, positions, first_rows, lens = step.logits, step.positions, None, None
        if logits.shape[0] == requests * width:
            drafts = drafts.view(requests, width)[:, 1:]
            first_positions = positions[::width]
        else:
            first_rows = step.cu_num_logits[:-1]
            lens = step.cu_num_logits[1:] - first_rows - 1
            rows = first_rows.unsqueeze(1) + torch.cat([self._columns.new_zeros(1), self._columns])
            rows = rows.clamp_max(logits.shape[0] - 1)  # [R, K + 1]
            drafts = drafts[rows[:, 1:]]
            first_positions = positions[first_rows]
            if by_probs or by_method:  # these read K+1 rows of every request
                flat = rows.view(-1)
                logits, choices = logits[flat], choices[flat]
                truncation = None if truncation is None else truncation[flat]
                first_rows = None
        forced = None
        of_requests = slots.of(step.indices)
        is_relaxed = self.settings.options.is_relaxed
        if by_probs or is_relaxed:
            # the token of an unfinished prompt is no output: no step and no phase follows from it
            unfinished = step.seq_lens < step.prefill_lens[step.indices.to(torch.int64)]
            of_requests = slots.of_padded(step.indices.masked_fill(unfinished, -1))
        if self._synthetic is not None:
            layout = self._layout(requests, first_positions.repeat_interleave(width))
            forced = synthetic_acceptance(
                layout, self._synthetic, of_requests, backend=self.backend
            )
        if by_probs or by_method:
            drafts = drafts.contiguous()
        if truncation is not None:
            result = rejection_sample(
                logits,
                LogitRows(0, width, first_positions),
                of_requests,
                ProposedDrafts(drafts, self.draft_probs, lens),
                TargetSamples(choices, truncation),
                backend=self.backend,
            )
            # a row without finite value gives a token here too, see `sample`
            choices, forced = result.tokens.clamp_min(0), result.num_accepted
        for name, code in by_method:
            counts = self._count_accepted(name, logits, drafts, choices, lens)
            others = torch.full_like(counts, -1) if forced is None else forced
            own = slots.of(step.indices).read("verification", slice(0, requests)) == code
            forced = torch.where(own, counts, others)
        relaxed = self._relaxed_rule(of_requests) if is_relaxed else None
        return accept(
            self._layout(requests),
            logits,
            drafts,
            AcceptanceRules(choices=choices, forced_matches=forced, relaxed=relaxed),
            draft_lens=lens,
            first_rows=first_rows,
            backend=self.backend,
        )

    def _count_accepted(
        self,
        name: str,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        choices: torch.Tensor,
        lens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return how many drafts [R, K] a method from outside the package accepts.

        None where it fails: its requests go on without drafts, since an error here would end vLLM's
        engine.
        """
        requests, width = drafts.shape[0], self.num_drafts + 1
        if lens is not None:
            drafts = torch.where(self._columns <= lens.unsqueeze(1), drafts, -1)
        method = custom_verifications()[name]
        rows = logits.view(requests, width, logits.shape[1])
        try:
            return count_accepted(name, method, rows, drafts, choices.view(requests, width))
        except (PluginError, TensorContractError):
            if name not in self._failed:
                self._failed.add(name)
                _logger.exception("requests with mtp_verification=%r accept no draft", name)
            return torch.zeros(requests, dtype=torch.int32, device=drafts.device)

    def follow_phase(
        self, tokens: torch.Tensor, indices: torch.Tensor, is_output: torch.Tensor
    ) -> None:
        """Update the thinking phase of requests after a step without drafts.

        Args:
            tokens: [R] sampled tokens. indices: [R]. is_output: [R] bool; False for a token that
                vLLM drops.
        """
        if not self.settings.options.is_relaxed:
            return
        rule = self._relaxed_rule(self.slots.of_padded(indices))
        everyone = slice(0, indices.shape[0])
        thinking, _ = rule.phase(everyone)
        thinking = (thinking | (is_output & (tokens == rule.begin_token))) & ~(
            is_output & (tokens == rule.end_token)
        )
        rule.set_phase(everyone, thinking, rule.slots.read("relaxed_limit", everyone))

    def _relaxed_rule(self, slots: SlotRows) -> RelaxedRule:
        options = self.settings.options
        begin, end = options.thinking_begin_token, options.thinking_end_token
        return RelaxedRule(
            slots,
            self.slots.delta_in_force,
            -1 if begin is None else begin,
            -1 if end is None else end,
        )

    def _layout(self, requests: int, positions: torch.Tensor | None = None) -> StepLayout:
        return StepLayout((), requests, self.num_drafts, self._no_contexts, positions)


def valid_ids(tokens: torch.Tensor) -> torch.Tensor:
    """Return token ids as int64, with 0 in place of -1: vLLM embeds every id."""
    return tokens.clamp_min(0).to(torch.int64)


def mark_padding(indices: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    """Return request state indices [R] with -1 for the rows without query tokens.

    Args:
        query_start_loc: at least [R + 1] first token of each row.
    """
    starts = query_start_loc[: len(indices) + 1]
    return torch.where(starts[1:] > starts[:-1], indices, -1)  # two launches of a captured graph


def keep_allowed_ids(logits: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor) -> None:
    """Set the logits [N, V] of a row to -inf, except those of its allowed ids.

    Args:
        counts: [N] number of allowed ids; 0: all. ids: [N, A], of which the first ones count.
    """
    counts = counts.unsqueeze(1)
    columns = torch.arange(ids.shape[1], device=ids.device)
    ids = torch.where(columns < counts, ids, ids[:, :1]).to(torch.int64)
    kept = logits.gather(1, ids)
    logits.masked_fill_(counts > 0, float("-inf")).scatter_(1, ids, kept)

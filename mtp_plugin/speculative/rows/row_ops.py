"""Our ops on an engine's rows of logits.

Rows are of requests in any order, 1 to K+1 rows each (``cu_num_logits``). Every row is sampled with
the options and the seed of its request and the position of its token alone, so that the output of
coupled requests depends on neither K nor the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mtp_plugin.errors import HostError, expect
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.early_compile import CompileJob
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import TRUNCATION_SIZE, keep_draft_probs, sample_tokens
from mtp_plugin.ops.step import Accepted, SamplingKind, SlotRows, StepLayout
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_slots import DRAFT_LIMIT, RequestSlots
from mtp_plugin.speculative.verification import (
    RelaxedVerification,
    VerificationInputs,
    Verifier,
)
from mtp_plugin.verifications import codes, custom_codes

WARM_UP_ROWS = (1, 2, 24, 34, 192, 265, 512)
"""Numbers of rows, and of requests, for which all kernels are compiled: the least ones from which
the sampling kernels are tiled differently, and 2, as the drafts of one request are not aligned."""

_COUPLED = frozenset(("coupled",))
_MOST_CHECKED = 4096


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that verifies drafts; N rows of R requests."""

    logits: torch.Tensor  # [N, V] after the logits processors
    drafts: torch.Tensor  # [N] input token of each row, no draft in a request's first; < 0: absent
    positions: torch.Tensor  # [N] of the input tokens
    row_indices: torch.Tensor  # [N] slot of each row
    offsets: torch.Tensor  # [N] 0 to K: row within its request
    cu_num_logits: torch.Tensor  # [R + 1] first row of each request
    indices: torch.Tensor  # [R] slots of the requests
    host_indices: Any  # [R] the same as a numpy array
    seq_lens: torch.Tensor  # [R] tokens of each request after the step
    prefill_lens: torch.Tensor
    """[S, or S - 1 if the last row is padding] tokens that a request starts with; the engine drops
    the token of a request that has not reached them."""


class DraftRows(NamedTuple):
    """The rows that propose one draft of each of R requests; with DFlash all drafts, R * K rows."""

    logits: torch.Tensor  # [R, V]; with a draft vocabulary [R, V' or more], columns of padding last
    indices: torch.Tensor  # [R] slots; below 0: the last one, where it is that of padding
    positions: torch.Tensor  # [R]
    column: int  # the draft follows the token at position + column
    step: torch.Tensor
    """[] integer, on the device: which draft of the step it is. With DFlash [R * K], not read."""


class RowOps:
    """Sampling of target and draft rows, and verification, for one engine.

    Args:
        fills_tokens: a request whose row has no finite value goes on with token 0; False: an engine
            that ends such a request gets -1 from `sample`, a status from verification, and what
            `accept` keeps with ``keeps_rows``.
    """

    def __init__(
        self,
        slots: RequestSlots,
        settings: EngineSettings,
        backend: Backend,
        vocab: int,
        *,
        fills_tokens: bool = True,
    ) -> None:
        self.slots = slots
        self.settings = settings
        self.num_drafts = settings.num_drafts
        self.backend = backend
        self.fills_tokens = fills_tokens
        self.precompilation: CompileJob | None = None
        """The first launch waits for it."""
        device = slots.table.device
        self._make_verifier()
        self._no_contexts = torch.zeros(0, dtype=torch.int32, device=device)
        self._columns = torch.arange(self.num_drafts + 1, device=device)
        self._layouts: dict[Hashable, StepLayout] = {}
        """Of steps that have passed the checks of the ops: these take longer than the launches."""
        ids = settings.draft_ids
        self._num_drafted = vocab if ids is None else len(ids)
        self._draft_ids: torch.Tensor | None = None
        """[V'] int32: token ids of the columns of draft logits; None: column i is id i."""
        self._columns_of: torch.Tensor | None = None
        """[largest id + 1] int64: column of each token id; None: drafts are ids."""
        if ids is not None and not isinstance(ids, range):
            self._draft_ids = torch.tensor(ids, dtype=torch.int32, device=device)
        self.draft_probs: torch.Tensor | None = None
        """[S, K, V] float32: distributions of the drafts of rejection sampling, 0 for ids that are
        never drafted."""
        if settings.keeps_draft_probs:
            shape = (len(slots.table), self.num_drafts, vocab)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=device)
            drafted = (shape[0], 1, self._num_drafted)
            self._last_probs = torch.zeros(drafted, dtype=torch.float32, device=device)

    def set_draft_ids(self, ids: torch.Tensor) -> None:
        """Take the ids [V'] of the columns of draft logits from an engine that maps drafts by
        itself: `sample_drafts` returns columns from then on. `restore` does not write them."""
        self._num_drafted, self._draft_ids = len(ids), ids.to(torch.int32)
        self._columns_of = torch.zeros(int(ids.max()) + 1, dtype=torch.int64, device=ids.device)
        self._columns_of[ids.to(torch.int64)] = torch.arange(len(ids), device=ids.device)

    def restore(self) -> None:
        """Write the constants on the device again; what requests write stays."""
        self.slots.restore()
        self._columns.copy_(torch.arange(self.num_drafts + 1))
        if self._draft_ids is not None and self._columns_of is None:
            self._draft_ids.copy_(torch.tensor(self.settings.draft_ids))
        if self.draft_probs is not None and self.settings.draft_ids is not None:
            is_drafted = torch.zeros(self.draft_probs.shape[2], dtype=torch.bool)
            is_drafted[list(self.settings.draft_ids)] = True
            self.draft_probs.masked_fill_(~is_drafted.to(self.draft_probs.device), 0.0)

    def _make_verifier(self) -> None:
        modes = self.slots.modes
        fills = self.fills_tokens
        self._verifier = Verifier(modes, keeps_sums=False, fills_tokens=fills, keeps_rows=not fills)
        self._relaxed = next((m for m in modes if isinstance(m, RelaxedVerification)), None)
        self._names = {code: name for name, code in (codes() | custom_codes()).items()}

    # ---- sampling

    def sample(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        positions: torch.Tensor,
        vocab_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample the token after each row.

        Args:
            logits: [N, V]. indices: [N] slot of each row. positions: [N] position of each row's
                token. vocab_ids: as in `sample_tokens`.

        Returns:
            [N] int64, valid token ids, 0 for a row without finite value; without `fills_tokens`
            int32, -1 for it.
        """
        self._wait_for_kernels()
        rows, slots = LogitRows.flat(positions), self.slots.of(indices)
        fills = torch.int64 if self.fills_tokens else None
        return sample_tokens(
            logits, rows, slots, vocab_ids=vocab_ids, fills=fills, backend=self.backend
        )

    def sample_drafts(self, draft: DraftRows) -> torch.Tensor:
        """Sample a draft token per row.

        Coupled drafts have the noise of the target token that they predict; those of rejection
        sampling have noise of their own, and their distribution is kept.

        Returns:
            [R] int64, valid token ids, or columns after `set_draft_ids`.

        Raises:
            HostError: the draft model has another number of logits.
        """
        self._wait_for_kernels()
        backend, ids = self.backend, self._draft_ids
        logits, num_drafted = draft.logits, self._num_drafted
        if self.settings.draft_ids is not None:
            expect(
                num_drafted <= logits.shape[1] <= self.settings.most_draft_columns,
                HostError,
                f"draft_vocab: the draft model computes {logits.shape[1]} logits, expected "
                f"{num_drafted}; leave it out",
            )
            logits = logits[:, :num_drafted]
        expect(
            num_drafted <= logits.shape[1],
            HostError,
            f"the draft model computes {logits.shape[1]} logits, expected {num_drafted}: leave out "
            "its draft vocabulary (vLLM: draft_vocab of the plugin takes the same ids)",
        )
        rows = LogitRows.flat(draft.positions, draft.column)
        slots = self.slots.of(draft.indices)
        if self.draft_probs is None:
            drafts = sample_tokens(
                logits, rows, slots, vocab_ids=ids, fills=torch.int64, backend=backend
            )
            return drafts if self._columns_of is None else self._columns_of[drafts]
        truncation = self._truncation(logits)
        drafts = sample_tokens(
            logits,
            rows,
            slots,
            as_drafts=True,
            vocab_ids=ids,
            truncation=truncation,
            fills=torch.int64,
            backend=backend,
        )
        # kept as draft 0, then moved: a captured graph serves every draft of a step
        first = LogitRows.flat(draft.positions)
        keep_draft_probs(logits, first, slots, truncation, self._last_probs, backend=backend)
        kept = slots.of(slice(None))
        step = draft.step.to(torch.int64).view(1)  # as a scalar the host would read it
        probs = self._last_probs[kept, 0]
        if ids is None:
            self.draft_probs[kept, step, : logits.shape[1]] = probs
        else:
            self.draft_probs[kept.unsqueeze(1), step, ids.to(torch.int64)] = probs
        return drafts

    def _truncation(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.empty(
            logits.shape[0], TRUNCATION_SIZE, dtype=torch.float32, device=logits.device
        )

    def _wait_for_kernels(self) -> None:
        if self.precompilation is not None:
            seconds, self.precompilation = self.precompilation.wait(), None
            logger = logging.getLogger(self.settings.options.logger)
            logger.info("mtp_plugin waited %.1f s for its kernels to be compiled", seconds)

    # ---- verification

    def verify(self, step: StepRows) -> Accepted:
        """Sample the target tokens of all rows, and accept the leading drafts of every request."""
        self._prepare()
        slots, drafts = self.slots, step.drafts
        if slots.has_draft_limit[step.host_indices].any():
            limits = slots.of(step.row_indices).read(DRAFT_LIMIT, slice(0, len(drafts)))
            drafts = drafts.masked_fill(step.offsets > limits, -1)
        requests, width = step.indices.shape[0], self.num_drafts + 1
        lens = first_rows = full_rows = None
        if len(drafts) == requests * width:
            drafts = drafts.view(requests, width)[:, 1:]
        else:
            first_rows = step.cu_num_logits[:-1]
            lens = step.cu_num_logits[1:] - first_rows - 1
            rows = (first_rows.unsqueeze(1) + self._columns).clamp_max(len(drafts) - 1)  # [R, K+1]
            drafts, full_rows = drafts[rows[:, 1:]], rows.view(-1)
        methods = self._methods_of(step.host_indices)
        of_requests = slots.of(step.indices)
        if methods != _COUPLED or self._relaxed is not None:
            # the token of an unfinished prompt is no output: no step and no phase follows from it
            unfinished = step.seq_lens < step.prefill_lens[step.indices.to(torch.int64)]
            of_requests = slots.of_padded(step.indices.masked_fill(unfinished, -1))
        return self._verify(
            step.logits,
            drafts,
            LogitRows.flat(step.positions),
            of_requests,
            methods,
            draft_lens=lens,
            row_slots=slots.of(step.row_indices),
            first_rows=first_rows,
            full_rows=full_rows,
        )

    def verify_uniform(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        positions: torch.Tensor,
        indices: torch.Tensor,
        host_indices: Any,
    ) -> Accepted:
        """As `verify`, where all requests have K drafts and have finished their prompts.

        Args:
            logits: [R * (K+1), V]. drafts: [R * (K+1)] as in `StepRows`. positions: [R] of each
                request's first input token. indices, host_indices: [R] slots.
        """
        self._prepare()
        slots, requests = self.slots, indices.shape[0]
        drafts = drafts.view(requests, -1)[:, 1:]
        of_requests = slots.of(indices)
        if slots.has_draft_limit[host_indices].any():
            limits = of_requests.read(DRAFT_LIMIT, slice(0, requests))
            drafts = drafts.masked_fill(self._columns[:-1] >= limits.unsqueeze(1), -1)
        rows = LogitRows(0, self.num_drafts + 1, positions)
        methods = self._methods_of(host_indices)
        return self._verify(logits, drafts.contiguous(), rows, of_requests, methods)

    def _verify(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        rows: LogitRows,
        slots: SlotRows,
        methods: frozenset[str],
        **ragged: Any,
    ) -> Accepted:
        """Verify drafts [R, K]; ``ragged``: what describes requests with fewer."""
        key = (logits.shape, logits.stride(), logits.dtype, drafts.shape, drafts.dtype, methods)
        layout = self._layouts.get(key)
        checked = layout is not None
        if layout is None:
            layout = StepLayout((), drafts.shape[0], self.num_drafts, self._no_contexts)
        inputs = VerificationInputs(
            layout,
            logits,
            drafts,
            checked=checked,
            slots=slots,
            sampling_kind=SamplingKind.SAMPLED,
            methods=methods,
            draft_probs=self.draft_probs,
            delta_in_force=self.slots.delta_in_force,
            rows=rows,
            **ragged,
        )
        accepted = self._verifier.verify(inputs, backend=self.backend)
        if not checked:
            if len(self._layouts) == _MOST_CHECKED:
                self._layouts.clear()
            self._layouts[key] = layout
        return accepted

    def _prepare(self) -> None:
        self._wait_for_kernels()
        if self._verifier.modes is not self.slots.modes:
            self._make_verifier()

    def _methods_of(self, host_indices: Any) -> frozenset[str]:
        """Return the verification methods of requests; ``coupled`` for one that the modes lack."""
        codes = set(self.slots.verified_by[host_indices].tolist())
        return frozenset(self._names.get(code, "coupled") for code in codes)

    def follow_phase(
        self, tokens: torch.Tensor, indices: torch.Tensor, is_output: torch.Tensor
    ) -> None:
        """Update the thinking phase of requests after a step without drafts.

        Args:
            tokens: [R] sampled tokens. indices: [R]. is_output: [R] bool; False for a token that
                the engine drops.
        """
        delta = self.slots.delta_in_force
        if self._relaxed is not None and delta is not None:
            self._relaxed.follow_phase(tokens, is_output, self.slots.of_padded(indices), delta)

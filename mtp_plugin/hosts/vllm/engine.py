"""Sampling, verification and draft sampling of one vLLM engine.

Rows are vLLM's: requests in any order, 1 to K+1 rows of logits each (``cu_num_logits``). Every row
is sampled with the options and the seed of its request and the position of its token alone, so
that a request's output depends on neither K nor its batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.precompile import Precompilation
from mtp_plugin.hosts.vllm.request_slots import RequestSlots
from mtp_plugin.hosts.vllm.versions import fitting_module
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import LogitRows
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.speculative.ops.sampling import sample_tokens
from mtp_plugin.speculative.ops.synthetic_acceptance import (
    SyntheticRule,
    synthetic_acceptance,
    synthetic_rule,
)
from mtp_plugin.speculative.step import Accepted, SlotRows, StepLayout

_logger = logging.getLogger("vllm.mtp_plugin")


class RowOps:
    """Our ops on vLLM's rows.

    Args:
        num_drafts: K, 0 without speculative decoding.
        synthetic_rates: share of steps that accept at least i+1 drafts; None: real acceptance.
    """

    def __init__(
        self,
        slots: RequestSlots,
        num_drafts: int,
        backend: Backend,
        synthetic_rates: list[float] | None = None,
    ) -> None:
        self.slots = slots
        self.num_drafts = num_drafts
        self.backend = backend
        self.precompilation: Precompilation | None = None
        """The first launch waits for it."""
        device = slots.table.device
        self._no_contexts = torch.zeros(0, dtype=torch.int32, device=device)
        self._columns = torch.arange(1, num_drafts + 1, device=device)
        self._synthetic: SyntheticRule | None = None
        if synthetic_rates is not None:
            self._synthetic = synthetic_rule(synthetic_rates, 0, device)

    def sample(
        self, logits: torch.Tensor, indices: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample the token after each row.

        Args:
            logits: [N, V]. indices: [N] request state index of each row. positions: [N] position
                of each row's token.

        Returns:
            [N] int32, valid token ids; 0 for a row without finite value, since a request that gets
            no token would never end in vLLM.
        """
        tokens = self._sample(logits, LogitRows(0, 1, positions), self.slots.of(indices))
        return tokens.clamp_min(0)

    def sample_drafts(
        self, logits: torch.Tensor, indices: torch.Tensor, positions: torch.Tensor, column: int
    ) -> torch.Tensor:
        """Sample a draft token per row, with the noise of the target token that it predicts.

        Args:
            indices: [R] request state indices; -1 for padding rows, which may hold NaN.
            positions: [R]; the draft follows the token at ``positions + column``.

        Returns:
            [R] int64, valid token ids.
        """
        rows = LogitRows(0, 1, positions, column=column)
        slots = self.slots.of_padded(indices)
        return valid_ids(self._sample(logits, rows, slots))

    def _sample(self, logits: torch.Tensor, rows: LogitRows, slots: SlotRows) -> torch.Tensor:
        if self.precompilation is not None:
            seconds, self.precompilation = self.precompilation.finish(), None
            _logger.info("mtp_plugin waited %.1f s for its kernels to be compiled", seconds)
        return sample_tokens(logits, rows, slots, backend=self.backend)

    def verify(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        choices: torch.Tensor,
        cu_num_logits: torch.Tensor,
        indices: torch.Tensor,
        positions: torch.Tensor,
    ) -> Accepted:
        """Accept the leading drafts of every request that equal the sampled target tokens.

        Args:
            logits: [N, V]. drafts: [N] input token of each row; the first of a request is no
                draft; negative: never accepted. choices: [N] int32, as `sample` returned.
            cu_num_logits: [R + 1] first row of each request. indices: [R]. positions: [N].
        """
        requests, width = indices.shape[0], self.num_drafts + 1
        first_rows = lens = None
        if logits.shape[0] == requests * width:
            drafts = drafts.view(requests, width)[:, 1:]
            first_positions = positions[::width]
        else:
            first_rows = cu_num_logits[:-1]
            lens = cu_num_logits[1:] - first_rows - 1
            rows = (first_rows.unsqueeze(1) + self._columns).clamp_max(logits.shape[0] - 1)
            drafts = drafts[rows]
            first_positions = positions[first_rows]
        forced = None
        if self._synthetic is not None:
            layout = self._layout(requests, first_positions.repeat_interleave(width))
            forced = synthetic_acceptance(
                layout, self._synthetic, self.slots.of(indices), backend=self.backend
            )
        return accept(
            self._layout(requests),
            logits,
            drafts,
            AcceptanceRules(choices=choices, forced_matches=forced),
            draft_lens=lens,
            first_rows=first_rows,
            backend=self.backend,
        )

    def _layout(self, requests: int, positions: torch.Tensor | None = None) -> StepLayout:
        return StepLayout((), requests, self.num_drafts, self._no_contexts, positions)


def valid_ids(tokens: torch.Tensor) -> torch.Tensor:
    """Return token ids as int64, with 0 in place of -1: vLLM embeds every id."""
    return tokens.clamp_min(0).to(torch.int64)


class Engine:
    """What replaces vLLM's sampler and verifier in one engine.

    Args:
        vllm_config: of the engine. sampler: vLLM's, whose request states stay in use.
        precompilation: that the first launch waits for.
    """

    def __init__(
        self,
        vllm_config: Any,
        options: VllmOptions,
        sampler: Any,
        device: torch.device,
        precompilation: Precompilation | None = None,
    ) -> None:
        version = fitting_module()
        spec = vllm_config.speculative_config
        num_drafts = 0 if spec is None else spec.num_speculative_tokens
        slots = RequestSlots(vllm_config.scheduler_config.max_num_seqs, device)
        rates = None
        if spec is not None and spec.rejection_sample_method == "synthetic":
            rates = list(spec.synthetic_acceptance_rates)
        backend = Backend.of(options.kernels, device)
        self.ops = RowOps(slots, num_drafts, backend, rates)
        self.ops.precompilation = precompilation
        self.sampler = version.PluginSampler.replacing(sampler, self.ops)
        self.verifier = None
        if spec is not None:
            self.verifier = version.PluginVerifier(self.sampler, spec, device)
        self._draft_logits = version.draft_logits
        _logger.info(
            "mtp_plugin on: verification %s, %d drafts per step, %s kernels",
            options.verification,
            num_drafts,
            backend.value,
        )

    def sample_draft(self, speculator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sample the drafts of one pass, in place of ``DraftModelSpeculator.sample_draft``."""
        logits, indices, positions, column = self._draft_logits(speculator, *args, **kwargs)
        return self.ops.sample_drafts(logits, indices, positions, column)

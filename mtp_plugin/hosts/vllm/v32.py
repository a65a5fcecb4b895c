"""vLLM 0.32 and newer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
)

from mtp_plugin.hosts.vllm.sampler_parts import SamplerParts
from mtp_plugin.hosts.vllm.versions import SAMPLE, SAMPLE_DRAFT, SIGNATURES, VERIFY, replaces
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps

ROWS = SIGNATURES["v32"][SAMPLE][1:-1]
"""What describes rows of logits, in the order of vLLM's ``Sampler.sample``."""


class PluginSampler(SamplerParts, Sampler):  # type: ignore[misc]
    """Samples rows without drafts."""

    @classmethod
    def replacing(cls, sampler: Any, ops: RowOps) -> PluginSampler:
        """See `SamplerParts.replacing`."""
        made = super().replacing(sampler, ops)
        add = made.sampling_states.add_request

        def add_request(*args: Any, **kwargs: Any) -> bool:
            """Keep temperature, top-k, top-p and min-p from `needs_logits_processing`."""
            add(*args, **kwargs)
            return False

        made.sampling_states.add_request = add_request
        return made

    def apply_processors(self, logits: torch.Tensor, *rows: Any) -> torch.Tensor:
        """See `SamplerParts.apply_processors`; in the order of vLLM's ``apply_sampling_params``."""
        context = LogitsContext(**dict(zip(ROWS, rows, strict=True)))
        for processor in self.logits_processors:
            logits = processor.apply(logits, context)
        self.thinking_budget_state.apply(logits, context)
        return logits

    @replaces(SAMPLE, "v32")
    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SamplerParts.sample_rows`."""
        rows = (
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            input_ids,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        return self.sample_rows(logits, pos, return_logprobs, *rows)

    def host_indices(self, rows: tuple[Any, ...]) -> Any:
        """See `SamplerParts.host_indices`."""
        return rows[2]

    def edits_logits(self, indices: Any) -> bool:
        """See `SamplerParts.edits_logits`."""
        return bool(self.needs_logits_processing[indices].any())


class PluginVerifier(RejectionSampler):  # type: ignore[misc]
    """Verifies drafts; called for batches with any draft, prompts included."""

    @replaces(VERIFY, "v32")
    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,  # noqa: ARG002 (of vLLM's rejection sampling)
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Return the accepted tokens of every request.

        Args:
            logits: [N, V] raw logits of the target.
            invalid_drafts: [N] bool: drafts that a grammar forbids.
        """
        batch, sampler = input_batch, self.sampler
        drafts, positions = gather_draft_sampled(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            sampler.req_states.prefill_len.gpu,
        )
        rows = (
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            positions,
            drafts,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, -1)
        if sampler.tail is not None:
            drafts = sampler.tail.without_absent(drafts, batch)

        def score(tokens: Any, num_sampled: Any, scored: Any, most: int) -> Any:
            lens = (batch.cu_num_logits, batch.cu_num_logits_np)
            return self._get_logprobs_tensors(tokens, num_sampled, scored, *lens, most)

        output = sampler.verify_batch(batch, logits, drafts, positions, rows, score)
        return output if sampler.tail is None else sampler.tail.add_matches(output, batch)


# num_steps: of watermarks, which are refused
@replaces(SAMPLE_DRAFT, "v32", unused=("num_steps",))
def draft_rows(
    speculator: Any,
    hidden_states: torch.Tensor,
    sample_src_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,  # noqa: ARG001
    seeds: torch.Tensor,  # noqa: ARG001
    draft_step: torch.Tensor,
    draft_logits: torch.Tensor | None,  # noqa: ARG001
    spec_step_idx: int = 0,
) -> DraftRows:
    """Read a call of ``sample_draft``."""
    logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
    return DraftRows(logits, idx_mapping, sample_src_positions, 0, draft_step)


def draft_loop(_speculator: Any) -> None:
    """vLLM captures the loop by itself."""

"""vLLM 0.24 to 0.26."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.vllm.draft_loop import can_capture, run_passes
from mtp_plugin.hosts.vllm.sampler_parts import SamplerParts, keep_allowed_ids, without_tokens
from mtp_plugin.hosts.vllm.versions import FITTING, SAMPLE, SAMPLE_DRAFT, VERIFY, replaces
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps


class PluginSampler(SamplerParts, Sampler):  # type: ignore[misc]
    """Samples rows without drafts."""

    params_index = 1

    @classmethod
    def replacing(cls, sampler: Any, ops: RowOps) -> PluginSampler:
        """See `SamplerParts.replacing`."""
        made = super().replacing(sampler, ops)
        states = made.logit_bias_state
        states.apply_logit_bias = partial(_apply_logit_bias, states)
        made._leave_out_temperature()
        return made

    def _leave_out_temperature(self) -> None:
        """Let ``apply_sampling_params`` run the logits processors alone.

        It ends with temperature and min-p, which our op applies.

        Raises:
            HostError: the method changes logits of a request without logits processors.
        """
        states = self.sampling_states
        self._temperature_and_min_p = (states.apply_temperature, states.apply_min_p)
        states.apply_temperature = states.apply_min_p = _do_nothing
        params = SamplingParams(temperature=0.5, min_p=0.5, top_k=2, top_p=0.5, seed=0)
        Sampler.add_request(self, 0, 1, params)  # the first request overwrites it
        Sampler.apply_staged_writes(self)
        device = self.req_states.prefill_len.gpu.device
        logits = torch.linspace(-1.0, 1.0, 64, device=device)[None]
        row = torch.zeros(1, dtype=torch.int32, device=device)
        rows = (row, np.zeros(1, dtype=np.int32), row.to(torch.int64), row, row)
        if not torch.equal(self.apply_processors(logits.clone(), *rows), logits):
            raise HostError(
                "Sampler.apply_sampling_params of this vLLM changes the logits of a request with "
                "temperature and min_p, but without logits processors; mtp_plugin would apply them "
                f"twice. Install vLLM {FITTING}, or leave out additional_config.mtp_plugin"
            )

    def apply_processors(self, logits: torch.Tensor, *rows: Any) -> torch.Tensor:
        """See `SamplerParts.apply_processors`."""
        edited: torch.Tensor = self.apply_sampling_params(logits, *rows, skip_top_k_top_p=True)
        return edited

    def apply_temperature(self, logits: torch.Tensor, *indices: Any) -> None:
        """See `SamplerParts.apply_temperature`."""
        for apply in self._temperature_and_min_p:
            apply(logits, *indices)

    @replaces(SAMPLE, "v24")
    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SamplerParts.sample_rows`."""
        rows = (expanded_idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos)
        return self.sample_rows(logits, pos, return_logprobs, *rows)

    def host_indices(self, rows: tuple[Any, ...]) -> Any:
        """See `SamplerParts.host_indices`."""
        return rows[1]

    def edits_logits(self, indices: Any) -> bool:
        """See `SamplerParts.edits_logits`."""
        return bool(
            self.penalties_state.use_penalty[indices].any()
            or self.logit_bias_state.use_logit_bias[indices].any()
            or (self.bad_words_state.num_bad_words.np[indices] > 0).any()
        )


def _do_nothing(*_args: Any) -> None:
    return None


def _apply_logit_bias(
    states: Any,
    logits: torch.Tensor,
    indices: torch.Tensor,
    host_indices: Any,
    positions: torch.Tensor,
) -> None:
    """Apply allowed ids, bias and min_tokens, in place of ``LogitBiasState.apply_logit_bias``.

    The kernel of 0.24 reads the logits of allowed ids, overwrites all and writes those back without
    barriers: on a GPU some of them stay -inf. 0.26 has the barriers.
    """
    if not states.use_logit_bias[host_indices].any():
        return
    counts, ids = states.num_allowed_token_ids, states.allowed_token_ids.gpu
    if (counts.np[host_indices] > 0).any():
        rows = indices.to(torch.int64)
        keep_allowed_ids(logits, counts.gpu[rows], ids[rows])
    apply_logit_bias(
        logits,
        indices,
        positions,
        torch.zeros_like(counts.gpu),
        ids,
        states.num_logit_bias.gpu,
        states.logit_bias_token_ids.gpu,
        states.logit_bias.gpu,
        states.min_lens.gpu,
        states.num_stop_token_ids.gpu,
        states.stop_token_ids.gpu,
    )


class PluginVerifier(RejectionSampler):  # type: ignore[misc]
    """Verifies drafts; called for batches with any draft, prompts included."""

    @replaces(VERIFY, "v24")
    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,  # noqa: ARG002 (of vLLM's rejection sampling)
    ) -> SamplerOutput:
        """Return the accepted tokens of every request.

        Args:
            logits: [N, V] raw logits of the target.
        """
        batch = input_batch
        drafts = batch.input_ids[batch.logits_indices]
        positions = batch.positions[batch.logits_indices]
        rows = (
            batch.expanded_idx_mapping,
            batch.idx_mapping_np,
            positions,
            drafts,
            batch.expanded_local_pos,
        )

        def score(tokens: Any, num_sampled: Any, scored: Any, _most: int) -> Any:
            return self._get_logprobs_tensors(batch, tokens, num_sampled, scored)

        return self.sampler.verify_batch(batch, logits, drafts, positions, rows, score)


@replaces(SAMPLE_DRAFT, "v24")
def draft_rows(
    speculator: Any,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,  # noqa: ARG001
    seeds: torch.Tensor,  # noqa: ARG001
    draft_step: torch.Tensor,
    draft_logits: torch.Tensor | None,  # noqa: ARG001
) -> DraftRows:
    """Read a call of ``sample_draft``; ``positions`` are one before the token that it follows.

    0.24 leaves indices of earlier requests in the rows that pad a captured batch. Sampled with the
    options of those requests, a flat padding row would take longer than the draft model (0.8 ms),
    and the draft probabilities that it writes would replace those of a running request.
    """
    logits = speculator.model.compute_logits(hidden_states)
    is_padding = without_tokens(speculator.input_buffers.query_start_loc, len(idx_mapping))
    return DraftRows(logits, idx_mapping, positions, 1, draft_step, is_padding)


def draft_loop(speculator: Any) -> Callable[..., None] | None:
    """Return `run_passes` for a speculator whose attention backends allow to capture it."""
    if not can_capture(speculator):
        return None
    return partial(run_passes, speculator, speculator._generate_draft, build_slot_mappings_by_layer)

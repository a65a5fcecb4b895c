"""What samples, verifies and drafts in place of vLLM's ``Sampler``, ``RejectionSampler``,
``DraftModelSpeculator.sample_draft`` and ``DSparkSpeculator._sample_logits``."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
)

from mtp_plugin.hosts.vllm.copied_tail import CopiedTail
from mtp_plugin.hosts.vllm.requests import PREFILL, AdmittedOptions, request_facts
from mtp_plugin.hosts.vllm.versions import SAMPLE, SAMPLE_DRAFT, SAMPLE_LOGITS, VERIFY, replaces
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps, StepRows

PROCESSED = ("processed_logprobs", "processed_logits")
"""Values of ``logprobs_mode`` that need the logits after all sampling options."""


class PluginSampler(Sampler):  # type: ignore[misc]
    """Samples steps without drafts, and processes the logits of all steps.

    vLLM's logits processors (penalties, bias, allowed ids, bad words, min_tokens, thinking budget,
    custom ones) run as before, for batches in which a request needs them. Temperature, top-k,
    top-p, min-p and the random numbers are those of `sample_tokens`.

    Args:
        sampler: vLLM's, whose states stay in use; it is not used any more.
    """

    def __init__(self, sampler: Any, ops: RowOps, tail: CopiedTail | None = None) -> None:
        self.__dict__.update(vars(sampler))
        self.ops, self.tail = ops, tail
        self._options = AdmittedOptions(ops.settings)
        add = self.sampling_states.add_request

        def add_request(*args: Any, **kwargs: Any) -> bool:
            """Keep temperature, top-k, top-p and min-p from `needs_logits_processing`."""
            add(*args, **kwargs)
            return False

        self.sampling_states.add_request = add_request

    def add_request(self, req_idx: int, sampling_params: Any, *args: Any, **kwargs: Any) -> None:
        """Stage the whole row of a request.

        vLLM removes and adds again what it preempted, and a session with streamed input for each of
        its turns, with the turn's parameters: their row is written again like that of a new one.
        """
        super().add_request(req_idx, sampling_params, *args, **kwargs)
        states, slots = self.req_states, self.ops.slots
        options = self._options.read(sampling_params.extra_args)
        facts = request_facts(sampling_params, options, int(states.prompt_len.np[req_idx]))
        tokens = getattr(states, PREFILL, {}).pop(req_idx, ())
        # vLLM draws a seed for requests without one, alike on all ranks
        seed = int(self.sampling_states.seeds.np[req_idx])
        slots.stage(req_idx, slots.values(facts, options, tokens), seed)
        if self.tail is not None:
            self.tail.forget(req_idx)

    def apply_staged_writes(self, *args: Any, **kwargs: Any) -> None:
        """Write what `add_request` staged."""
        super().apply_staged_writes(*args, **kwargs)
        self.ops.slots.apply()

    def processed(self, logits: torch.Tensor, rows: LogitsContext) -> torch.Tensor:
        """Return logits [N, V] after the logits processors; ``logits`` itself without any."""
        if not self.needs_logits_processing[rows.idx_mapping_np].any():
            return logits
        # raw log-probabilities are read from the given logits
        logits = logits.to(torch.float32, copy=True)
        for processor in self.logits_processors:  # as in vLLM's ``apply_sampling_params``
            logits = processor.apply(logits, rows)
        self.thinking_budget_state.apply(logits, rows)
        return logits

    def scored(
        self, logits: torch.Tensor, processed: torch.Tensor, rows: LogitsContext
    ) -> torch.Tensor:
        """Return the logits [N, V] from which log-probabilities are taken."""
        if self.logprobs_mode not in PROCESSED:
            return logits
        states, indices = self.sampling_states, (rows.expanded_idx_mapping, rows.idx_mapping_np)
        values = processed.to(torch.float32, copy=True)
        states.apply_temperature(values, *indices)
        states.apply_min_p(values, *indices)
        cut: torch.Tensor = states.apply_top_k_top_p(values, *indices)
        return cut

    @replaces(SAMPLE)
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
        """Sample rows of target logits [N, V]; returns tokens [N] int64 and what scores them."""
        rows = LogitsContext(
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            expanded_local_pos,
            input_ids,
            pos,
            seq_lens_upper_bound_np,
        )
        processed = self.processed(logits, rows)
        tokens = self.ops.sample(processed, expanded_idx_mapping, pos)
        return tokens, self.scored(logits, processed, rows) if return_logprobs else logits

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample a step without drafts, and update thinking phases."""
        output = super().__call__(logits, input_batch, *args, **kwargs)
        self.ops.follow_phase(
            output.sampled_token_ids[:, 0], input_batch.idx_mapping, output.num_sampled > 0
        )
        return output if self.tail is None else self.tail.add_matches(output, input_batch)


class PluginVerifier(RejectionSampler):  # type: ignore[misc]
    """Verifies drafts; called for batches with any draft, prompts included."""

    @replaces(VERIFY)
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
        prefill_lens = sampler.req_states.prefill_len.gpu
        drafts, positions = gather_draft_sampled(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            prefill_lens,
        )
        rows = LogitsContext(
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            batch.expanded_local_pos,
            drafts,
            positions,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, -1)
        if sampler.tail is not None:
            drafts = sampler.tail.without_absent(drafts, batch)
        num_nans = None
        if sampler.compute_nans:
            num_nans = nans_per_request(get_num_nans(logits), batch.cu_num_logits)
        processed = sampler.processed(logits, rows)
        accepted = sampler.ops.verify(
            StepRows(
                processed,
                drafts,
                positions,
                batch.expanded_idx_mapping,
                batch.expanded_local_pos,
                batch.cu_num_logits,
                batch.idx_mapping,
                batch.idx_mapping_np,
                batch.seq_lens[: batch.num_reqs],
                prefill_lens,
            )
        )
        tokens, num_sampled = accepted.tokens, accepted.num_accepted
        logprobs = None
        most = sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most != NO_LOGPROBS:
            scored = sampler.scored(logits, processed, rows)
            starts = (batch.cu_num_logits, batch.cu_num_logits_np)
            logprobs = self._get_logprobs_tensors(tokens, num_sampled, scored, *starts, most)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_lens
        )
        output = SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output if sampler.tail is None else sampler.tail.add_matches(output, batch)


def nans_per_request(num_nans: torch.Tensor, cu_num_logits: torch.Tensor) -> torch.Tensor:
    """Sum NaN counts of rows [N] over each request, [R]: vLLM reads entry i as request i's.

    Args:
        cu_num_logits: [R + 1] first row of each request.
    """
    sums = torch.cat([num_nans.new_zeros(1), num_nans.cumsum(0)])
    return sums[cu_num_logits.to(torch.int64)].diff()


# num_steps: of watermarks, which are refused
@replaces(SAMPLE_DRAFT, unused=("num_steps",))
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


@replaces(SAMPLE_LOGITS)
def dspark_rows(
    speculator: Any,
    logits: torch.Tensor,
    idx_map: torch.Tensor,
    sample_pos: torch.Tensor,
    step: int,
) -> DraftRows:
    """Read a call of ``_sample_logits``, whose positions are those of the drafts themselves.

    With a map of draft ids, logits [R, V'] become [R, V], as vLLM samples them.
    """
    offsets = getattr(speculator.model, "draft_id_to_target_id", None)
    if offsets is not None:
        ids = offsets + torch.arange(len(offsets), device=offsets.device)
        full = logits.new_full((len(logits), speculator.vocab_size), -torch.inf)
        logits = full.index_copy_(1, ids, logits)
    return DraftRows(logits, idx_map, sample_pos - 1, 0, speculator._step_cols[step])

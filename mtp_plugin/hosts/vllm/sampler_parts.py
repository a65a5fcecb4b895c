"""What our samplers of all vLLM versions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.hosts.vllm.copied_tail import CopiedTail
from mtp_plugin.hosts.vllm.requests import AdmittedOptions, request_facts
from mtp_plugin.speculative.rows.row_ops import RowOps, StepRows, valid_ids

PREFILL = "_mtp_plugin_prefill"
"""Attribute of vLLM's ``RequestState``: request state index -> ids of a new request's prefill."""
PROCESSED = ("processed_logprobs", "processed_logits")
"""Values of ``logprobs_mode`` that need the logits after all sampling options."""


class SamplerParts:
    """To be mixed into a subclass of vLLM's ``Sampler``.

    vLLM's logits processors (penalties, bias, allowed ids, bad words, min_tokens, thinking budget,
    custom ones) run as before, for batches in which a request needs them. Temperature, top-k,
    top-p, min-p and the random numbers are those of `sample_tokens`.
    """

    params_index = 0
    """Of the ``SamplingParams`` among the arguments of ``add_request`` after the first."""
    ops: RowOps
    tail: CopiedTail | None = None
    _options: AdmittedOptions
    sampling_states: Any
    req_states: Any
    logprobs_mode: str
    compute_nans: bool

    @classmethod
    def replacing(cls, sampler: Any, ops: RowOps) -> Self:
        """Return a sampler with the states of vLLM's ``sampler``, which is not used any more."""
        made = cls.__new__(cls)
        vars(made).update(vars(sampler))
        made.ops = ops
        made._options = AdmittedOptions(ops.settings)
        return made

    def add_request(self, req_idx: int, *args: Any, **kwargs: Any) -> None:
        """Stage the whole row of a request.

        vLLM removes and adds again what it preempted, and a session with streamed input for each of
        its turns, with the turn's parameters: their row is written again like that of a new one.
        """
        super().add_request(req_idx, *args, **kwargs)  # type: ignore[misc]
        params, states, slots = args[self.params_index], self.req_states, self.ops.slots
        prompt_len = int(states.prompt_len.np[req_idx])
        tokens = getattr(states, PREFILL, {}).pop(req_idx, ())
        options = self._options.read(params.extra_args)
        values = slots.values(request_facts(params, options, prompt_len), options, tokens)
        # vLLM draws a seed for requests without one, alike on all ranks
        slots.stage(req_idx, values, int(self.sampling_states.seeds.np[req_idx]))
        if self.tail is not None:
            self.tail.forget(req_idx)

    def apply_staged_writes(self, *args: Any, **kwargs: Any) -> None:
        """Write what `add_request` staged."""
        super().apply_staged_writes(*args, **kwargs)  # type: ignore[misc]
        self.ops.slots.apply()

    def edits_logits(self, indices: Any) -> bool:
        """Whether a request of the batch has a logits processor; ``indices`` [R] numpy."""
        raise NotImplementedError

    def processed(self, logits: torch.Tensor, *rows: Any) -> torch.Tensor:
        """Return logits [N, V] after the logits processors; ``logits`` itself without any."""
        if not self.edits_logits(self.host_indices(rows)):
            return logits
        # raw log-probabilities are read from the given logits
        return self.apply_processors(logits.to(torch.float32, copy=True), *rows)

    def apply_processors(self, logits: torch.Tensor, *rows: Any) -> torch.Tensor:
        """Run vLLM's logits processors alone, on a float32 copy [N, V] that they may edit."""
        raise NotImplementedError

    def apply_temperature(self, logits: torch.Tensor, *indices: Any) -> None:
        """Apply vLLM's temperature and min-p, which our op applies by itself."""
        self.sampling_states.apply_temperature(logits, *indices)
        self.sampling_states.apply_min_p(logits, *indices)

    def scored(self, logits: torch.Tensor, processed: torch.Tensor, *rows: Any) -> torch.Tensor:
        """Return the logits [N, V] from which log-probabilities are taken."""
        if self.logprobs_mode not in PROCESSED:
            return logits
        indices, host_indices = rows[0], self.host_indices(rows)
        values = processed.to(torch.float32, copy=True)
        self.apply_temperature(values, indices, host_indices)
        cut: torch.Tensor = self.sampling_states.apply_top_k_top_p(values, indices, host_indices)
        return cut

    def sample_rows(
        self, logits: torch.Tensor, positions: torch.Tensor, return_logprobs: bool, *rows: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample rows of target logits [N, V]; returns tokens [N] int64 and what scores them."""
        processed = self.processed(logits, *rows)
        tokens = valid_ids(self.ops.sample(processed, rows[0], positions))
        return tokens, self.scored(logits, processed, *rows) if return_logprobs else logits

    def verify_batch(
        self,
        batch: Any,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        positions: torch.Tensor,
        rows: tuple[Any, ...],
        score: Callable[..., Any],
    ) -> Any:
        """Verify the drafts of vLLM's ``InputBatch``; returns its ``SamplerOutput``.

        Args:
            logits: [N, V] raw logits of the target. drafts, positions: [N], see `StepRows`.
            rows: arguments of vLLM's ``Sampler.sample`` that describe the rows.
            score: returns the log-probabilities of (tokens, their numbers [R], logits, the most
                that a request wants).
        """
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.metrics.logits import get_num_nans
        from vllm.v1.worker.gpu.sample.output import SamplerOutput
        from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

        num_nans = None
        if self.compute_nans:
            num_nans = nans_per_request(get_num_nans(logits), batch.cu_num_logits)
        processed = self.processed(logits, *rows)
        prefill_lens = self.req_states.prefill_len.gpu
        step = StepRows(
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
        accepted = self.ops.verify(step)
        tokens, num_sampled = valid_ids(accepted.tokens), accepted.num_accepted
        logprobs = None
        most = self.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most != NO_LOGPROBS:
            logprobs = score(tokens, num_sampled, self.scored(logits, processed, *rows), most)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_lens
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample a step without drafts, and update thinking phases."""
        output = super().__call__(logits, input_batch, *args, **kwargs)  # type: ignore[misc]
        self.ops.follow_phase(
            output.sampled_token_ids[:, 0], input_batch.idx_mapping, output.num_sampled > 0
        )
        return output if self.tail is None else self.tail.add_matches(output, input_batch)

    def host_indices(self, rows: tuple[Any, ...]) -> Any:
        """Return the argument ``idx_mapping_np`` of a call."""
        raise NotImplementedError


def nans_per_request(num_nans: torch.Tensor, cu_num_logits: torch.Tensor) -> torch.Tensor:
    """Sum NaN counts of rows [N] over each request, [R]: vLLM reads entry i as request i's.

    Args:
        cu_num_logits: [R + 1] first row of each request.
    """
    sums = torch.cat([num_nans.new_zeros(1), num_nans.cumsum(0)])
    return sums[cu_num_logits.to(torch.int64)].diff()


def without_tokens(query_start_loc: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return which of the first rows [R] have no query tokens; one launch of a captured graph.

    Args:
        query_start_loc: at least [R + 1] first token of each row.
    """
    starts = query_start_loc[: num_rows + 1]
    return starts[1:] <= starts[:-1]


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

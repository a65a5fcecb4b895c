"""One step on the device: inputs from requests or from the step before, target, worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.batch import RowParameters
from mtp_plugin.executor.attention import PagedAttentionMetadata
from mtp_plugin.executor.kv_cache import BlockManager, PagedKVPools
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.executor.scheduler import ScheduledRequests
from mtp_plugin.models import LoadedModel
from mtp_plugin.plugin import SpeculativePieces
from mtp_plugin.protocols import CUDA_GRAPH_DUMMY_REQUEST_ID


@dataclass(frozen=True)
class GenerationInputs:
    """The rows of the generations of a step, true lengths included, on the device."""

    input_ids: torch.Tensor  # [G, K+1] last emitted token, then drafts; absent drafts are 0
    lengths: torch.Tensor  # [G] int64: committed tokens, L
    draft_lens: torch.Tensor  # [G] int32
    capacity: torch.Tensor  # [G] int32: KV rows that the request may touch


class ModelEngine:
    """Runs target and worker over a scheduled batch.

    Args:
        model: the loaded target and draft layers. pieces: of the speculative plugin.
        blocks, pools: the paged KV cache.
        max_seq_len: tokens that a sequence may hold.
        padded_sizes: batch sizes to which generation-only batches are padded with dummy rows.
        check_metadata: rebuild derived indices at every attention call and compare.
    """

    def __init__(
        self,
        model: LoadedModel,
        pieces: SpeculativePieces,
        blocks: BlockManager,
        pools: PagedKVPools,
        *,
        max_seq_len: int,
        padded_sizes: Sequence[int] = (),
        check_metadata: bool = False,
    ) -> None:
        self.model = model
        self.pieces = pieces
        self.blocks = blocks
        self.pools = pools
        self.max_seq_len = max_seq_len
        self.device: torch.device = next(model.lm_head.parameters()).device
        self._padded_sizes = sorted(padded_sizes)
        self._check_metadata = check_metadata
        self.spec_metadata = pieces.make_metadata()

    @torch.inference_mode()
    def forward(
        self, batch: ScheduledRequests, previous: Any | None, in_flight: set[int]
    ) -> dict[str, torch.Tensor]:
        """Launch one step.

        Args:
            batch: contexts and generations, resources prepared.
            previous: the device tensors of the step before, addressed by sequence slot; None in the
                plain loop.
            in_flight: ids of requests whose last result is only in ``previous``.

        Returns:
            The worker's mapping; padding rows stand behind those of the batch.
        """
        contexts, generations = batch.context_requests, batch.generation_requests
        padding = self._num_padding_rows(batch)
        k = self.pieces.plan.max_draft_len
        context_ids, context_positions, next_prompt = self._context_inputs(contexts)
        rows = self._generation_inputs(generations, previous, in_flight, batch.batch_size, padding)
        offsets = torch.arange(k + 1, device=self.device)
        positions = (rows.lengths.unsqueeze(1) + offsets).clamp_max(self.max_seq_len - 1)
        input_ids = torch.cat([context_ids, rows.input_ids.reshape(-1)])
        position_ids = torch.cat([context_positions, positions.reshape(-1)]).unsqueeze(0)
        attn_metadata = self._attention_metadata(batch, rows, padding)
        self._fill_spec_metadata(batch, rows, next_prompt, padding, int(input_ids.shape[0]))

        hidden_states = self.model.forward_target(input_ids, position_ids, attn_metadata)
        logit_rows = self._logit_rows(contexts, int(input_ids.shape[0]))
        logits = self.model.lm_head(hidden_states[logit_rows]).float()
        outputs: dict[str, torch.Tensor] = self.pieces.worker(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            logits=logits,
            lm_head=self.model.lm_head,
            embed_tokens=self.model.embed_tokens,
            attn_metadata=attn_metadata,
            spec_metadata=self.spec_metadata,
            mtp_layers=self.model.mtp_layers,
        )
        return outputs

    # ---- inputs -----------------------------------------------------------------------------

    def _context_inputs(
        self, contexts: list[LlmRequest]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [N], positions [N], and the known token behind each chunk [C] (-1 at a prompt's
        end)."""
        ids: list[int] = []
        positions: list[int] = []
        next_prompt: list[int] = []
        for request in contexts:
            start = request.context_current_position
            end = start + request.context_chunk_size
            tokens = request.get_tokens()
            ids += tokens[start:end]
            positions += range(start, end)
            next_prompt.append(-1 if request.is_last_context_chunk else tokens[end])
        return (
            self._upload(ids, torch.int32),
            self._upload(positions, torch.int64),
            self._upload(next_prompt, torch.int32),
        )

    def _generation_inputs(
        self,
        generations: list[LlmRequest],
        previous: Any | None,
        in_flight: set[int],
        batch_size: int,
        padding: int,
    ) -> GenerationInputs:
        """The rows of generations: from the host where it is up to date, else from ``previous``."""
        k = self.pieces.plan.max_draft_len
        limit = self.pieces.draft_len_limit(batch_size)
        ids: list[list[int]] = []
        lengths: list[int] = []
        caps: list[int] = []
        capacities: list[int] = []
        pending: list[bool] = []
        slots: list[int] = []
        for request in generations:
            late = previous is not None and request.request_id in in_flight
            drafts = [] if late else request.py_draft_tokens[:k]
            available = k if late else len(drafts)
            cap = 0 if request.py_disable_speculative_decoding else min(available, limit)
            request.py_num_drafted = cap
            ids.append([request.get_tokens()[-1], *drafts] + [0] * (k - len(drafts)))
            lengths.append(request.get_num_tokens() - 1)
            caps.append(cap)
            reserved = self.blocks.reserved_rows(request.request_id)
            capacities.append(min(reserved, request.max_length))
            pending.append(late)
            slots.append(request.py_seq_slot if late and request.py_seq_slot is not None else 0)
        for _ in range(padding):
            ids.append([0] * (k + 1))
            lengths.append(1)
            caps.append(0)
            capacities.append(0)
            pending.append(False)
            slots.append(0)

        input_ids = self._upload(ids, torch.int32).reshape(-1, k + 1)
        length = self._upload(lengths, torch.int64)
        if previous is not None:
            late_rows = self._upload(pending, torch.bool)
            slot = self._upload(slots, torch.int64)
            device_ids = previous.new_tokens.squeeze(-1).T[slot]
            input_ids = torch.where(late_rows.unsqueeze(1), device_ids, input_ids)
            length = length + torch.where(late_rows, previous.new_tokens_lens[slot], 0)
        capacity = self._upload(capacities, torch.int64)
        room = (capacity - 1 - length).clamp_min(0)
        draft_lens = torch.minimum(self._upload(caps, torch.int64), room)
        columns = torch.arange(k + 1, device=self.device)
        absent = columns > draft_lens.unsqueeze(1)
        input_ids = input_ids.masked_fill(absent, 0).clamp_min(0)
        return GenerationInputs(
            input_ids, length, draft_lens.to(torch.int32), capacity.to(torch.int32)
        )

    def _logit_rows(self, contexts: list[LlmRequest], num_tokens: int) -> torch.Tensor:
        """The last row of each context, then every row of the generations."""
        ends: list[int] = []
        total = 0
        for request in contexts:
            total += request.context_chunk_size
            ends.append(total - 1)
        generation_rows = torch.arange(total, num_tokens, device=self.device)
        return torch.cat([self._upload(ends, torch.int64), generation_rows])

    # ---- metadata ---------------------------------------------------------------------------

    def _attention_metadata(
        self, batch: ScheduledRequests, rows: GenerationInputs, padding: int
    ) -> PagedAttentionMetadata:
        k = self.pieces.plan.max_draft_len
        contexts = batch.context_requests
        starts = [r.context_current_position for r in contexts]
        chunks = [r.context_chunk_size for r in contexts]
        ends = self._upload([s + c for s, c in zip(starts, chunks, strict=True)], torch.int32)
        reserved = [min(self.blocks.reserved_rows(r.request_id), r.max_length) for r in contexts]
        generation_lens = rows.lengths.to(torch.int32)
        present = generation_lens + rows.draft_lens + 1
        num_generations = len(batch.generation_requests) + padding
        cached = starts + [r.get_num_tokens() - 1 for r in batch.generation_requests]
        return PagedAttentionMetadata(
            seq_lens=torch.tensor(chunks + [k + 1] * num_generations, dtype=torch.int32),
            kv_lens=torch.cat([ends, generation_lens + k + 1]),
            num_contexts=len(contexts),
            num_cached_tokens_per_seq=cached + [1] * padding,
            block_table=self._block_table(batch.all_requests(), padding),
            kv_write_limit=torch.cat([ends, torch.minimum(present, rows.capacity)]),
            kv_capacity=torch.cat([self._upload(reserved, torch.int32), rows.capacity]),
            pools=self.pools,
            request_ids=[r.request_id for r in batch.all_requests()],
            check=self._check_metadata,
        )

    def _block_table(self, requests: list[LlmRequest], padding: int) -> torch.Tensor:
        tables = [self.blocks.table(r.request_id) for r in requests] + [[]] * padding
        width = max(1, *(len(t) for t in tables))
        sentinel = self.blocks.sentinel_block
        padded = [table + [sentinel] * (width - len(table)) for table in tables]
        return self._upload(padded, torch.int32)

    def _fill_spec_metadata(
        self,
        batch: ScheduledRequests,
        rows: GenerationInputs,
        next_prompt: torch.Tensor,
        padding: int,
        num_tokens: int,
    ) -> None:
        spec = self.spec_metadata
        requests = batch.all_requests()
        dummies = [CUDA_GRAPH_DUMMY_REQUEST_ID] * padding
        spec.num_generations = len(batch.generation_requests) + padding
        spec.draft_tokens = rows.input_ids[:, 1:].reshape(-1)
        spec.draft_lens = rows.draft_lens
        spec.next_prompt_tokens = next_prompt
        spec.request_ids = [r.request_id for r in requests] + dummies
        spec.num_tokens = num_tokens
        spec.row_parameters = self._row_parameters(requests, padding)
        spec.prepare()

    def _row_parameters(self, requests: list[LlmRequest], padding: int) -> RowParameters:
        stops = [list(r.py_stop_ids) for r in requests] + [[]] * padding
        width = max(1, *(len(s) for s in stops))
        stop_ids = self._upload([s + [-1] * (width - len(s)) for s in stops], torch.int32)
        if not any(r.params.min_tokens for r in requests):
            return RowParameters(stop_ids, None)
        first = [r.py_orig_prompt_len + r.params.min_tokens for r in requests]
        return RowParameters(stop_ids, self._upload(first + [0] * padding, torch.int32))

    def _num_padding_rows(self, batch: ScheduledRequests) -> int:
        if batch.context_requests:
            return 0
        sizes = [size for size in self._padded_sizes if size >= batch.batch_size]
        return sizes[0] - batch.batch_size if sizes else 0

    def _upload(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

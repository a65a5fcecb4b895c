"""Launches steps on the device: input preparation, target forward, worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from mtp_plugin.errors import ConfigError, PluginError, format_value
from mtp_plugin.hosts.embedded.attention import (
    AttentionBackend,
    AttentionLease,
    PagedAttentionMetadata,
)
from mtp_plugin.hosts.embedded.cuda_graphs import CapturedSteps, capture_lock, is_captured_first
from mtp_plugin.hosts.embedded.early_kernels import EarlyKernels
from mtp_plugin.hosts.embedded.kv_cache import BlockManager, PagedKVPools
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.hosts.embedded.prompt_logprobs import ScoredPrompts
from mtp_plugin.hosts.embedded.prompt_steps import (
    CAPTURED_CHUNKS,
    PromptChunks,
    fitting_shape,
)
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.row_table import Row, RowTable, StepShape, UploadedRows
from mtp_plugin.hosts.embedded.scheduler import ScheduledRequests
from mtp_plugin.hosts.embedded.step_inputs import LastResults, StepInputs, generation_inputs
from mtp_plugin.ops.step import Accepted, SamplingKind
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.plugin import SpeculativePieces
from mtp_plugin.speculative.verified_tokens import VerifiedTokens

PROMPT_LENGTHS = (128, 100)
"""Lengths of prompts whose kernels are compiled before the first request: Triton distinguishes
multiples of 16."""


@dataclass(frozen=True)
class StepLimits:
    """Size limits of a step."""

    max_seq_len: int
    """Maximum number of tokens of a sequence."""
    max_batch_size: int
    """Maximum number of requests of a batch."""
    padded_sizes: Sequence[int] = ()
    """Batch sizes to which generation-only batches are padded with dummy rows."""


class ModelEngine:
    """Runs target and worker over a scheduled batch.

    A scheduled batch is described by a :class:`Row` per request and a :class:`StepShape`. The rows
    are copied to the device as :class:`UploadedRows`, from which :class:`StepInputs` of target and
    worker are computed.

    Args:
        model: the loaded target and draft layers.
        pieces: the components of the speculative plugin.
        blocks, pools: the paged KV cache.
        attn_backend: backend of paged attention; None: sdpa.
        draft_head: LM head of the drafts; None: the model's.
        lease: lease of the model's attention, released with the engine.
        early_tokens: steps with prompts return the output tokens under the key ``verified`` as
            `VerifiedTokens`, which the host reads before their drafts are done; for a loop whose
            next step reads the drafts on the device.
    """

    def __init__(
        self,
        model: LoadedModel,
        pieces: SpeculativePieces,
        blocks: BlockManager,
        pools: PagedKVPools,
        limits: StepLimits,
        *,
        attn_backend: AttentionBackend | None = None,
        draft_head: nn.Module | None = None,
        lease: AttentionLease | None = None,
        early_tokens: bool = False,
    ) -> None:
        self.model = model
        self.pieces = pieces
        self.blocks = blocks
        self.pools = pools
        self.max_seq_len = limits.max_seq_len
        self.max_batch_size = limits.max_batch_size
        self.device: torch.device = next(model.lm_head.parameters()).device
        self.spec_metadata = pieces.make_metadata()
        if not callable(getattr(self.spec_metadata, "prepare", None)):
            given = format_value(self.spec_metadata)
            raise PluginError(f"make_metadata(): expected an object with prepare, got {given}")
        self.captured: CapturedSteps | None = None
        """Graphs of generation-only steps, see :meth:`capture`."""
        self.draft_head = model.lm_head if draft_head is None else draft_head
        self._attn_backend = attn_backend
        self._lease = lease
        self._early_tokens = (
            early_tokens
            and pieces.plan.max_draft_len > 0
            and getattr(pieces.sampler, "reads_verified_tokens", False)
            and torch.version.hip is None  # older ROCm has no external events
        )
        self._padded_sizes = sorted(limits.padded_sizes)
        self._prompt_shapes: Sequence[StepShape] = ()
        self._table = self.make_table()

    def make_table(self) -> RowTable:
        """Make the row table of this engine."""
        return RowTable(
            self.max_batch_size + CAPTURED_CHUNKS,
            step_rows=self.pieces.plan.step_rows,
            table_width=self.blocks.blocks_for(self.max_seq_len),
            sentinel_block=self.blocks.sentinel_block,
            device=self.device,
        )

    def capture(
        self,
        shapes: Sequence[StepShape],
        report: Callable[[str], None],
        *,
        lazy: bool = False,
    ) -> None:
        """Capture steps in CUDA graphs.

        Args:
            shapes: in the order of capture; the largest first takes the least memory.
            report: called with a line of text per graph.
            lazy: capture only the most common shapes, see `is_captured_first`, and leave the others
                to :meth:`capture_next`.

        Raises:
            ConfigError: the plugin's sampler keeps no tokens on the device, or its metadata no
                buffers for graphs.
        """
        store, make_metadata = self.pieces.device_store, self.pieces.make_graph_metadata
        if store is None or make_metadata is None:
            missing = "device_store" if store is None else "make_graph_metadata"
            raise ConfigError(
                f"cuda_graph_config: expected null with pieces that have no {missing}"
            )
        # TensorRT-LLM's names of attributes that may be replaced as long as no graph was captured
        manager = self.pieces.manager
        names = [
            name
            for name, value in getattr(manager, "__dict__", {}).items()
            if name.endswith("_pool") and isinstance(value, torch.Tensor)
        ]
        # no reference to this engine: a cycle would keep the memory of a dropped one
        pools, engine = self.pools, weakref.ref(self)
        captured = CapturedSteps(
            lambda *args, **options: cast(ModelEngine, engine()).launch(*args, **options),
            self.make_table(),
            self.padding_row(),
            store(),
            partial(make_metadata, self.spec_metadata),
            self.pieces.replay_checks,
            lambda: [getattr(manager, name) for name in names] + pools.tensors(),
            lambda index: names[index] if index < len(names) else "a KV pool",
        )
        first = [s for s in shapes if not lazy or is_captured_first(s, shapes)]
        first.sort(key=lambda shape: shape.sampling_kind)
        later = [s for s in shapes if s not in first]
        launch = captured.launch_padding
        with EarlyKernels(
            self.device, launch, self._launch_prompts, shapes, first, report
        ) as kernels:
            for number, shape in enumerate(first):
                kernels.wait_for(shape)
                report(f"capturing CUDA graphs {number + 1}/{len(first)}")
                captured.capture(shape)
        later.sort(key=lambda shape: shape.sampling_kind)
        captured.defer(later, kernels.compile_later())
        self._prompt_shapes = [shape for shape in shapes if shape.chunk_lens]
        self.captured = captured

    @torch.inference_mode()
    def _launch_prompts(self) -> None:
        """Launch steps of one prompt, whose rows have no KV blocks."""
        for length in PROMPT_LENGTHS:
            length = min(length, self.max_seq_len - 1)
            prompt = LlmRequest(
                CUDA_GRAPH_DUMMY_REQUEST_ID,
                [0] * length,
                SamplingParams(max_new_tokens=1),
                max_seq_len=self.max_seq_len,
            )
            prompt.context_chunk_size = length
            row = replace(self.padding_row(), length=length, capacity=length)
            step = self._table.upload([row])
            contexts = PromptChunks.of([prompt]).to_inputs(step)
            for sampling_kind in (SamplingKind.GREEDY, SamplingKind.SAMPLED):
                shape = StepShape((length,), 0, self.pieces.plan.max_draft_len, sampling_kind)
                self.launch(shape, step, None, contexts)

    def is_compiling(self, kind: SamplingKind) -> bool:
        """Whether kernels for requests of this kind are being compiled in the background."""
        return self.captured is not None and self.captured.is_compiling(kind)

    @property
    def has_pending_graphs(self) -> bool:
        """Whether :meth:`capture_next` has something to do."""
        return self.captured is not None and bool(self.captured.pending)

    def capture_next(self) -> bool:
        """Capture one of the pending shapes, between two steps; False: no shape is pending."""
        return self.captured is not None and self.captured.capture_next()

    def release(self) -> None:
        """Free the memory of graphs and KV rows and restore the model's attention modules.

        No step can run afterwards.
        """
        if self.device.type == "cuda":
            with capture_lock, suppress(RuntimeError):  # a failed device cannot be waited for
                torch.cuda.synchronize(self.device)
        if self.captured is not None:
            self.captured.close()
        self.captured = None
        self.pools.release()
        if self._lease is not None:
            self._lease.release()

    @torch.inference_mode()
    def forward(
        self, batch: ScheduledRequests, previous: Any | None, in_flight: set[int]
    ) -> dict[str, Any]:
        """Launch one step.

        Args:
            batch: contexts and generations, resources prepared.
            previous: the device tensors of the previous step, addressed by sequence slot; None in
                the non-overlap loop.
            in_flight: ids of requests whose last result is only in ``previous``.

        Returns:
            The worker's mapping; padding rows follow those of the batch. A captured step returns
            the graph's own tensors, valid until the next step, without the logits.
        """
        requests = batch.all_requests()
        rows = [self._context_row(request) for request in batch.context_requests]
        for request in batch.generation_requests:
            is_pending = previous is not None and request.request_id in in_flight
            rows.append(self._generation_row(request, is_pending))
        padding = self._num_padding_rows(batch)
        rows += [self.padding_row()] * padding
        chunks = PromptChunks.of(batch.context_requests)
        scored = ScoredPrompts.of(batch.context_requests, self.device)
        shape = StepShape(
            chunk_lens=tuple(chunks.lens),
            num_generations=len(batch.generation_requests) + padding,
            draft_len=self._draft_len(batch),
            sampling_kind=max((r.sampling_kind for r in requests), default=SamplingKind.GREEDY),
        )
        if self.captured is not None and scored is None:
            outputs = self._replay(self.captured, shape, rows, chunks)
            if outputs is not None:
                return outputs
        step = self._table.upload(rows)
        # a backend that gathers pages then gathers only the required columns
        width = max(1, *(len(row.blocks) for row in rows))
        step = replace(step, block_table=step.block_table[:, :width])
        contexts = chunks.to_inputs(step) if chunks.lens else None
        return self.launch(shape, step, previous, contexts, scored)

    def _replay(
        self, captured: CapturedSteps, shape: StepShape, rows: list[Row], chunks: PromptChunks
    ) -> dict[str, Any] | None:
        """Replay a step, with prompts in the smallest captured step that holds them; None: there is
        no graph."""
        padded = fitting_shape(shape, self._prompt_shapes) if chunks.lens else None
        if padded is None:
            return captured.replay(shape, rows)
        padding = self.padding_row()
        generations = rows[shape.num_contexts :]
        rows = rows[: shape.num_contexts]
        rows += [padding] * (padded.num_contexts - shape.num_contexts)
        rows += generations
        rows += [padding] * (padded.num_generations - shape.num_generations)
        return captured.replay(padded, rows, chunks.padded(padded, shape.num_generations))

    def launch(
        self,
        shape: StepShape,
        step: UploadedRows,
        previous: LastResults | None,
        contexts: StepInputs | None = None,
        scored: ScoredPrompts | None = None,
        *,
        order: torch.Tensor | None = None,
        spec_metadata: Any = None,
        hidden_states: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Launch a step; reads nothing back, so that it can be captured.

        Args:
            step: rows of the step's requests.
            contexts: prompt chunks of the step, if any.
            previous: see :meth:`forward`.
            scored: prompt tokens whose log-probabilities are requested.
            order: [R] int64, rows of the step in the order of the returned results; None: all rows
                in their order.
            spec_metadata: metadata of a captured step, already on the device; None: use the
                engine's own, filled from the host.
            hidden_states: [T, hidden size] of the step's tokens; None: run the target.
        """
        k = shape.draft_len
        inputs = generation_inputs(
            step.generations(shape.num_contexts),
            previous,
            draft_len=k,
            max_seq_len=self.max_seq_len,
            backend=self.pieces.backend,
        )
        if contexts is not None:
            inputs = inputs.with_contexts(contexts)
        logit_rows = inputs.logit_rows
        position_ids = inputs.positions.unsqueeze(0)
        attn_metadata = self._attention_metadata(shape, step, inputs)
        spec = self.spec_metadata if spec_metadata is None else spec_metadata
        spec.runtime_draft_len = k
        spec.num_generations = shape.num_generations
        spec.draft_tokens = inputs.draft_tokens
        spec.draft_lens = inputs.draft_lens
        spec.next_prompt_tokens = (
            inputs.input_ids.new_empty(0) if inputs.next_prompt is None else inputs.next_prompt
        )
        spec.request_ids = attn_metadata.request_ids
        spec.num_tokens = attn_metadata.num_tokens
        spec.sampling_kind = shape.sampling_kind
        if spec_metadata is None:
            spec.prepare()
        else:
            attn_metadata.is_cuda_graph = True
            spec.slot_ids = inputs.state_slot
        verified: list[VerifiedTokens] = []
        if self._early_tokens and shape.num_contexts > 0:

            def record(accepted: Accepted, logprob_entries: torch.Tensor | None) -> None:
                verified.append(VerifiedTokens.record(accepted, logprob_entries, order))

            attn_metadata.after_verification = record
        if hidden_states is None:
            hidden_states = self.model.forward_target(inputs.input_ids, position_ids, attn_metadata)
        if scored is not None:
            scored.score(hidden_states, self.model.lm_head, backend=self.pieces.backend)
        with_logits = hidden_states if logit_rows is None else hidden_states[logit_rows]
        given: object = self.pieces.worker(
            input_ids=inputs.input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            logits=self.model.lm_head(with_logits),
            lm_head=self.draft_head,
            embed_tokens=self.model.embed_tokens,
            attn_metadata=attn_metadata,
            spec_metadata=spec,
            mtp_layers=self.model.mtp_layers,
        )
        if not isinstance(given, dict):
            shown = format_value(given)
            raise PluginError(f"worker: expected a dict of the step's tensors, got {shown}")
        outputs: dict[str, Any] = given
        if order is not None:
            logits = outputs.pop("logits")
            outputs = {name: value[order] for name, value in outputs.items()} | {"logits": logits}
        return outputs | {"verified": verified[0]} if verified else outputs

    # ---- rows ---------------------------------------------------------------------------------

    def padding_row(self) -> Row:
        """A padding row, which reads and writes sentinel slots only."""
        return Row(
            tokens=[0] * self.pieces.plan.step_rows,
            length=1,
            state_slot=self.pieces.slot_of(CUDA_GRAPH_DUMMY_REQUEST_ID),
        )

    def _context_row(self, request: LlmRequest) -> Row:
        return Row(
            tokens=[0] * self.pieces.plan.step_rows,
            length=request.context_current_position + request.context_chunk_size,
            capacity=self._capacity(request),
            state_slot=self.pieces.slot_of(request.request_id),
            blocks=self.blocks.table(request.request_id),
            request_id=request.request_id,
        )

    def _generation_row(self, request: LlmRequest, is_pending: bool) -> Row:
        k = self.pieces.plan.max_draft_len
        drafts = [] if is_pending else request.py_draft_tokens[:k]
        limit = 0
        if not request.py_disable_speculative_decoding:
            limit = min(k if is_pending else len(drafts), request.py_draft_state.limit)
        request.py_num_drafted = limit
        slot = request.py_seq_slot
        tokens = request.get_tokens()
        return Row(
            tokens=[tokens[-1], *drafts] + [0] * (k - len(drafts)),
            length=len(tokens) - 1,
            draft_limit=limit,
            capacity=self._capacity(request),
            is_pending=is_pending,
            seq_slot=slot if is_pending and slot is not None else 0,
            state_slot=self.pieces.slot_of(request.request_id),
            blocks=self.blocks.table(request.request_id),
            request_id=request.request_id,
        )

    def _draft_len(self, batch: ScheduledRequests) -> int:
        return self.pieces.plan.max_draft_len if batch.draft_len is None else batch.draft_len

    def _capacity(self, request: LlmRequest) -> int:
        return min(self.blocks.reserved_rows(request.request_id), request.max_length)

    def _num_padding_rows(self, batch: ScheduledRequests) -> int:
        if batch.context_requests:
            return 0
        sizes = [size for size in self._padded_sizes if size >= batch.batch_size]
        return sizes[0] - batch.batch_size if sizes else 0

    # ---- metadata -----------------------------------------------------------------------------

    def _attention_metadata(
        self, shape: StepShape, step: UploadedRows, inputs: StepInputs
    ) -> PagedAttentionMetadata:
        counts = [*shape.chunk_lens, *[shape.draft_len + 1] * shape.num_generations]
        chunk_lens = [*shape.chunk_lens, *[0] * shape.num_generations]
        return PagedAttentionMetadata(
            seq_lens=torch.tensor(counts, dtype=torch.int32),
            seq_lens_cuda=inputs.seq_lens,
            kv_lens=inputs.kv_lens,
            num_contexts=shape.num_contexts,
            num_cached_tokens_per_seq=[
                row.length - chunk for row, chunk in zip(step.host, chunk_lens, strict=True)
            ],
            block_table=step.block_table,
            kv_write_limit=inputs.write_limit,
            kv_capacity=inputs.capacity,
            pools=self.pools,
            request_ids=[row.request_id for row in step.host],
            check=self.pieces.checks_metadata,
            backend=self._attn_backend,
        )

"""One forward as the host makes it: inputs from host lists or from the state before, then the
target and the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.hosts.embedded.models import LoadedModel
from tests.contract_host.behaviours import (
    GRAPH_DUMMY_ID,
    DecodingConfig,
    LlmRequestState,
    update_spec_config_from_model_config,
)
from tests.contract_host.kv_cache import KVCacheManager, ResourceManager
from tests.contract_host.layers import DeepseekLayer, MetadataLayer
from tests.contract_host.line_rules import Line
from tests.contract_host.metadata import AttentionMetadata
from tests.contract_host.pieces import Factories, Pieces, Sizes, build_pieces
from tests.contract_host.requests import Batch, LlmRequest, batch_of, draft_length

SPEC = "spec_resource_manager"
KV = "kv_cache_manager"


@dataclass
class _Rows:
    """What the host lists say of a step."""

    request_ids: list[int]
    prompt_lens: list[int]
    num_cached: list[int]
    seq_lens: list[int]
    position_ids: list[int]
    gather_ids: list[int]


class ModelEngine:
    """Target, draft layers and worker; every buffer is made once, and filled with what was there.

    Args:
        line, model, config: the config gets written into, as hosts do.
        sizes: see `Sizes`.
        factories: of the pieces.
        kv_cache: blocks of all layers, target and draft.
        num_mtp_layers: that the checkpoint is said to have.
        padded_sizes: batch sizes that generation-only batches are padded to, with graph copies of
            the metadata; none: no padding, no copies.
        flash_mla: generations read by a block table of their own.
        attention_dp: ranks exchange their numbers of rows; here there is one rank.
    """

    def __init__(
        self,
        line: Line,
        model: LoadedModel,
        config: DecodingConfig,
        sizes: Sizes,
        kv_cache: KVCacheManager,
        factories: Factories,
        *,
        num_mtp_layers: int,
        padded_sizes: tuple[int, ...] = (),
        flash_mla: bool = False,
        attention_dp: bool = False,
    ) -> None:
        self.line = line
        self.model = model
        self.spec_config = config
        self.sizes = sizes
        self.padded_sizes = sorted(padded_sizes)
        self.model_config = SimpleNamespace(
            vocab_size=model.facts.vocab_size,
            hidden_size=model.facts.hidden_size,
            num_hidden_layers=model.facts.num_hidden_layers,
            torch_dtype=model.lm_head.weight.dtype,
            num_nextn_predict_layers=num_mtp_layers,
        )
        update_spec_config_from_model_config(line, config, num_mtp_layers)
        self.attention_dp = attention_dp
        is_vanilla = config.spec_dec_mode.is_mtp_vanilla()
        kind = MetadataLayer if line.is_newer and not is_vanilla else DeepseekLayer
        self.draft_model = SimpleNamespace(
            mtp_layers=[
                kind(layer, attention_dp=attention_dp)
                for layer in list(model.mtp_layers)[:num_mtp_layers]
            ],
            embed_tokens=model.embed_tokens,
            lm_head=model.lm_head,
        )
        self.pieces: Pieces = build_pieces(line, factories, config, self.model_config, sizes)
        if line.is_newer:
            self.pieces.worker.set_draft_model(self.draft_model)
        # written again without the components knowing
        update_spec_config_from_model_config(line, config, num_mtp_layers)
        self.kv_cache = kv_cache
        pools = PagedKVPools(kv_cache.num_blocks, kv_cache.block_size, fill=1e4)
        self.attn_metadata = AttentionMetadata(
            sizes.max_num_requests, kv_cache, pools, enable_flash_mla=flash_mla
        )
        self.spec_metadata = self.pieces.make_metadata()
        self._graph_metadata: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._dummies: dict[int, LlmRequest] = {}
        # what dummies do not write keeps what other steps have left there
        self._input_ids = torch.full((sizes.max_num_tokens,), 5, dtype=torch.int32)
        drafts = sizes.max_num_requests * config.max_draft_len
        self._draft_tokens = torch.full((drafts,), 7, dtype=torch.int32)
        self.num_padded_steps = 0
        self.num_forwards = 0

    @property
    def max_draft_len(self) -> int:
        return int(self.spec_config.max_draft_len)

    @torch.inference_mode()
    def forward(
        self,
        scheduled: Batch,
        managers: ResourceManager,
        new_tensors_device: Any = None,
        draft_len: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run a batch.

        Args:
            new_tensors_device: of the state before; None in the plain loop, and in the first step.
            draft_len: of the step, where a schedule has chosen it.
        """
        k = self.max_draft_len if draft_len is None else draft_len
        with self._padded(scheduled, managers, k) as batch:
            attn, spec = self._metadata_for(batch, k)
            inputs = self._prepare_inputs(batch, attn, spec, new_tensors_device, k)
            before = _fingerprint(attn)
            outputs = self._run(attn, spec, inputs, managers)
            _check_outputs(outputs, batch, k)
            assert _fingerprint(attn) == before, "the worker has left a trace in the metadata"
            self.num_forwards += 1
            return outputs

    # ---- padding ----

    @contextmanager
    def _padded(self, batch: Batch, managers: ResourceManager, k: int) -> Iterator[Batch]:
        """The same dummy, as often as needed, after the generation requests; removed on exit."""
        missing = 0
        if batch.can_run_cuda_graph:
            larger = [size for size in self.padded_sizes if size >= batch.batch_size]
            missing = larger[0] - batch.batch_size if larger else 0
        if missing == 0:
            yield batch
            return
        self.num_padded_steps += 1
        generations = batch.generation_requests
        generations.extend([self._dummy(managers, k)] * missing)
        try:
            yield batch
        finally:
            del generations[-missing:]

    def _dummy(self, managers: ResourceManager, k: int) -> LlmRequest:
        """The permanent dummy, one per draft length where lines know of them."""
        dummy_id = GRAPH_DUMMY_ID - (k if self.line.is_newer else 0)
        if dummy_id not in self._dummies:
            dummy = self.kv_cache.add_dummy_requests([dummy_id], k)[0]
            dummy.is_cuda_graph_dummy = True
            manager = managers.get_resource_manager(SPEC)
            if manager is not None:
                manager.add_dummy_requests([dummy_id])
            self._dummies[dummy_id] = dummy
        return self._dummies[dummy_id]

    def _metadata_for(self, batch: Batch, k: int) -> tuple[AttentionMetadata, Any]:
        if not (self.padded_sizes and batch.can_run_cuda_graph):
            return self.attn_metadata, self.spec_metadata
        size = batch.batch_size
        if (size, k) not in self._graph_metadata:
            attn = self.attn_metadata.create_cuda_graph_metadata(size, k)
            spec = self.spec_metadata.create_cuda_graph_metadata(size)
            assert spec.is_cuda_graph
            assert spec.max_num_requests == size
            assert spec.create_cuda_graph_metadata(size) is spec
            self._graph_metadata[size, k] = attn, spec
        return self._graph_metadata[size, k]

    # ---- inputs ----

    def _prepare_inputs(
        self, batch: Batch, attn: AttentionMetadata, spec: Any, previous: Any, k: int
    ) -> dict[str, torch.Tensor]:
        if previous is not None:
            # a look-alike would silently be taken for a batch without speculation
            assert isinstance(previous, self.pieces.classes.tensors), type(previous)
        rows = _Rows([], [], [], [], [], [])
        ids: list[int] = []
        for request in batch.context_requests:
            begin = request.context_current_position
            end = begin + request.context_chunk_size
            ids += request.get_tokens(0)[begin:end]
            self._add(rows, request, begin, end - begin, gathers=[len(ids) - 1])
            request.py_batch_idx = request.py_seq_slot
        num_ctx_tokens = len(ids)
        self._input_ids[:num_ctx_tokens] = torch.tensor(ids, dtype=torch.int32)
        position_offsets = torch.zeros(self._num_rows(batch, num_ctx_tokens, k), dtype=torch.int64)
        kv_offsets = torch.zeros(batch.batch_size, dtype=torch.int32)
        place, draft_place, waiting = num_ctx_tokens, 0, False
        for row, request in enumerate(batch.generation_requests, start=len(batch.context_requests)):
            tail = slice(place, place + k + 1)
            drafts = slice(draft_place, draft_place + k)
            length = request.max_beam_num_tokens - 1
            begin = length
            late = (
                previous is not None and not request.is_dummy and request.py_batch_idx is not None
            )
            if late:
                waiting = True
                begin = length + k + 1
                slot = request.py_batch_idx
                following = previous.new_tokens[: k + 1].transpose(0, 1)[slot].flatten()
                self._input_ids[tail] = following
                self._draft_tokens[drafts] = previous.next_draft_tokens[slot, :k]
                position_offsets[tail] = previous.new_tokens_lens[slot].long()
                kv_offsets[row] = previous.new_tokens_lens[slot] - (k + 1)
            elif request.is_dummy:
                pass  # what is there is read
            else:
                assert not waiting, (
                    "a generation request without last results follows those that have them"
                )
                assert draft_length(request) == k, (request.request_id, request.py_draft_tokens, k)
                reported = [request.get_last_tokens(0), *request.py_draft_tokens]
                self._input_ids[tail] = torch.tensor(reported, dtype=torch.int32)
                self._draft_tokens[drafts] = torch.tensor(request.py_draft_tokens).int()
            self._add(rows, request, begin, k + 1, range(place, place + k + 1), positions=length)
            request.py_batch_idx = request.py_seq_slot
            place, draft_place = place + k + 1, draft_place + k
        self._fill_metadata(batch, attn, spec, rows, k, draft_place)
        positions = torch.tensor(rows.position_ids) + position_offsets
        attn.kv_lens_cuda[: attn.num_seqs] += kv_offsets
        attn.on_update_kv_lens()
        input_ids = self._input_ids[:place]
        assert int(input_ids.min()) >= 0, "a negative id on its way to the embedding"
        return {"input_ids": input_ids, "position_ids": positions.unsqueeze(0)}

    @staticmethod
    def _num_rows(batch: Batch, num_ctx_tokens: int, k: int) -> int:
        return num_ctx_tokens + len(batch.generation_requests) * (k + 1)

    @staticmethod
    def _add(
        rows: _Rows,
        request: LlmRequest,
        num_cached: int,
        num_rows: int,
        gathers: Any,
        positions: int | None = None,
    ) -> None:
        first = num_cached if positions is None else positions
        rows.request_ids.append(request.py_request_id)
        rows.prompt_lens.append(request.py_prompt_len)
        rows.num_cached.append(num_cached)
        rows.seq_lens.append(num_rows)
        rows.position_ids += range(first, first + num_rows)
        rows.gather_ids += gathers

    def _fill_metadata(
        self,
        batch: Batch,
        attn: AttentionMetadata,
        spec: Any,
        rows: _Rows,
        k: int,
        num_drafts: int,
    ) -> None:
        attn.request_ids = list(rows.request_ids)
        attn.prompt_lens = rows.prompt_lens
        attn.kv_cache_params.num_cached_tokens_per_seq = rows.num_cached
        attn.kv_cache_params.num_extra_kv_tokens = self.kv_cache.num_extra_kv_tokens
        attn.num_contexts = 0
        if attn.is_cuda_graph:
            assert attn.seq_lens.tolist() == rows.seq_lens, "a graph's lengths were changed"
        else:
            attn.seq_lens = torch.tensor(rows.seq_lens, dtype=torch.int32)
        attn.num_contexts = len(batch.context_requests)
        attn.prepare()
        spec.draft_tokens = self._draft_tokens[:num_drafts]
        spec.request_ids = rows.request_ids
        spec.gather_ids = torch.tensor(rows.gather_ids, dtype=torch.int32)
        spec.num_generations = len(batch.generation_requests)
        spec.num_tokens = sum(rows.seq_lens)
        spec.seq_lens = rows.seq_lens
        requests = batch.all_requests()
        if self.line.is_newer:
            spec.runtime_draft_len = k
            spec.runtime_tokens_per_gen_step = k + 1
            spec.update_is_all_greedy_sample(requests)
            if self.line.is_newest:
                following = [_token_after(request) for request in batch.context_requests]
                spec.populate_context_prompt_lookahead(following)
            spec.populate_sampling_params_for_one_model(requests)
        reported = spec.dp_num_tokens() if self.line.is_newest else None
        spec.prepare()
        if self.attention_dp:
            attn.all_rank_num_tokens = [sum(rows.seq_lens)]
            spec.all_rank_num_tokens = [spec.num_tokens if reported is None else reported]
            spec.all_rank_num_seqs = [len(rows.seq_lens)]
            if spec.spec_dec_mode.is_mtp_eagle_one_model():
                spec.subseq_all_rank_num_tokens = spec.all_rank_num_seqs
        if self.line.is_newer:
            spec.write_padding_onehot_draft_probs([], k)

    # ---- the model ----

    def _run(
        self,
        attn: AttentionMetadata,
        spec: Any,
        inputs: dict[str, torch.Tensor],
        managers: ResourceManager,
    ) -> dict[str, torch.Tensor]:
        hidden = self.model.forward_target(inputs["input_ids"], inputs["position_ids"], attn)
        logits = self.model.lm_head(hidden[spec.gather_ids])
        kept = logits.clone()
        extra = {"resource_manager": managers} if self.line.is_newer else {}
        with _prepared_once(spec):
            outputs: dict[str, torch.Tensor] = self.pieces.worker(
                **inputs,
                hidden_states=hidden,
                logits=logits,
                attn_metadata=attn,
                spec_metadata=spec,
                draft_model=self.draft_model,
                **extra,
            )
        assert torch.equal(outputs["logits"], kept), "the target's logits were changed"
        return outputs


def _token_after(request: LlmRequest) -> int:
    """The prompt token after a context's chunk; -1 where the chunk ends the prompt."""
    if request.is_last_context_chunk:
        return -1
    return request.get_tokens(0)[request.context_current_position + request.context_chunk_size]


@contextmanager
def _prepared_once(spec: Any) -> Iterator[None]:
    """The host has prepared; a piece that prepares again counts tokens twice."""

    def again() -> None:
        raise AssertionError("prepare() was called a second time in this forward")

    spec.prepare = again
    try:
        yield
    finally:
        del spec.prepare


def _fingerprint(attn: AttentionMetadata) -> list[Any]:
    """Everything that a worker may change, by value and by address."""
    reported: list[Any] = [attn.num_contexts, attn.num_ctx_tokens, attn.num_generations]
    reported.append(list(attn.kv_cache_params.num_cached_tokens_per_seq))
    for name, value in sorted(vars(attn).items()):
        if isinstance(value, torch.Tensor):
            reported.append((name, value.data_ptr(), value.tolist()))
    return reported


def _check_outputs(outputs: dict[str, torch.Tensor], batch: Batch, k: int) -> None:
    size = batch.batch_size
    shapes = {
        "new_tokens": (size, k + 1),
        "new_tokens_lens": (size,),
        "next_draft_tokens": (size, k),
        "next_new_tokens": (size, k + 1),
    }
    for name, shape in shapes.items():
        assert outputs[name].shape == shape, (name, outputs[name].shape, shape)
        assert outputs[name].dtype == torch.int32, name
    lens = outputs["new_tokens_lens"].tolist()
    for request, count in zip(batch.context_requests, lens, strict=False):
        # unused for an unfinished prompt
        assert count == 1 or not request.is_last_context_chunk, (request.request_id, count)
    # padding shows a graph's rows, of which no line may be without a token
    assert all(1 <= count <= k + 1 for count in lens[len(batch.context_requests) :]), lens


def warm_up(engine: ModelEngine, managers: ResourceManager) -> None:
    """Dummies with ids from 0 on, as prompts and as generations, before any request is there."""
    spec = managers.get_resource_manager(SPEC)
    ids = list(range(engine.sizes.max_num_requests))
    for is_gen in (False, True):
        dummies = engine.kv_cache.add_dummy_requests(ids, engine.max_draft_len, is_gen=is_gen)
        if spec is not None:
            spec.add_dummy_requests(ids)
        contexts = [] if is_gen else dummies
        batch = batch_of(engine.line, contexts, dummies if is_gen else [])
        engine.forward(batch, managers)
        for dummy in dummies:
            dummy.state = LlmRequestState.GENERATION_COMPLETE
            managers.free_resources(dummy)

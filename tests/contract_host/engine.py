"""One forward as the host makes it: inputs from host lists or from the state before, then the
target and the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.hosts.embedded.models import LoadedModel
from tests.contract_host.behaviours import (
    GRAPH_DUMMY_ID,
    DecodingConfig,
    update_spec_config_from_model_config,
)
from tests.contract_host.installed import Sizes, build_components
from tests.contract_host.kv_cache import KVCacheManager, ResourceManager
from tests.contract_host.line_rules import Line
from tests.contract_host.metadata import AttentionMetadata
from tests.contract_host.requests import COMPLETE, LlmRequest, make_batch

SPEC = "spec_resource_manager"
LAYER_INPUTS = {"input_ids", "position_ids", "hidden_states", "embed_tokens", "attn_metadata"}


class DeepseekLayer:
    """As DeepSeek's MTP layer of July 2025 and later: what it does not name goes to attention.

    The eagle worker of 1.3 passes ``spec_metadata`` to every layer.
    """

    def __init__(self, layer: Any, *, attention_dp: bool, takes_metadata: bool) -> None:
        self.layer = layer
        self.shared_head = layer.shared_head
        self.attention_dp = attention_dp
        self.takes_metadata = takes_metadata

    def __call__(self, *, all_rank_num_tokens: list[int] | None = None, **inputs: Any) -> Any:
        rows = [len(inputs["input_ids"])] if self.attention_dp else None
        assert all_rank_num_tokens == rows, (
            f"ranks were given {all_rank_num_tokens} rows of this one, expected {rows}"
        )
        if self.takes_metadata:
            assert inputs.pop("spec_metadata").request_ids is not None
        assert inputs.keys() == LAYER_INPUTS
        return self.layer(**inputs)


class _Rows(NamedTuple):
    """What the host lists say of a request of a step."""

    request: LlmRequest
    num_cached: int
    seq_len: int
    first_position: int
    gathers: list[int]


class ModelEngine:
    """Target, draft layers and worker; every buffer is made once, and filled with what was there.

    Args:
        line, model, config: the config gets written into, as hosts do.
        sizes: see `Sizes`.
        kv_cache: blocks of all layers, target and draft.
        num_mtp_layers: that the checkpoint is said to have.
        padded_sizes: batch sizes that generation-only batches are padded to, with graph copies of
            the metadata; none: no padding, no copies.
        attention_dp: ranks exchange their numbers of rows; here there is one rank.
    """

    def __init__(
        self,
        line: Line,
        model: LoadedModel,
        config: DecodingConfig,
        sizes: Sizes,
        kv_cache: KVCacheManager,
        *,
        num_mtp_layers: int,
        padded_sizes: tuple[int, ...],
        attention_dp: bool,
    ) -> None:
        self.line = line
        self.model = model
        self.spec_config = config
        self.sizes = sizes
        self.padded_sizes = padded_sizes
        self.attention_dp = attention_dp
        model_config = SimpleNamespace(
            vocab_size=model.facts.vocab_size,
            hidden_size=model.facts.hidden_size,
            num_hidden_layers=model.facts.num_hidden_layers,
            torch_dtype=model.lm_head.weight.dtype,
            num_nextn_predict_layers=num_mtp_layers,
        )
        update_spec_config_from_model_config(line, config, num_mtp_layers)
        takes_metadata = line.is_newer and not config.spec_dec_mode.is_mtp_vanilla()
        self.draft_model = SimpleNamespace(
            mtp_layers=[
                DeepseekLayer(layer, attention_dp=attention_dp, takes_metadata=takes_metadata)
                for layer in list(model.mtp_layers)[:num_mtp_layers]
            ],
            embed_tokens=model.embed_tokens,
            lm_head=model.lm_head,
        )
        self.components = build_components(line, config, model_config, sizes)
        if line.is_newer:
            self.components.worker.set_draft_model(self.draft_model)
        # written again without the components knowing
        update_spec_config_from_model_config(line, config, num_mtp_layers)
        self.kv_cache = kv_cache
        pools = PagedKVPools(kv_cache.num_blocks, kv_cache.block_size, fill=1e4)
        self.attn_metadata = AttentionMetadata(sizes.max_num_requests, kv_cache, pools)
        self.graph_metadata: dict[tuple[int, int], tuple[AttentionMetadata, Any]] = {}
        self.dummies: dict[int, LlmRequest] = {}
        # what dummies do not write keeps what other steps have left there
        self._input_ids = torch.full((sizes.max_num_tokens,), 5, dtype=torch.int32)
        drafts = sizes.max_num_requests * self.max_draft_len
        self._draft_tokens = torch.full((drafts,), 7, dtype=torch.int32)
        self.num_padded_steps = self.num_forwards = 0

    @property
    def max_draft_len(self) -> int:
        return int(self.spec_config.max_draft_len or 0)

    @torch.inference_mode()
    def forward(
        self, scheduled: Any, managers: ResourceManager, previous: Any, k: int
    ) -> dict[str, torch.Tensor]:
        """Run a batch.

        Args:
            previous: tensors of the state before; None in the plain loop, and in the first step.
            k: draft length of the step.
        """
        with self._padded(scheduled, managers, k) as batch:
            attn, spec = self._metadata_for(batch, k)
            inputs = self._prepare_inputs(batch, attn, spec, previous, k)
            before = _fingerprint(attn)
            outputs = self._run(attn, spec, inputs, managers)
            _check_outputs(outputs, batch, k)
            assert _fingerprint(attn) == before, "the worker has left a trace in the metadata"
            self.num_forwards += 1
            return outputs

    # ---- padding ----

    @contextmanager
    def _padded(self, batch: Any, managers: ResourceManager, k: int) -> Iterator[Any]:
        """The same dummy, as often as needed, after the generation requests; removed on exit."""
        generations = batch.generation_requests
        larger = [size for size in self.padded_sizes if size >= len(generations)]
        missing = larger[0] - len(generations) if larger and not batch.context_requests else 0
        self.num_padded_steps += missing > 0
        generations += [self._dummy(managers, k) for _ in range(missing)]
        try:
            yield batch
        finally:
            del generations[len(generations) - missing :]

    def _dummy(self, managers: ResourceManager, k: int) -> LlmRequest:
        """The permanent dummy, one per draft length where lines know of them."""
        dummy_id = GRAPH_DUMMY_ID - (k if self.line.is_newer else 0)
        if dummy_id not in self.dummies:
            dummy = self.dummies[dummy_id] = self.kv_cache.add_dummy_requests([dummy_id], k)[0]
            dummy.is_cuda_graph_dummy = True
            managers.get_resource_manager(SPEC).add_dummy_requests([dummy_id])
        return self.dummies[dummy_id]

    def _metadata_for(self, batch: Any, k: int) -> tuple[AttentionMetadata, Any]:
        if not self.padded_sizes or batch.context_requests:
            return self.attn_metadata, self.components.metadata
        size = len(batch.generation_requests)
        if (size, k) not in self.graph_metadata:
            spec = self.components.metadata.create_cuda_graph_metadata(size)
            assert spec.is_cuda_graph
            assert spec.max_num_requests == size
            assert spec.create_cuda_graph_metadata(size) is spec
            attn = self.attn_metadata.create_cuda_graph_metadata(size, k)
            self.graph_metadata[size, k] = attn, spec
        return self.graph_metadata[size, k]

    # ---- inputs ----

    def _prepare_inputs(
        self, batch: Any, attn: AttentionMetadata, spec: Any, previous: Any, k: int
    ) -> dict[str, torch.Tensor]:
        # a look-alike would silently be taken for a batch without speculation
        tensors = self.components.classes.tensors
        assert previous is None or isinstance(previous, tensors), type(previous)
        rows, ids, num_contexts = list[_Rows](), list[int](), len(batch.context_requests)
        for request in batch.context_requests:
            begin, length = request.context_current_position, request.context_chunk_size
            ids += request.get_tokens(0)[begin : begin + length]
            rows.append(_Rows(request, begin, length, begin, [len(ids) - 1]))
        place, num_seqs = len(ids), num_contexts + len(batch.generation_requests)
        self._input_ids[:place] = torch.tensor(ids, dtype=torch.int32)
        position_offsets = torch.zeros(place + (num_seqs - num_contexts) * (k + 1)).long()
        kv_offsets = torch.zeros(num_seqs, dtype=torch.int32)
        follows_late = False
        for row, request in enumerate(batch.generation_requests, start=num_contexts):
            tail = slice(place, place + k + 1)
            drafts = slice((row - num_contexts) * k, (row - num_contexts + 1) * k)
            begin = length = request.get_num_tokens(0) - 1
            slot = request.py_batch_idx
            if previous is not None and not request.is_dummy and slot is not None:
                follows_late = True
                begin = length + k + 1
                following = previous.new_tokens[: k + 1].transpose(0, 1)[slot].flatten()
                self._input_ids[tail] = following
                self._draft_tokens[drafts] = previous.next_draft_tokens[slot, :k]
                position_offsets[tail] = previous.new_tokens_lens[slot].long()
                kv_offsets[row] = previous.new_tokens_lens[slot] - (k + 1)
            elif not request.is_dummy:  # of a dummy, what is there is read
                assert not follows_late, "a request without last results follows those with them"
                given = request.py_draft_tokens
                assert len(given) == k, (request.request_id, given, k)
                self._input_ids[tail] = torch.tensor([request.get_tokens(0)[-1], *given]).int()
                self._draft_tokens[drafts] = torch.tensor(given).int()
            rows.append(_Rows(request, begin, k + 1, length, list(range(place, place + k + 1))))
            place += k + 1
        for request in batch.all_requests():
            request.py_batch_idx = request.py_seq_slot
        self._fill_metadata(batch, attn, spec, rows, k)
        attn.kv_lens_cuda[:num_seqs] += kv_offsets
        attn.on_update_kv_lens()
        input_ids = self._input_ids[:place]
        assert int(input_ids.min()) >= 0, "a negative id on its way to the embedding"
        ranges = [torch.arange(each.seq_len) + each.first_position for each in rows]
        return {
            "input_ids": input_ids,
            "position_ids": (torch.cat(ranges) + position_offsets).unsqueeze(0),
        }

    def _fill_metadata(
        self, batch: Any, attn: AttentionMetadata, spec: Any, rows: list[_Rows], k: int
    ) -> None:
        num_generations, lens = len(batch.generation_requests), [each.seq_len for each in rows]
        attn.request_ids = [each.request.py_request_id for each in rows]
        attn.prompt_lens = [each.request.py_prompt_len for each in rows]
        attn.kv_cache_params.num_cached_tokens_per_seq = [each.num_cached for each in rows]
        attn.kv_cache_params.num_extra_kv_tokens = self.kv_cache.num_extra_kv_tokens
        attn.num_contexts = 0
        if attn.is_cuda_graph:
            assert attn.seq_lens.tolist() == lens, "a graph's lengths were changed"
        else:
            attn.seq_lens = torch.tensor(lens, dtype=torch.int32)
        attn.num_contexts = len(batch.context_requests)
        attn.prepare()
        requests = batch.all_requests()
        spec.draft_tokens = self._draft_tokens[: num_generations * k]
        spec.request_ids = list(attn.request_ids)
        gathers = [row for each in rows for row in each.gathers]
        spec.gather_ids = torch.tensor(gathers, dtype=torch.int32)
        spec.num_generations, spec.num_tokens, spec.seq_lens = num_generations, sum(lens), lens
        if self.line.is_newer:
            spec.runtime_draft_len, spec.runtime_tokens_per_gen_step = k, k + 1
            spec.update_is_all_greedy_sample(requests)
            spec.populate_sampling_params_for_one_model(requests)
        if self.line.is_newest:
            spec.populate_context_prompt_lookahead(
                [_token_after(r) for r in batch.context_requests]
            )
        reported = spec.dp_num_tokens() if self.line.is_newest else None
        spec.prepare()
        if self.attention_dp:
            attn.all_rank_num_tokens = [sum(lens)]
            spec.all_rank_num_tokens = [spec.num_tokens if reported is None else reported]
            spec.all_rank_num_seqs = [len(lens)]
            if spec.spec_dec_mode.is_mtp_eagle_one_model():
                spec.subseq_all_rank_num_tokens = spec.all_rank_num_seqs
        if self.line.is_newer:
            spec.write_padding_onehot_draft_probs([], k)

    # ---- the model ----

    def _run(
        self, attn: AttentionMetadata, spec: Any, inputs: dict[str, Any], managers: ResourceManager
    ) -> dict[str, torch.Tensor]:
        hidden = self.model.forward_target(inputs["input_ids"], inputs["position_ids"], attn)
        logits = self.model.lm_head(hidden[spec.gather_ids])
        kept = logits.clone()
        extra = {"resource_manager": managers} if self.line.is_newer else {}

        def again() -> None:
            raise AssertionError("prepare() was called a second time in this forward")

        spec.prepare = again  # a second time would count tokens twice
        try:
            outputs: dict[str, torch.Tensor] = self.components.worker(
                **inputs,
                hidden_states=hidden,
                logits=logits,
                attn_metadata=attn,
                spec_metadata=spec,
                draft_model=self.draft_model,
                **extra,
            )
        finally:
            del spec.prepare
        assert torch.equal(outputs["logits"], kept), "the target's logits were changed"
        return outputs


def _token_after(request: LlmRequest) -> int:
    """The prompt token after a context's chunk; -1 where the chunk ends the prompt."""
    if request.is_last_context_chunk:
        return -1
    return request.get_tokens(0)[request.context_current_position + request.context_chunk_size]


def _fingerprint(attn: AttentionMetadata) -> list[Any]:
    """Everything that a worker may change, by value and by address."""
    tensors = [(n, v) for n, v in sorted(vars(attn).items()) if isinstance(v, torch.Tensor)]
    counts = [attn.num_contexts, attn.num_ctx_tokens, attn.num_generations]
    cached = list(attn.kv_cache_params.num_cached_tokens_per_seq)
    return [counts, cached, [(name, v.data_ptr(), v.tolist()) for name, v in tensors]]


def _check_outputs(outputs: dict[str, torch.Tensor], batch: Any, k: int) -> None:
    size, num_contexts = len(batch.all_requests()), len(batch.context_requests)
    shapes = {"new_tokens": (size, k + 1), "new_tokens_lens": (size,)}
    shapes |= {"next_draft_tokens": (size, k), "next_new_tokens": (size, k + 1)}
    for name, shape in shapes.items():
        assert outputs[name].shape == shape, (name, outputs[name].shape, shape)
        assert outputs[name].dtype == torch.int32, name
    lens = outputs["new_tokens_lens"].tolist()
    for request, count in zip(batch.context_requests, lens, strict=False):
        # unused for an unfinished prompt
        assert count == 1 or not request.is_last_context_chunk, (request.request_id, count)
    # padding shows a graph's rows, of which no line may be without a token
    assert all(1 <= count <= k + 1 for count in lens[num_contexts:]), lens


def warm_up(engine: ModelEngine, managers: ResourceManager) -> None:
    """Dummies with ids from 0 on, as prompts and as generations, before any request is there."""
    ids, k = list(range(engine.sizes.max_num_requests)), engine.max_draft_len
    for is_gen in (False, True):
        dummies = engine.kv_cache.add_dummy_requests(ids, k, is_gen=is_gen)
        managers.get_resource_manager(SPEC).add_dummy_requests(ids)
        split = ([], dummies) if is_gen else (dummies, [])
        engine.forward(make_batch(engine.line.name, *split), managers, None, k)
        for dummy in dummies:
            dummy.state = COMPLETE
            managers.free_resources(dummy)

"""The Python API: a model, a config, and prompts in; text, steps or a stream out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtp_plugin.config import LLMConfig, load_config, parse_config
from mtp_plugin.errors import ConfigError, ExecutorError
from mtp_plugin.executor import collector_freeze
from mtp_plugin.executor.admission import Admission
from mtp_plugin.executor.async_steps import AsyncSteps
from mtp_plugin.executor.attention import (
    SDPA_BACKEND,
    AttentionBackend,
    HeadShape,
    PagedAttentionMetadata,
    select_backend,
)
from mtp_plugin.executor.cuda_graphs import captured_sizes, padded_sizes
from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.kv_cache import BlockManager, PagedKVPools
from mtp_plugin.executor.kv_cache.sizing import bytes_per_token, num_kv_blocks
from mtp_plugin.executor.memory_line import memory_line
from mtp_plugin.executor.model_engine import ModelEngine
from mtp_plugin.executor.models import LoadedModel, fuse, load_model, read_facts
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.py_executor import PyExecutor, StepEvent
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.executor.resolved_config import (
    check_budget,
    check_graphs,
    check_model,
    resolve_device,
    resolve_dtype,
    resolve_fusing,
    resolve_max_seq_len,
)
from mtp_plugin.executor.resources import ResourceManagers, SeqSlotManager
from mtp_plugin.executor.scheduler import ChunkPolicy, Scheduler, whole_budget
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.prompts import Prompt
from mtp_plugin.requests.tokenizer import encode, load_tokenizer
from mtp_plugin.speculative.host import ResourceManager
from mtp_plugin.speculative.plugin import HostFacts, find_plugin

THIN_MODEL_WIDTH = 512
"""Hidden size up to which a CPU runs a model on one thread: more of them wait for each other longer
than they compute. ``OMP_NUM_THREADS`` in the environment overrides it."""

Progress = Callable[[str], None]


class LLM:
    """An embedded executor around one checkpoint.

    Args:
        config: an ``LLMConfig``, a mapping with its keys, or the path of a YAML file.
        model: an already loaded model to share; default: loaded from ``config.model``.
        tokenizer: with ``encode`` and ``decode``; default: the checkpoint's, where it has one.
        on_progress: called with a line of text as loading goes on.
        chunk_policy: how long prompt chunks are; default: as long as the token budget allows.
        kv_fill: initial value of the KV pools (tests fill them with NaN).

    Raises:
        ConfigError: an option that cannot be, or not on this checkpoint or device; of a YAML file
            with its path in front.
        CheckpointError, PluginError: before any weight is loaded.
        MTPPluginError: a tokenizer that does not load.
    """

    def __init__(
        self,
        config: LLMConfig | Mapping[str, Any] | str | Path,
        *,
        model: LoadedModel | None = None,
        tokenizer: Any = None,
        on_progress: Progress | None = None,
        chunk_policy: ChunkPolicy = whole_budget,
        kv_fill: float = 0.0,
    ) -> None:
        self.config = _as_config(config)
        self._thaw: Callable[[], Any] = lambda: None
        try:
            self._set_up(model, tokenizer, on_progress, chunk_policy, kv_fill)
        except ConfigError as error:
            if isinstance(config, (str, Path)):
                raise ConfigError(f"{config}: {error}") from error
            raise

    def _set_up(
        self,
        model: LoadedModel | None,
        tokenizer: Any,
        on_progress: Progress | None,
        chunk_policy: ChunkPolicy,
        kv_fill: float,
    ) -> None:
        report = on_progress or (lambda _: None)
        report("reading the checkpoint's config")
        facts = read_facts(self.config.model) if model is None else model.facts
        self.config = self.config.resolve(facts.num_mtp_layers)
        speculative = self.config.speculative_config
        plugin = find_plugin(None if speculative is None else speculative.decoding_type)
        plan = plugin.plan(speculative, facts.num_mtp_layers)
        check_budget(self.config, plan)
        if chunk_policy is not whole_budget and not self.config.enable_chunked_prefill:
            raise ConfigError("chunk_policy: enable_chunked_prefill is false, so there is none")
        self.device = resolve_device(self.config.device)
        check_graphs(self.config, self.device, report)
        self.max_seq_len = resolve_max_seq_len(self.config, facts.max_position_embeddings)
        if model is None:
            report("loading weights")
            model = load_model(
                self.config.model,
                dtype=resolve_dtype(self.config.dtype, facts.dtype, self.device),
                device=self.device,
                attn_implementation=SDPA_BACKEND,
                num_mtp_layers=plan.num_draft_layers,
            )
            if resolve_fusing(self.config, self.device):
                model = fuse(model)
                report(str(model.report))
        elif len(model.mtp_layers) < plan.num_draft_layers:
            raise ConfigError(
                f"the loaded model has {len(model.mtp_layers)} MTP layers, this config needs "
                f"{plan.num_draft_layers}"
            )
        check_model(self.config, model, self.device)
        self.attn_backend = select_backend(
            self.config.attn_backend, HeadShape.of(model.target.config), self.device
        )
        model.set_attn_implementation(self.attn_backend.attention_function)
        self.model = model
        thin = self.device.type == "cpu" and facts.hidden_size <= THIN_MODEL_WIDTH
        if thin and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        if tokenizer is None and (Path(self.config.model) / "tokenizer.json").is_file():
            report("loading the tokenizer")
            tokenizer = load_tokenizer(self.config.model)
        self.tokenizer = tokenizer
        batch_size = self.config.max_batch_size
        host = HostFacts(
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            dtype=model.lm_head.weight.dtype,  # type: ignore[arg-type]
            device=self.device,
            max_batch_size=batch_size,
            max_num_sequences=2 * batch_size,
            max_seq_len=self.max_seq_len,
            chain=model.traits.chain,
            encode=(
                partial(encode, tokenizer, add_special_tokens=False)
                if tokenizer is not None
                else None
            ),
        )
        pieces = plugin.build(speculative, plan, host)
        self.pieces = pieces
        # before the KV cache is sized, which takes of the memory that is left
        draft_head = None
        if pieces.draft_vocab_ids is not None:
            report(f"cutting the draft head to {len(pieces.draft_vocab_ids)} ids")
            draft_head = model.draft_head(pieces.draft_vocab_ids)
        report("allocating the KV cache")
        write_one_token = partial(_write_one_token, model, self.attn_backend, plan.num_draft_layers)
        token_bytes = partial(bytes_per_token, write_one_token)
        num_blocks = num_kv_blocks(
            self.config, self.device, max_seq_len=self.max_seq_len, token_bytes=token_bytes
        )
        blocks = BlockManager(num_blocks, self.config.kv_cache_config.tokens_per_block)
        self.blocks = blocks
        self.pools = PagedKVPools(blocks.num_blocks, blocks.block_size, fill=kv_fill)
        engine = ModelEngine(
            model,
            pieces,
            blocks,
            self.pools,
            max_seq_len=self.max_seq_len,
            max_batch_size=batch_size,
            padded_sizes=padded_sizes(self.config),
            check_metadata=bool(
                getattr(getattr(speculative, "mtp", None), "check_metadata", False)
            ),
            attn_backend=self.attn_backend,
            draft_head=draft_head,
        )
        if self.config.cuda_graph_config is not None and self.device.type == "cuda":
            model.keep_experts_on_device()
            engine.capture(captured_sizes(self.config), report)
        if on_progress is not None:
            report(memory_line(engine, token_bytes))
        scheduler = Scheduler(
            plan,
            blocks,
            max_batch_size=batch_size,
            max_num_tokens=self.config.max_num_tokens,
            chunk_policy=chunk_policy,
            chunking=self.config.enable_chunked_prefill,
        )
        managers: dict[str, ResourceManager] = {}
        if pieces.manager is not None:
            managers["spec_resource_manager"] = pieces.manager
        self.seq_slots = SeqSlotManager(host.max_num_sequences)
        managers["seq_slot_manager"] = self.seq_slots
        managers["kv_cache_manager"] = blocks
        self.executor = PyExecutor(
            engine,
            scheduler,
            pieces.sampler,
            ResourceManagers(managers),
            overlap=not self.config.disable_overlap_scheduler,
        )
        self._admission = Admission(
            self.executor, facts, pieces, tokenizer=tokenizer, max_seq_len=self.max_seq_len
        )
        self._dispatcher = Dispatcher(self.executor)
        self._async_steps = AsyncSteps(self._dispatcher)
        if self.device.type == "cuda":
            self._thaw = collector_freeze.of_process.hold(self)
        report("ready")

    # ---- use --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs come in the prompts' order.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
        """
        requests = self._admission.make_batch(prompts, sampling_params)
        for _ in self._run(requests):
            pass
        return [RequestOutput.of(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[list[StepEvent]]:
        """The events of every executor step; an event carries 0 to K+1 tokens of one request.

        Request ids number the prompts in order, counted on over the life of the object. Closing the
        iterator cancels what is unfinished and gives its resources back. Other calls may run
        between two steps; what they make this one's requests gain comes with its next steps.
        """
        return self._run(self._admission.make_batch(prompts, sampling_params))

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StepEvent]:
        """The events of one request; many may run at a time and share the batch.

        Leaving the iteration early cancels the request.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
        """
        (request,) = self._admission.make_batch([prompt], sampling_params)
        return self._async_steps.run(request)

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> tuple[list[int], str]:
        """Token ids and text of one prompt, run beside others.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the request ended with an error.
        """
        (request,) = self._admission.make_batch([prompt], sampling_params)
        ids: list[int] = []
        text = ""
        async for event in self._async_steps.run(request):
            ids += event.token_ids
            text += event.text
        if request.error is not None:
            raise ExecutorError(f"request {request.request_id}: {request.error}")
        return ids, text

    def shutdown(self) -> None:
        """Cancel everything and give every resource back, with the memory of KV cache and graphs;
        who waits for a request gets an error."""
        self._dispatcher.shutdown()
        self._thaw()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- requests ---------------------------------------------------------------------------

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """A request that passed admission, not yet enqueued.

        Raises:
            RequestError: naming every reason.
        """
        return self._admission.make_request(prompt, params)

    def make_requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Requests that passed admission and fit, not yet enqueued.

        Raises:
            RequestError: naming every reason, and among several the prompt's place.
        """
        return self._admission.make_requests(prompts, params)

    def _run(self, requests: list[LlmRequest]) -> Iterator[list[StepEvent]]:
        arrived: deque[StepResults] = deque()
        self._dispatcher.start(requests, arrived.append)
        try:
            while self._dispatcher.holds(requests) or arrived:
                if arrived:
                    yield events_of(arrived.popleft())
                else:
                    self._dispatcher.advance()
        finally:
            self._dispatcher.abort(requests)


@torch.inference_mode()
def _write_one_token(
    model: LoadedModel, attn_backend: AttentionBackend, num_draft_layers: int, pools: PagedKVPools
) -> None:
    """Run one token through the target and every draft layer, over a pool of one block."""
    device = next(model.lm_head.parameters()).device
    one = torch.ones(1, dtype=torch.int32, device=device)
    metadata = PagedAttentionMetadata(
        seq_lens=torch.ones(1, dtype=torch.int32),
        kv_lens=one,
        num_contexts=1,
        num_cached_tokens_per_seq=[0],
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        kv_write_limit=one.clone(),
        kv_capacity=one.clone(),
        pools=pools,
        backend=attn_backend,
    )
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
    states = model.forward_target(ids, positions, metadata)
    for layer in list(model.mtp_layers)[:num_draft_layers]:
        layer(
            embed_tokens=model.embed_tokens,
            input_ids=ids,
            position_ids=positions,
            hidden_states=states,
            attn_metadata=metadata,
        )


def _as_config(config: LLMConfig | Mapping[str, Any] | str | Path) -> LLMConfig:
    if isinstance(config, LLMConfig):
        return config
    if isinstance(config, Mapping):
        return parse_config(config)
    return load_config(config)

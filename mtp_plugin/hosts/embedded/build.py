"""Build an executor from a config: model, components, KV cache, graphs, loop."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.hosts.embedded.attention import (
    AttentionBackend,
    AttentionLease,
    HeadShape,
    PagedAttentionMetadata,
    select_backend,
)
from mtp_plugin.hosts.embedded.cuda_graphs import (
    captured_sizes,
    generation_shapes,
    graph_bytes,
    padded_sizes,
)
from mtp_plugin.hosts.embedded.kv_cache import BlockManager, PagedKVPools
from mtp_plugin.hosts.embedded.kv_cache.sizing import (
    available_bytes,
    bytes_per_token,
    num_kv_blocks,
    probe_pools,
    total_bytes,
)
from mtp_plugin.hosts.embedded.memory import (
    check_requests,
    memory_line,
    shortage_named,
    token_bytes,
)
from mtp_plugin.hosts.embedded.model_engine import ModelEngine, StepLimits
from mtp_plugin.hosts.embedded.models import (
    LoadedModel,
    fuse,
    load_model,
    read_config,
    read_tokenizer,
    unread_tokenizer,
)
from mtp_plugin.hosts.embedded.progress import Progress
from mtp_plugin.hosts.embedded.prompt_steps import prompt_shapes, prompt_token_sizes
from mtp_plugin.hosts.embedded.py_executor import PyExecutor
from mtp_plugin.hosts.embedded.resolved_config import (
    ResolvedConfig,
    check_model,
    resolve_config,
    resolve_dtype,
    resolve_fusing,
)
from mtp_plugin.hosts.embedded.resources import ResourceManagers, SeqSlotManager
from mtp_plugin.hosts.embedded.row_table import StepShape
from mtp_plugin.hosts.embedded.scheduler import ChunkPolicy, Scheduler, whole_budget
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.host import ResourceManager
from mtp_plugin.speculative.plugin import HostFacts, SpeculativePieces, build_pieces

THIN_MODEL_WIDTH = 512
"""Models of at most this hidden size run on one CPU thread: with more, synchronization takes longer
than the computation. ``OMP_NUM_THREADS`` in the environment overrides it."""

HIGHEST_FILL = torch.finfo(torch.float16).max
"""Largest finite fill of KV pools, which every dtype can represent."""


@dataclass(frozen=True)
class BuiltExecutor:
    """An executor and its components."""

    executor: PyExecutor
    config: LLMConfig
    """With the draft length of the checkpoint if the file names none."""
    device: torch.device
    max_seq_len: int
    """Maximum number of tokens of a request."""
    model: LoadedModel
    tokenizer: Any
    """None: prompts are token ids."""
    attn_backend: AttentionBackend
    pieces: SpeculativePieces
    blocks: BlockManager
    pools: PagedKVPools
    seq_slots: SeqSlotManager


def build_executor(
    config: LLMConfig,
    *,
    model: LoadedModel | None = None,
    tokenizer: Any = None,
    on_progress: Progress | None = None,
    chunk_policy: ChunkPolicy = whole_budget,
    kv_fill: float = 0.0,
) -> BuiltExecutor:
    """Load the model and tokenizer if they are not given, and build an executor.

    For arguments and errors see `mtp_plugin.hosts.embedded.llm.LLM`.
    """
    _check_arguments(tokenizer, chunk_policy, kv_fill)
    report = on_progress or (lambda _: None)
    report("reading the checkpoint's config")
    checked = None
    if model is not None:
        facts = model.facts
    else:
        checked = read_config(config.model)
        facts = checked.facts
    resolved = resolve_config(config, facts, report)
    check_requests(resolved, dtype=None if model is None else _dtype_of(model))
    if chunk_policy is not whole_budget and not config.enable_chunked_prefill:
        raise ConfigError("chunk_policy: enable_chunked_prefill is false, so there is none")
    with ExitStack() as undo:
        if model is None:
            model = _load(resolved, report)
        check_model(resolved, model)
        attn_backend = select_backend(
            config.attn_backend, HeadShape.of(model.target.config), resolved.device
        )
        _limit_threads(resolved)
        if tokenizer is None and (Path(config.model) / "tokenizer.json").is_file():
            report("loading the tokenizer")
            tokenizer = read_tokenizer(checked or read_config(config.model))
        elif tokenizer is None and (unread := unread_tokenizer(Path(config.model))):
            report(f"no tokenizer: prompts must be token ids{unread}")
        host = _host_facts(resolved, model, tokenizer)
        _check_memory(resolved, model)
        with shortage_named("max_batch_size", f"the state of {config.max_batch_size} requests"):
            speculative = resolved.config.speculative_config
            pieces = build_pieces(resolved.plugin, speculative, resolved.plan, host)
        lease = AttentionLease(model, attn_backend.attention_function)
        undo.callback(lease.release)
        engine = _engine(resolved, model, pieces, attn_backend, lease, on_progress, kv_fill)
        seq_slots = SeqSlotManager(host.max_num_sequences)
        built = BuiltExecutor(
            executor=_executor(resolved, engine, seq_slots, chunk_policy),
            config=resolved.config,
            device=resolved.device,
            max_seq_len=resolved.max_seq_len,
            model=model,
            tokenizer=tokenizer,
            attn_backend=attn_backend,
            pieces=pieces,
            blocks=engine.blocks,
            pools=engine.pools,
            seq_slots=seq_slots,
        )
        undo.pop_all()
    return built


def _check_arguments(tokenizer: Any, chunk_policy: Any, kv_fill: Any) -> None:
    missing = [
        name for name in ("encode", "decode") if not callable(getattr(tokenizer, name, None))
    ]
    if tokenizer is not None and missing:
        raise ConfigError(
            f"tokenizer: expected one with encode and decode, got {format_value(tokenizer)} "
            f"without {missing[0]}"
        )
    if not callable(chunk_policy):
        raise ConfigError(f"chunk_policy: expected a function, got {format_value(chunk_policy)}")
    is_number = isinstance(kv_fill, (int, float)) and not isinstance(kv_fill, bool)
    if not is_number or HIGHEST_FILL < abs(kv_fill) < math.inf:
        raise ConfigError(f"kv_fill: expected a number, got {format_value(kv_fill)}")


def _load(resolved: ResolvedConfig, report: Progress) -> LoadedModel:
    config, device = resolved.config, resolved.device
    report("loading weights")
    model = load_model(
        config.model,
        dtype=resolve_dtype(config.dtype, resolved.facts.dtype, device),
        device=device,
        num_mtp_layers=resolved.plan.num_draft_layers,
        on_progress=report,
    )
    if resolve_fusing(config, device):
        report("packing fused layers")
        model = fuse(model)
        report(str(model.report))
    return model


def _dtype_of(model: LoadedModel) -> torch.dtype:
    return model.lm_head.weight.dtype  # type: ignore[return-value]


def _check_memory(resolved: ResolvedConfig, model: LoadedModel) -> None:
    """Check the requests' memory again, now that the weights are loaded."""
    layers = model.facts.num_hidden_layers + resolved.plan.num_draft_layers
    dtype = _dtype_of(model)
    row = token_bytes(HeadShape.of(model.target.config), dtype, layers)
    check_requests(resolved, dtype=dtype, token_bytes=row)


def _limit_threads(resolved: ResolvedConfig) -> None:
    is_thin = resolved.device.type == "cpu" and resolved.facts.hidden_size <= THIN_MODEL_WIDTH
    if is_thin and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _host_facts(resolved: ResolvedConfig, model: LoadedModel, tokenizer: Any) -> HostFacts:
    has_text = tokenizer is not None
    return HostFacts(
        hidden_size=resolved.facts.hidden_size,
        vocab_size=resolved.facts.vocab_size,
        dtype=_dtype_of(model),
        device=resolved.device,
        max_batch_size=resolved.config.max_batch_size,
        max_num_sequences=2 * resolved.config.max_batch_size,
        max_seq_len=resolved.max_seq_len,
        chain=model.traits.chain,
        encode=partial(encode, tokenizer, add_special_tokens=False) if has_text else None,
        reads_states=False,
        padded_sizes=padded_sizes(resolved.config),
        end_ids=resolved.facts.eos_token_ids,
        engine_seed=resolved.config.engine_seed,
    )


def _engine(
    resolved: ResolvedConfig,
    model: LoadedModel,
    pieces: SpeculativePieces,
    attn_backend: AttentionBackend,
    lease: AttentionLease,
    on_progress: Progress | None,
    kv_fill: float,
) -> ModelEngine:
    """Make the draft head, size the KV cache by the memory that is left, then capture."""
    config, device = resolved.config, resolved.device
    report = on_progress or (lambda _: None)
    draft_head = None
    if pieces.draft_vocab_ids is not None:
        report(f"cutting the draft head to {len(pieces.draft_vocab_ids)} ids")
        draft_head = model.draft_head(pieces.draft_vocab_ids)
    padded = padded_sizes(config)
    graphs = config.cuda_graph_config if device.type == "cuda" else None
    shapes = captured_shapes(config, pieces, attn_backend) if graphs is not None else []
    report("running one token through every layer")
    write = partial(_write_one_token, model, attn_backend, resolved.plan.num_draft_layers)
    probe = probe_pools(write)
    report("allocating the KV cache")
    num_blocks = num_kv_blocks(
        config,
        device,
        max_seq_len=resolved.max_seq_len,
        token_bytes=bytes_per_token(probe),
        available=available_bytes(device),
        total=total_bytes(device),
        reserved=_graph_bytes(resolved, shapes),
    )
    blocks = BlockManager(num_blocks, config.kv_cache_config.tokens_per_block)
    pools = PagedKVPools(blocks.num_blocks, blocks.block_size, fill=kv_fill)
    with shortage_named("kv_cache_config", f"a KV cache of {num_blocks} blocks"):
        pools.allocate(probe)
    engine = ModelEngine(
        model,
        pieces,
        blocks,
        pools,
        StepLimits(resolved.max_seq_len, config.max_batch_size, padded),
        attn_backend=attn_backend,
        draft_head=draft_head,
        lease=lease,
        early_tokens=not config.disable_overlap_scheduler,
    )
    if graphs is not None:
        model.keep_experts_on_device()
        engine.capture(shapes, report, lazy=graphs.capture == "lazy")
    if on_progress is not None:
        pending = engine.captured.pending if engine.captured is not None else ()
        report(memory_line(engine, _graph_bytes(resolved, pending)))
    return engine


def captured_shapes(
    config: LLMConfig, pieces: SpeculativePieces, attn_backend: AttentionBackend
) -> list[StepShape]:
    """Return the shapes of steps that have a graph: generation-only ones, then those with prompts.

    Prompts run eagerly where the backend or the drafter needs the lengths of chunks on the host.
    """
    padded = bool(padded_sizes(config))
    shapes = generation_shapes(captured_sizes(config), pieces.draft_lens, padded=padded)
    if attn_backend.reads_lengths_on_device and pieces.plan.history_rows == 0:
        shapes += prompt_shapes(prompt_token_sizes(config), shapes)
    return shapes


def _graph_bytes(resolved: ResolvedConfig, shapes: Sequence[StepShape]) -> int:
    return graph_bytes(shapes, resolved.facts.vocab_size, resolved.facts.hidden_size)


def _executor(
    resolved: ResolvedConfig,
    engine: ModelEngine,
    seq_slots: SeqSlotManager,
    chunk_policy: ChunkPolicy,
) -> PyExecutor:
    config, pieces, blocks = resolved.config, engine.pieces, engine.blocks
    scheduler = Scheduler(
        resolved.plan,
        blocks,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        chunk_policy=chunk_policy,
        chunking=config.enable_chunked_prefill,
    )
    managers: dict[str, ResourceManager] = {
        "spec_resource_manager": pieces.manager,
        "seq_slot_manager": seq_slots,
        "kv_cache_manager": blocks,
    }
    return PyExecutor(
        engine,
        scheduler,
        pieces.sampler,
        ResourceManagers(managers),
        overlap=not config.disable_overlap_scheduler,
    )


@torch.inference_mode()
def _write_one_token(
    model: LoadedModel, attn_backend: AttentionBackend, num_draft_layers: int, pools: PagedKVPools
) -> None:
    """Run one token through the target and every draft layer, with a KV pool of one block."""
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

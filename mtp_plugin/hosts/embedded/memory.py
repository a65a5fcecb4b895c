"""Memory of an executor: checked before it is allocated, and reported afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.attention import HeadShape
from mtp_plugin.hosts.embedded.kv_cache.sizing import (
    available_bytes,
    available_host_bytes,
    format_bytes,
    least_kv_bytes,
)
from mtp_plugin.hosts.embedded.model_engine import ModelEngine
from mtp_plugin.hosts.embedded.resolved_config import ResolvedConfig, resolve_dtype

_TABLES = 3
"""Tensors that hold a step's rows: one on the device, two on the host."""
_FIXED_COLUMNS = 6
"""Columns of a row in addition to the step's tokens and the request's blocks."""
_HOST_BYTES = 240
"""Least bytes of a request's entries in lists of free slots."""


def token_bytes(heads: HeadShape, dtype: torch.dtype, num_layers: int) -> int:
    """Return the KV bytes of a token in all layers, as `bytes_per_token` measures them."""
    return num_layers * heads.num_kv_heads * (heads.key_width + heads.value_width) * dtype.itemsize


def request_bytes(resolved: ResolvedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return the least bytes that each request of a batch needs on the device and on the host, for
    its rows of a step, its state and its logits.

    Args:
        dtype: dtype of the model.
    """
    config, plan, facts = resolved.config, resolved.plan, resolved.facts
    blocks = -(-resolved.max_seq_len // config.kv_cache_config.tokens_per_block)
    row = 4 * (plan.step_rows + _FIXED_COLUMNS + blocks)
    kept = plan.bytes_per_request(facts.vocab_size, facts.hidden_size, dtype)
    logits = plan.step_rows * facts.vocab_size * dtype.itemsize
    return row + kept + logits, (_TABLES - 1) * row + _HOST_BYTES


def check_requests(
    resolved: ResolvedConfig,
    *,
    dtype: torch.dtype | None = None,
    token_bytes: int = 0,
    weight_bytes: int = 0,
) -> None:
    """Refuse a batch whose requests need more memory than there is, before allocating it.

    Args:
        dtype: dtype of the model; None: the configured one.
        token_bytes: KV bytes of a token; 0: not known yet. The requests must leave memory for the
            configured cache, or the smallest one.
        weight_bytes: bytes of weights that are still to be loaded.

    Raises:
        ConfigError: names the least required and the available memory.
    """
    config, device = resolved.config, resolved.device
    dtype = dtype or resolve_dtype(config.dtype, resolved.facts.dtype, device)
    on_device, on_host = request_bytes(resolved, dtype)
    cache = least_kv_bytes(config.kv_cache_config, token_bytes)
    if device.type == "cuda":
        needs = [
            ("cuda", on_device, cache, weight_bytes, available_bytes(device)),
            ("cpu", on_host, 0, 0, available_host_bytes()),
        ]
    else:
        needs = [("cpu", on_device + on_host, cache, weight_bytes, available_host_bytes())]
    for place, each, cached, weights, available in needs:
        if available is None:
            continue
        left = max(0, available - weights)
        # a cache that does not fit alone gets an error of its own
        cached = cached if cached <= left else 0
        needed = config.max_batch_size * each
        if needed > left - cached:
            cache_size = f" next to a KV cache of {format_bytes(cached)}" if cached else ""
            raise ConfigError(
                f"max_batch_size: {config.max_batch_size} requests of up to "
                f"{resolved.max_seq_len} tokens take at least {format_bytes(needed)}{cache_size}, "
                f"{format_bytes(left)} are available on {place}"
            )


@contextmanager
def shortage_named(option: str, what: str) -> Iterator[None]:
    """Convert allocation failures inside into a `ConfigError` that names ``option``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = next(iter(str(error).splitlines()), "")
        # the CPU's allocator has no error of its own
        is_shortage = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_shortage and "can't allocate memory" not in reason:
            raise
        raise ConfigError(f"{option}: {what} does not fit into memory: {reason}") from error


def memory_line(engine: ModelEngine, pending_bytes: int = 0) -> str:
    """Describe an engine's memory for KV cache, MTP state and CUDA graphs, in MiB.

    Args:
        pending_bytes: estimate for the graphs that are captured later.
    """
    blocks, report = engine.blocks, engine.pieces.memory_report
    kv = _mib(engine.pools.num_bytes())
    parts = [f"KV cache {kv} ({blocks.num_blocks} blocks of {blocks.block_size} tokens)"]
    if report is not None:
        parts.append(report())
    if (captured := engine.captured) is not None:
        parts.append(f"CUDA graphs {_mib(captured.num_bytes)} ({len(captured.shapes)})")
        if captured.pending:
            later = len(captured.pending)
            parts.append(f"up to {_mib(pending_bytes)} for {later} graphs captured later")
    return f"memory: {', '.join(parts)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"

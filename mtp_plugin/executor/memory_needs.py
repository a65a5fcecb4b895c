"""What requests and their KV rows take of memory, told before any of it is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.executor.attention import HeadShape
from mtp_plugin.executor.kv_cache.sizing import available_bytes, available_host_bytes, told
from mtp_plugin.executor.resolved_config import ResolvedConfig

_TABLES = 3
"""Tensors that hold a step's rows: one on the device, two on the host."""
_EDIT_BYTES = 6
"""Of an id, for a request's bias and counts."""
_SLOT_BYTES = 200
"""Host bytes of a request's slots, at least."""


def token_bytes(heads: HeadShape, dtype: torch.dtype, num_layers: int) -> int:
    """Bytes of a token's rows in all layers, as `bytes_per_token` measures them."""
    return num_layers * heads.num_kv_heads * (heads.key_width + heads.value_width) * dtype.itemsize


def check_requests(resolved: ResolvedConfig) -> None:
    """Refuse a batch whose rows, logits and edits alone take more memory than there is.

    Raises:
        ConfigError: with what it takes at least, and what there is.
    """
    config, device, plan = resolved.config, resolved.device, resolved.plan
    row = 4 * -(-resolved.max_seq_len // config.kv_cache_config.tokens_per_block)
    # float16 and bfloat16 are the smallest that models run in
    logits = (2 * plan.step_rows + _EDIT_BYTES) * resolved.facts.vocab_size
    on_device, on_host = row + logits, (_TABLES - 1) * row + _SLOT_BYTES
    if device.type == "cuda":
        needs = [
            ("cuda", on_device, available_bytes(device)),
            ("cpu", on_host, available_host_bytes()),
        ]
    else:
        needs = [("cpu", on_device + on_host, available_host_bytes())]
    for place, each, available in needs:
        needed = config.max_batch_size * each
        if available is not None and needed > available:
            raise ConfigError(
                f"max_batch_size: {config.max_batch_size} requests of up to "
                f"{resolved.max_seq_len} tokens take at least {told(needed)}, {told(available)} "
                f"are available on {place}"
            )


@contextmanager
def shortage_named(option: str, what: str) -> Iterator[None]:
    """Allocations that fail in here are a `ConfigError` of ``option``; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = next(iter(str(error).splitlines()), "")
        # the CPU's allocator has no error of its own
        is_shortage = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_shortage and "can't allocate memory" not in reason:
            raise
        raise ConfigError(f"{option}: {what} does not fit into memory: {reason}") from error

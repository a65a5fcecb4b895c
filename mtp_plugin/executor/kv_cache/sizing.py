"""Number of KV blocks: as configured, else what the batch can use and memory holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mtp_plugin.config import KVCacheConfig, LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.executor.kv_cache.pools import PagedKVPools

CPU_KV_BYTES = 2 * 2**30
"""Maximum size of the KV pools on a CPU without ``kv_cache_config.max_tokens``."""


def probe_pools(write_one_token: Callable[[PagedKVPools], object]) -> PagedKVPools:
    """Pools of one block of one token, with the layers that write rows.

    Args:
        write_one_token: runs every layer that will write rows, over the pools it is given.
    """
    pools = PagedKVPools(num_blocks=1, block_size=1)
    write_one_token(pools)
    return pools


def bytes_per_token(pools: PagedKVPools) -> int:
    """Bytes of a token's rows in all layers of pools that have them."""
    return pools.num_bytes() // pools.num_rows


def configured_blocks(cache: KVCacheConfig) -> int | None:
    """Blocks of ``max_tokens``; None: not configured.

    Raises:
        ConfigError: it holds no block.
    """
    if cache.max_tokens is None:
        return None
    blocks = cache.max_tokens // cache.tokens_per_block
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_config.max_tokens: {cache.max_tokens} holds no block of "
            f"{cache.tokens_per_block} tokens"
        )
    return blocks


def least_kv_bytes(cache: KVCacheConfig, token_bytes: int) -> int:
    """Bytes of the configured cache, or of the smallest one, with the block for padding.

    Raises:
        ConfigError: as `configured_blocks`.
    """
    return ((configured_blocks(cache) or 1) + 1) * cache.tokens_per_block * token_bytes


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes in GiB or MiB."""
    size = num_bytes / 2**30
    return f"{size:.1f} GiB" if size >= 1 else f"{num_bytes / 2**20:.1f} MiB"


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated; None: a CPU whose system does not report it.

    On CUDA the device's free memory, on a CPU what the system has, within the limit of the
    process's control group.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left with the allocator is free too
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """As `available_bytes` of a CPU.

    Args:
        root: under which the system's files lie.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 2**10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None
    groups = root / "sys/fs/cgroup"
    for most, used in (
        (groups / "memory.max", groups / "memory.current"),
        (groups / "memory/memory.limit_in_bytes", groups / "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such group, or no limit: "max"
            free = min(free, max(0, int(most.read_text()) - int(used.read_text())))
    return free


def num_kv_blocks(
    config: LLMConfig,
    device: torch.device,
    *,
    max_seq_len: int,
    token_bytes: int,
    available: int | None,
) -> int:
    """Blocks of the pool; with the sentinel block they fit into memory.

    Args:
        config: with the cache's options and the batch size.
        device: of the pools; on a CPU they take `CPU_KV_BYTES` unless more is configured.
        max_seq_len: tokens of a request at most.
        token_bytes: see `bytes_per_token`.
        available: see `available_bytes`.

    Raises:
        ConfigError: ``kv_cache_config.max_tokens`` holds no block, or memory does not hold the
            cache.
    """
    cache = config.kv_cache_config
    block_bytes = token_bytes * cache.tokens_per_block
    configured = configured_blocks(cache)
    if configured is not None:
        needed = (configured + 1) * block_bytes
        if available is not None and needed > available:
            raise ConfigError(
                f"kv_cache_config.max_tokens: {cache.max_tokens} tokens in blocks of "
                f"{cache.tokens_per_block} take {format_bytes(needed)}, "
                f"{format_bytes(available)} are available on {device.type}"
            )
        return configured
    most = CPU_KV_BYTES if available is None else available
    if device.type == "cuda":
        most = int(most * cache.free_gpu_memory_fraction)
    else:
        most = min(most, CPU_KV_BYTES)
    holds = most // block_bytes - 1
    if holds < 1:
        raise ConfigError(
            f"kv_cache_config.tokens_per_block: a block of {cache.tokens_per_block} tokens and the "
            f"one for padding take {format_bytes(2 * block_bytes)}, {format_bytes(most)} are "
            f"available for the KV cache on {device.type}"
        )
    return min(config.max_batch_size * -(-max_seq_len // cache.tokens_per_block), holds)

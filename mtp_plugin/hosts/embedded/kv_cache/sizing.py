"""Number of KV blocks: as configured, else what the batch can use and memory holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mtp_plugin.config import KVCacheConfig, LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.kv_cache.pools import PagedKVPools

CPU_KV_BYTES = 2 * 2**30
"""Maximum size of the KV pools on a CPU without ``kv_cache_config.max_tokens``."""


def probe_pools(write_one_token: Callable[[PagedKVPools], object]) -> PagedKVPools:
    """Return pools of one block of one token, allocated for the layers that write rows.

    Args:
        write_one_token: runs every layer that writes rows, with the given pools.
    """
    pools = PagedKVPools(num_blocks=1, block_size=1)
    write_one_token(pools)
    return pools


def bytes_per_token(pools: PagedKVPools) -> int:
    """Return the KV bytes of a token in all layers of ``pools``."""
    return pools.num_bytes() // pools.num_rows


def configured_blocks(cache: KVCacheConfig) -> int | None:
    """Return the number of blocks for ``max_tokens``; None: not configured.

    Raises:
        ConfigError: ``max_tokens`` is less than one block.
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
    """Return the bytes of the configured cache, or of the smallest one, with the sentinel block.

    Raises:
        ConfigError: see `configured_blocks`.
    """
    return ((configured_blocks(cache) or 1) + 1) * cache.tokens_per_block * token_bytes


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes in GiB or MiB."""
    size = num_bytes / 2**30
    return f"{size:.1f} GiB" if size >= 1 else f"{num_bytes / 2**20:.1f} MiB"


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated; None: the system does not report them.

    On CUDA this is the device's free memory, on a CPU the system's available memory within the
    limit of the process's control group.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory cached by the allocator after loading is free too
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a CUDA device; None: a CPU."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the available bytes of a CPU, see `available_bytes`.

    Args:
        root: root directory of the system's files.
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
        with suppress(OSError, ValueError):  # no control group, or no limit ("max")
            free = min(free, max(0, int(most.read_text()) - int(used.read_text())))
    return free


def num_kv_blocks(
    config: LLMConfig,
    device: torch.device,
    *,
    max_seq_len: int,
    token_bytes: int,
    available: int | None,
    total: int | None = None,
    reserved: int = 0,
) -> int:
    """Return the number of usable KV blocks; together with the sentinel block they fit into memory.

    Args:
        config: gives the cache's options and the batch size.
        device: device of the pools; a CPU's take up to `CPU_KV_BYTES` unless more is configured.
        max_seq_len: maximum number of tokens of a request.
        token_bytes: see `bytes_per_token`.
        available: see `available_bytes`.
        total: the device's memory, of which ``gpu_memory_utilization`` is a share.
        reserved: bytes that a cache sized by free memory leaves for CUDA graphs.

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
        if config.gpu_memory_utilization is None or total is None:
            most = min(int(most * cache.free_gpu_memory_fraction), most - reserved)
        else:
            most = int(total * config.gpu_memory_utilization) - (total - most) - reserved
        most = max(0, most)
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

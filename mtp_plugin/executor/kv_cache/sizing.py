"""How many KV blocks there are: as asked for, else what the batch can use and memory holds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtp_plugin.config import KVCacheConfig, LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.executor.kv_cache.pools import PagedKVPools

CPU_KV_BYTES = 2 * 2**30
"""Most bytes that the KV pools take on a CPU unless ``kv_cache_config.max_tokens`` says
otherwise."""


def bytes_per_token(write_one_token: Callable[[PagedKVPools], object]) -> int:
    """Bytes of a token's rows in all layers, measured over a pool of one block of one token.

    Args:
        write_one_token: runs every layer that will write rows, over the pool it is given.
    """
    pools = PagedKVPools(num_blocks=1, block_size=1)
    write_one_token(pools)
    return pools.num_bytes() // pools.num_rows


def asked_blocks(cache: KVCacheConfig) -> int | None:
    """Blocks that ``max_tokens`` asks for; None: none are asked for.

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


def num_kv_blocks(
    config: LLMConfig, device: torch.device, *, max_seq_len: int, token_bytes: Callable[[], int]
) -> int:
    """Blocks of the pool.

    Args:
        config: with the cache's options and the batch size.
        device: of the pools; on CUDA its free memory counts, on a CPU `CPU_KV_BYTES`.
        max_seq_len: tokens of a request at most.
        token_bytes: see `bytes_per_token`; called where memory decides.

    Raises:
        ConfigError: ``kv_cache_config.max_tokens`` holds no block.
    """
    cache = config.kv_cache_config
    asked = asked_blocks(cache)
    if asked is not None:
        return asked
    useful = config.max_batch_size * -(-max_seq_len // cache.tokens_per_block)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left with the allocator is free too
        free, _ = torch.cuda.mem_get_info(device)
        available = int(free * cache.free_gpu_memory_fraction)
    else:
        available = CPU_KV_BYTES
    return max(1, min(useful, available // (token_bytes() * cache.tokens_per_block)))

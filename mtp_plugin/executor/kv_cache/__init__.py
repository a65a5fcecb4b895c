"""Paged KV: which blocks a request has, and the pools that they address."""

from mtp_plugin.executor.kv_cache.blocks import BlockManager
from mtp_plugin.executor.kv_cache.pools import PagedKVPools

__all__ = ["BlockManager", "PagedKVPools"]

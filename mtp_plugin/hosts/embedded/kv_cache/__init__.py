"""Paged KV cache: block allocation, pools and sizing."""

from mtp_plugin.hosts.embedded.kv_cache.blocks import BlockManager
from mtp_plugin.hosts.embedded.kv_cache.pools import PagedKVPools

__all__ = ["BlockManager", "PagedKVPools"]

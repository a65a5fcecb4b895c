"""Accepted drafts -> KV bookkeeping moved back."""

from mtp_plugin.hosts.megatron.ops.kv_rewind.contract import RewoundBlocks
from mtp_plugin.hosts.megatron.ops.kv_rewind.door import rewind_kv_cache

__all__ = ["RewoundBlocks", "rewind_kv_cache"]

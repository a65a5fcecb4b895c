"""A sampled step -> token and KV bookkeeping in one launch."""

from mtp_plugin.hosts.megatron.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.bookkeeping.door import advance_decode_batch

__all__ = ["AdvancedBatch", "KVBlockState", "NextForwardBuffers", "advance_decode_batch"]

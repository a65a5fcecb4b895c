"""A sampled step -> token and KV bookkeeping in one launch; the kernel is in ``launch``."""

from mtp_plugin.hosts.megatron.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.bookkeeping.reference import advance_decode_batch

__all__ = ["AdvancedBatch", "KVBlockState", "NextForwardBuffers", "advance_decode_batch"]

"""Megatron's ``mtp_utils_pytorch``: the bookkeeping ops in torch, on any device."""

from mtp_plugin.hosts.megatron.ops.bookkeeping import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
    advance_decode_batch,
)
from mtp_plugin.hosts.megatron.ops.kv_rewind import RewoundBlocks, rewind_kv_cache
from mtp_plugin.hosts.megatron.ops.next_forward import prepare_next_forward_pass
from mtp_plugin.hosts.megatron.ops.token_verify import (
    VerifiedTokens,
    required_logit_indices,
    verify_speculative_tokens,
)
from mtp_plugin.speculative.ops.state_rollback import mamba_state_selective_copy

__all__ = [
    "AdvancedBatch",
    "KVBlockState",
    "NextForwardBuffers",
    "RewoundBlocks",
    "VerifiedTokens",
    "advance_decode_batch",
    "mamba_state_selective_copy",
    "prepare_next_forward_pass",
    "required_logit_indices",
    "rewind_kv_cache",
    "verify_speculative_tokens",
]

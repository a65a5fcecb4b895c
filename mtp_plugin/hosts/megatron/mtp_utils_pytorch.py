"""Megatron's ``mtp_utils_pytorch``: the bookkeeping ops in plain torch, on any device."""

from mtp_plugin.ops.bookkeeping import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
    advance_decode_batch,
)
from mtp_plugin.ops.kv_rewind import RewoundBlocks, rewind_kv_cache
from mtp_plugin.ops.next_forward import prepare_next_forward_pass
from mtp_plugin.ops.state_rollback import mamba_state_selective_copy
from mtp_plugin.ops.token_verify import (
    VerifiedTokens,
    required_logit_indices,
    verify_speculative_tokens,
)

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

"""Megatron's ``mtp_utils_pytorch``: the bookkeeping ops in torch, on any device."""

from mtp_plugin.hosts.megatron.drop_in import fixed
from mtp_plugin.hosts.megatron.ops import bookkeeping, kv_rewind, next_forward, token_verify
from mtp_plugin.hosts.megatron.ops.bookkeeping import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.kv_rewind import RewoundBlocks
from mtp_plugin.hosts.megatron.ops.token_verify import VerifiedTokens
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops import state_rollback

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

advance_decode_batch = fixed(bookkeeping.advance_decode_batch, Backend.TORCH)
mamba_state_selective_copy = fixed(state_rollback.mamba_state_selective_copy, Backend.TORCH)
prepare_next_forward_pass = fixed(next_forward.prepare_next_forward_pass, Backend.TORCH)
required_logit_indices = fixed(token_verify.required_logit_indices, Backend.TORCH)
rewind_kv_cache = fixed(kv_rewind.rewind_kv_cache, Backend.TORCH)
verify_speculative_tokens = fixed(token_verify.verify_speculative_tokens, Backend.TORCH)

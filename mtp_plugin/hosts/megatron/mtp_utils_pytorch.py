"""Megatron's ``mtp_utils_pytorch``: its functions in torch, on any device."""

from mtp_plugin.hosts.megatron import kv_rewind, next_forward, token_verify
from mtp_plugin.hosts.megatron.drop_in import with_backend
from mtp_plugin.hosts.megatron.types import RewoundBlocks, VerifiedTokens
from mtp_plugin.ops import state_rollback
from mtp_plugin.ops.backend import Backend

__all__ = [
    "RewoundBlocks",
    "VerifiedTokens",
    "mamba_state_selective_copy",
    "prepare_next_forward_pass",
    "required_logit_indices",
    "rewind_kv_cache",
    "verify_speculative_tokens",
]

mamba_state_selective_copy = with_backend(state_rollback.mamba_state_selective_copy, Backend.TORCH)
prepare_next_forward_pass = with_backend(next_forward.prepare_next_forward_pass, Backend.TORCH)
required_logit_indices = with_backend(token_verify.required_logit_indices, Backend.TORCH)
rewind_kv_cache = with_backend(kv_rewind.rewind_kv_cache, Backend.TORCH)
verify_speculative_tokens = with_backend(token_verify.verify_speculative_tokens, Backend.TORCH)

"""Megatron's ``mtp_utils_triton``: its functions as Triton kernels, one launch each.

There is no silent fallback. Without the package triton the import raises an ``ImportError``;
tensors on the CPU raise a ``TensorContractError``, unless ``TRITON_INTERPRET=1`` was set before the
first import of this module. ``mtp_utils_pytorch`` has the same functions for both cases.

Four kernels have the names of Megatron's file, for code that looks them up or counts their
launches; their arguments differ.
"""

try:
    import triton  # noqa: F401 - for an error that says what to do
except ImportError as error:
    raise ImportError(
        "mtp_utils_triton: expected the package triton, which cannot be imported; "
        "mtp_utils_pytorch has the same functions without it"
    ) from error

from mtp_plugin.hosts.megatron import kv_rewind, next_forward, token_verify
from mtp_plugin.hosts.megatron.drop_in import with_backend
from mtp_plugin.hosts.megatron.kv_rewind_triton import (
    _rewind_kv_cache_kernel as _rewind_kv_cache_kernel,
)
from mtp_plugin.hosts.megatron.next_forward_triton import (
    _prepare_next_forward_pass_kernel as _prepare_next_forward_pass_kernel,
)
from mtp_plugin.hosts.megatron.token_verify_triton import (
    _verify_speculative_tokens_kernel as _verify_speculative_tokens_kernel,
)
from mtp_plugin.hosts.megatron.types import RewoundBlocks, VerifiedTokens
from mtp_plugin.ops import state_rollback
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.state_rollback_triton import (
    _mamba_state_selective_copy_kernel as _mamba_state_selective_copy_kernel,
)

__all__ = [
    "RewoundBlocks",
    "VerifiedTokens",
    "mamba_state_selective_copy",
    "prepare_next_forward_pass",
    "required_logit_indices",
    "rewind_kv_cache",
    "verify_speculative_tokens",
]

mamba_state_selective_copy = with_backend(state_rollback.mamba_state_selective_copy, Backend.TRITON)
prepare_next_forward_pass = with_backend(next_forward.prepare_next_forward_pass, Backend.TRITON)
required_logit_indices = with_backend(token_verify.required_logit_indices, Backend.TRITON)
rewind_kv_cache = with_backend(kv_rewind.rewind_kv_cache, Backend.TRITON)
verify_speculative_tokens = with_backend(token_verify.verify_speculative_tokens, Backend.TRITON)

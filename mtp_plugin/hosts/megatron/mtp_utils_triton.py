"""Megatron's ``mtp_utils_triton``: the bookkeeping ops as Triton kernels, one launch each.

There is no silent fallback. Without the package triton the import fails with an ``ImportError``;
tensors on the CPU are refused with a ``TensorContractError``, unless ``TRITON_INTERPRET=1`` was set
before the first import of this module. ``mtp_utils_pytorch`` has the same functions for both cases.

The kernels go by the names of Megatron's file too, for code that asks whether they are there or
counts their launches; their arguments are our own.
"""

try:
    import triton  # noqa: F401  for an error that names the way out
except ImportError as error:
    raise ImportError(
        "mtp_utils_triton: expected the package triton, which cannot be imported; "
        "mtp_utils_pytorch has the same functions without it"
    ) from error

from mtp_plugin.hosts.megatron.drop_in import fixed
from mtp_plugin.hosts.megatron.ops import bookkeeping, kv_rewind, next_forward, token_verify
from mtp_plugin.hosts.megatron.ops.bookkeeping import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.kv_rewind import RewoundBlocks
from mtp_plugin.hosts.megatron.ops.kv_rewind.kernel import (
    _rewind_kv_cache_kernel as _rewind_kv_cache_kernel,
)
from mtp_plugin.hosts.megatron.ops.next_forward.kernel import (
    _prepare_next_forward_pass_kernel as _prepare_next_forward_pass_kernel,
)
from mtp_plugin.hosts.megatron.ops.token_verify import VerifiedTokens
from mtp_plugin.hosts.megatron.ops.token_verify.kernel import (
    _verify_speculative_tokens_kernel as _verify_speculative_tokens_kernel,
)
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops import state_rollback
from mtp_plugin.speculative.ops.state_rollback_triton import (
    _mamba_state_selective_copy_kernel as _mamba_state_selective_copy_kernel,
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

advance_decode_batch = fixed(bookkeeping.advance_decode_batch, Backend.TRITON)
mamba_state_selective_copy = fixed(state_rollback.mamba_state_selective_copy, Backend.TRITON)
prepare_next_forward_pass = fixed(next_forward.prepare_next_forward_pass, Backend.TRITON)
required_logit_indices = fixed(token_verify.required_logit_indices, Backend.TRITON)
rewind_kv_cache = fixed(kv_rewind.rewind_kv_cache, Backend.TRITON)
verify_speculative_tokens = fixed(token_verify.verify_speculative_tokens, Backend.TRITON)

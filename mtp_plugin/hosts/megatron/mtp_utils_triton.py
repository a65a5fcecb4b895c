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

from mtp_plugin.hosts.megatron.ops.bookkeeping import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.bookkeeping.launch import advance_decode_batch
from mtp_plugin.hosts.megatron.ops.kv_rewind import RewoundBlocks
from mtp_plugin.hosts.megatron.ops.kv_rewind.kernel import (
    _rewind_kv_cache_kernel as _rewind_kv_cache_kernel,
)
from mtp_plugin.hosts.megatron.ops.kv_rewind.launch import rewind_kv_cache
from mtp_plugin.hosts.megatron.ops.next_forward.kernel import (
    _prepare_next_forward_pass_kernel as _prepare_next_forward_pass_kernel,
)
from mtp_plugin.hosts.megatron.ops.next_forward.launch import prepare_next_forward_pass
from mtp_plugin.hosts.megatron.ops.token_verify import VerifiedTokens
from mtp_plugin.hosts.megatron.ops.token_verify.kernel import (
    _verify_speculative_tokens_kernel as _verify_speculative_tokens_kernel,
)
from mtp_plugin.hosts.megatron.ops.token_verify.launch import (
    required_logit_indices,
    verify_speculative_tokens,
)
from mtp_plugin.speculative.ops.state_rollback.kernel import (
    _mamba_state_selective_copy_kernel as _mamba_state_selective_copy_kernel,
)
from mtp_plugin.speculative.ops.state_rollback.launch import mamba_state_selective_copy

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

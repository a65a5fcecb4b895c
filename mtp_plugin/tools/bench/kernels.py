"""The two sides of a comparison: what is measured, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp_plugin.hosts.megatron.ops import bookkeeping, kv_rewind, next_forward, token_verify
from mtp_plugin.speculative.ops import state_rollback
from mtp_plugin.speculative.ops.backend import REFERENCE_OPS, StepOps, triton_ops


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op."""

    name: str
    step: StepOps
    advance_decode_batch: Callable[..., Any]
    verify_speculative_tokens: Callable[..., Any]
    prepare_next_forward_pass: Callable[..., Any]
    rewind_kv_cache: Callable[..., Any]
    mamba_state_selective_copy: Callable[..., Any]


def reference_kernels() -> Kernels:
    """The torch references."""
    return Kernels(
        name="reference",
        step=REFERENCE_OPS,
        advance_decode_batch=bookkeeping.advance_decode_batch,
        verify_speculative_tokens=token_verify.verify_speculative_tokens,
        prepare_next_forward_pass=next_forward.prepare_next_forward_pass,
        rewind_kv_cache=kv_rewind.rewind_kv_cache,
        mamba_state_selective_copy=state_rollback.mamba_state_selective_copy,
    )


def triton_kernels() -> Kernels:
    """What is measured: Triton, on the device or in its interpreter.

    Raises:
        ConfigError: triton is not installed.
    """
    step = triton_ops()
    from mtp_plugin.hosts.megatron.ops.bookkeeping import launch as bookkeeping_launch
    from mtp_plugin.hosts.megatron.ops.kv_rewind import launch as kv_rewind_launch
    from mtp_plugin.hosts.megatron.ops.next_forward import launch as next_forward_launch
    from mtp_plugin.hosts.megatron.ops.token_verify import launch as token_verify_launch
    from mtp_plugin.speculative.ops.state_rollback import launch as state_rollback_launch

    return Kernels(
        name="triton",
        step=step,
        advance_decode_batch=bookkeeping_launch.advance_decode_batch,
        verify_speculative_tokens=token_verify_launch.verify_speculative_tokens,
        prepare_next_forward_pass=next_forward_launch.prepare_next_forward_pass,
        rewind_kv_cache=kv_rewind_launch.rewind_kv_cache,
        mamba_state_selective_copy=state_rollback_launch.mamba_state_selective_copy,
    )

"""Fused RMS norms in draft models that vLLM runs without ``torch.compile``.

vLLM's ``RMSNorm`` is a chain of torch ops that ``torch.compile`` fuses. The MTP layers of GLM-4.5,
MiMo, Ernie and others are not compiled: there each norm takes seven launches, and one after this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

PROVIDER = "vllm_c"
"""vLLM's own CUDA kernels, among the implementations of its ``ir.ops``."""
_OF_KERNEL = ("supported", "supports_args", "impl_fn")
_OF_NORM = (
    "_forward_method",
    "forward_native",
    "pass_weight",
    "pass_weight_add",
    "variance_epsilon",
    "variance_size_override",
    "weight",
)


def fuse_norms(model: nn.Module, norm_class: type, norm_op: Any, add_norm_op: Any) -> int:
    """Let the norms of a model without compiled parts call fused kernels; returns how many.

    None, if this vLLM's norms or ``ir.ops`` lack an attribute that is used here.

    Args:
        model: draft model. norm_class: vLLM's ``RMSNorm``.
        norm_op: ``ir.ops.rms_norm``. add_norm_op: ``ir.ops.fused_add_rms_norm``.
    """
    kernels: list[Any] = [getattr(op, "impls", {}).get(PROVIDER) for op in (norm_op, add_norm_op)]
    if not all(_has(kernel, _OF_KERNEL) and kernel.supported for kernel in kernels):
        return 0
    modules = list(model.modules())
    if any(getattr(module, "do_not_compile", True) is False for module in modules):
        return 0
    norms: list[Any] = [module for module in modules if type(module) is norm_class]
    if not all(_has(norm, _OF_NORM) for norm in norms):
        return 0
    for norm in norms:
        norm._forward_method = partial(_forward, norm, *kernels)
    return len(norms)


def _has(owner: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(owner, name) for name in names)


def _forward(
    norm: Any,
    kernel: Any,
    add_kernel: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> Any:
    if residual is None:
        weight = norm.weight.data if norm.pass_weight else None
        chosen, inputs = kernel, [x]
    else:
        weight = norm.weight.data if norm.pass_weight_add else None
        chosen, inputs = add_kernel, [x, residual]
    given = (*inputs, weight, norm.variance_epsilon, norm.variance_size_override)
    if not chosen.supports_args(*given):
        return norm.forward_native(x, residual)
    return chosen.impl_fn(*given)

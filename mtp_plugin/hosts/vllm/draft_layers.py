"""What changes in a draft model: its heads, and fused kernels if vLLM runs it without
``torch.compile``.

vLLM's ``RMSNorm`` and ``RotaryEmbedding`` are chains of torch ops that ``torch.compile`` fuses. The
MTP layers of GLM-4.5, MiMo, Ernie and others are not compiled: there each norm takes seven
launches and a rotary embedding seventeen, and one after this.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mtp_plugin.hosts.vllm.draft_head import follow_weights, reduce_heads
from mtp_plugin.speculative.rows.options import EngineSettings

_logger = logging.getLogger("vllm.mtp_plugin")
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

_OF_ROTARY = ("forward_native", "forward_cuda")


def prepare(speculator: Any, target: Any, settings: EngineSettings) -> None:
    """Change the draft model of a speculator that has loaded its weights.

    Args:
        target: the target model.
    """
    if settings.draft_ids is not None:
        _reduce_heads(speculator, target, settings.draft_ids, settings.num_added_ids)
    if settings.drafter == "dspark":  # kernels of a model's own would leave out `sample_drafts`
        speculator.model.sample_sequential = None
    check_map(speculator.model)
    _fuse_layers(speculator.model)


def _reduce_heads(speculator: Any, target: Any, ids: Sequence[int], num_added: int) -> None:
    heads = reduce_heads(speculator.model, ids)
    follow_weights(speculator, target, heads)
    _logger.info(
        "draft model: %d heads of %s %d ids, %d of them added as stop ids and thinking tags",
        len(heads),
        "the lowest" if isinstance(ids, range) else "listed",
        len(ids),
        num_added,
    )


def check_map(model: Any) -> None:
    """vLLM sets a map of draft ids to 0 if the checkpoint has none."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None and not offsets.any():
        _logger.warning(
            "draft model: its %d ids are fewer than the model's and their map (d2t) is missing or "
            "all 0, so that the lowest ids are drafted: use a checkpoint with d2t",
            len(offsets),
        )


def _fuse_layers(model: Any) -> None:
    try:
        from vllm import envs, ir
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
        from vllm.platforms import current_platform

        is_invariant, is_cuda = envs.VLLM_BATCH_INVARIANT, current_platform.is_cuda()
        ops = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    except (ImportError, AttributeError) as error:  # an optimization alone
        _logger.warning("draft model: norms stay unfused in this vLLM: %s", error)
        return
    if is_invariant:
        return
    norms = fuse_norms(model, RMSNorm, *ops)
    rotary = fuse_rotary(model, RotaryEmbedding) if is_cuda else 0
    _logger.info("draft model: %d fused norms, %d fused rotary embeddings", norms, rotary)


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
    if is_compiled(model):
        return 0
    norms: list[Any] = [module for module in model.modules() if type(module) is norm_class]
    if not all(_has(norm, _OF_NORM) for norm in norms):
        return 0
    for norm in norms:
        norm._forward_method = partial(_forward, norm, *kernels)
    return len(norms)


def fuse_rotary(model: nn.Module, rotary_class: Any) -> int:
    """Let rotary embeddings of a model without compiled parts call one kernel; returns how many.

    None, if this vLLM's class lacks a method that is used here, or already calls the kernel. vLLM
    shares an embedding between layers, also with the target, so that layers get a copy.

    Args:
        model: draft model. rotary_class: vLLM's ``RotaryEmbedding``.
    """
    if not _has(rotary_class, _OF_ROTARY) or is_compiled(model):
        return 0
    copies: dict[int, nn.Module] = {}
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if isinstance(child, rotary_class) and _is_unfused(child, rotary_class):
                if id(child) not in copies:
                    fused: Any = copy.copy(child)
                    fused._forward_method = child.forward_cuda
                    copies[id(child)] = fused
                setattr(layer, name, copies[id(child)])
    return len(copies)


def _is_unfused(rotary: Any, rotary_class: Any) -> bool:
    kind = type(rotary)
    inherits = all(getattr(kind, name) is getattr(rotary_class, name) for name in _OF_ROTARY)
    return inherits and getattr(rotary, "_forward_method", None) == rotary.forward_native


def is_compiled(model: nn.Module) -> bool:
    """Whether vLLM runs a part of a model through ``torch.compile``."""
    return any(getattr(module, "do_not_compile", True) is False for module in model.modules())


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

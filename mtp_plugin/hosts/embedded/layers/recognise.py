"""Recognises transformers modules with exactly the code that the fused layers replace.

A module is recognised by the code of its `forward`, and of the functions of its file that this code
calls, not by its name: families share code under many names, and a class that keeps its name may
change its code. What is not equal, or was changed on the instance (a forward of its own, hooks), is
left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe as experts_of_transformers

from mtp_plugin.hosts.embedded.layers.experts import RouterRule
from mtp_plugin.hosts.embedded.layers.norm import Norm


@dataclass(frozen=True)
class GatedMLP:
    """A feed-forward layer down(silu(gate) * up) without biases."""

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter


@dataclass(frozen=True)
class Attention:
    """Attention with separate query, key and value projections and a rotary embedding."""

    module: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    head_dim: int
    norms: tuple[Norm, Norm] | None
    """Of each query and key head."""
    scaling: float
    layer_idx: int
    eager: Callable[..., Any]
    """The file's attention function for the name ``eager``."""
    extra_arguments: dict[str, Any]
    """Further keyword arguments of its attention function."""


@dataclass(frozen=True)
class Mixture:
    """Sigmoid-routed experts with a correction bias, and a shared feed-forward layer."""

    router_weight: nn.Parameter
    router_bias: torch.Tensor
    rule: RouterRule
    gate_up: nn.Parameter
    """[E, 2 * width, H]."""
    down: nn.Parameter
    """[E, H, width]."""
    shared: GatedMLP


def same_code(left: Callable[..., Any], right: Callable[..., Any]) -> bool:
    """Whether two functions have the same instructions and names, apart from their own names.

    Decorators that declare what they wrap are unwrapped.
    """
    one, other = inspect.unwrap(left), inspect.unwrap(right)
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return False
    defaults = (one.__defaults__, one.__kwdefaults__) == (other.__defaults__, other.__kwdefaults__)
    return defaults and _essence(one.__code__, one.__doc__) == _essence(
        other.__code__, other.__doc__
    )


def _essence(code: CodeType, doc: str | None) -> tuple[Any, ...]:
    constants = [
        _essence(value, None) if isinstance(value, CodeType) else (type(value), value)
        for value in code.co_consts
        if doc is None or value != doc
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, tuple(constants)


@dataclass(frozen=True)
class _Known:
    """Code that the fused layers reproduce."""

    norm: Callable[..., Any]
    mlp: Callable[..., Any]
    layer: Callable[..., Any]
    attention_with_head_norms: Callable[..., Any]
    attention: Callable[..., Any]
    rotations: tuple[Callable[..., Any], ...]
    rotate_half: Callable[..., Any]
    rotary: tuple[Callable[..., Any], ...]
    router: Callable[..., Any]
    experts: Callable[..., Any]
    mixture: Callable[..., Any]
    decoders: tuple[Callable[..., Any], ...]


@cache
def _known() -> _Known:
    # imported late: checkpoints that are never fused do not load files of other families
    from transformers.models.glm4_moe import modeling_glm4_moe as glm
    from transformers.models.qwen2 import modeling_qwen2 as qwen

    return _Known(
        norm=glm.Glm4MoeRMSNorm.forward,
        mlp=glm.Glm4MoeMLP.forward,
        layer=glm.Glm4MoeDecoderLayer.forward,
        attention_with_head_norms=glm.Glm4MoeAttention.forward,
        attention=qwen.Qwen2Attention.forward,
        rotations=(glm.apply_rotary_pos_emb, qwen.apply_rotary_pos_emb),
        rotate_half=glm.rotate_half,
        rotary=(glm.Glm4MoeRotaryEmbedding.forward, qwen.Qwen2RotaryEmbedding.forward),
        router=glm.Glm4MoeTopkRouter.forward,
        experts=glm.Glm4MoeExperts.forward,
        mixture=glm.Glm4MoeMoE.forward,
        decoders=(glm.Glm4MoeModel.forward, qwen.Qwen2Model.forward),
    )


def norm_of(module: object, dtype: torch.dtype) -> Norm | None:
    """The module as a norm over weights of ``dtype``, or None."""
    if not _runs(module, _known().norm):
        return None
    norm = cast(Any, module)
    return Norm(norm.weight, norm.variance_epsilon) if norm.weight.dtype == dtype else None


def mlp_of(module: object, dtype: torch.dtype) -> GatedMLP | None:
    """The module as a gated feed-forward layer of ``dtype``, or None."""
    if not _runs(module, _known().mlp):
        return None
    mlp = cast(Any, module)
    projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    bare = all(_is_linear(p, dtype) and p.bias is None for p in projections)
    if not (bare and _is_silu(mlp.act_fn)):
        return None
    return GatedMLP(*(projection.weight for projection in projections))


def attention_of(module: object, dtype: torch.dtype) -> Attention | None:
    """The module as attention with separate projections, or None."""
    known = _known()
    attention = cast(Any, module)
    if _runs(module, known.attention_with_head_norms):
        has_norms, extra = bool(attention.use_qk_norm), {}
    elif _runs(module, known.attention) and attention.sliding_window is None:
        has_norms, extra = False, {"sliding_window": None}
    else:
        return None
    file = inspect.unwrap(type(attention).forward).__globals__
    if not any(same_code(file["apply_rotary_pos_emb"], one) for one in known.rotations):
        return None
    if not same_code(file["rotate_half"], known.rotate_half):
        return None
    inner = (attention.q_proj, attention.k_proj, attention.v_proj)
    if not all(_is_linear(projection, dtype) for projection in (*inner, attention.o_proj)):
        return None
    if len({projection.bias is None for projection in inner}) > 1:
        return None
    norms = None
    if has_norms:
        found = (norm_of(attention.q_norm, dtype), norm_of(attention.k_norm, dtype))
        if found[0] is None or found[1] is None:
            return None
        norms = (found[0], found[1])
    return Attention(
        module=attention,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        output=attention.o_proj,
        head_dim=attention.head_dim,
        norms=norms,
        scaling=attention.scaling,
        layer_idx=attention.layer_idx,
        eager=file["eager_attention_forward"],
        extra_arguments=extra,
    )


def mixture_of(module: object, dtype: torch.dtype) -> Mixture | None:
    """The module as a mixture of experts, or None."""
    known = _known()
    if not _runs(module, known.mixture):
        return None
    mixture = cast(Any, module)
    router, experts = mixture.gate, mixture.experts
    shared = mlp_of(mixture.shared_experts, dtype)
    if shared is None or not _runs(router, known.router) or not _runs(experts, known.experts):
        return None
    gated = (experts.has_gate, experts.is_concatenated) == (True, True)
    bare = (experts.has_bias, experts.is_transposed) == (False, False)
    gate = type(experts)._apply_gate is experts_of_transformers._default_apply_gate
    typed = experts.gate_up_proj.dtype == experts.down_proj.dtype == router.weight.dtype == dtype
    bias = router.e_score_correction_bias
    if not (gated and bare and gate and typed and _is_silu(experts.act_fn)):
        return None
    if bias.dtype != torch.float32:
        return None
    return Mixture(
        router_weight=router.weight,
        router_bias=bias,
        rule=RouterRule(
            top_k=router.top_k,
            num_groups=router.num_group,
            topk_group=router.topk_group,
            normalise=bool(router.norm_topk_prob),
            scale=float(router.routed_scaling_factor),
        ),
        gate_up=experts.gate_up_proj,
        down=experts.down_proj,
        shared=shared,
    )


def is_decoder_layer(module: object) -> bool:
    """Whether the module is x + attention(norm(x)), then x + feed-forward(norm(x))."""
    return _runs(module, _known().layer)


def is_decoder(module: object) -> bool:
    """Whether the module applies embedding, layers with one causal mask, and a norm."""
    if getattr(module, "has_sliding_layers", False):
        return False
    return any(_runs(module, forward) for forward in _known().decoders)


def is_rotary(module: object) -> bool:
    """Whether the module returns cosines and sines whose two halves are equal."""
    return any(_runs(module, forward) for forward in _known().rotary)


def is_embedding(module: object) -> bool:
    """Whether the module looks up rows of its weight and does nothing else."""
    return _is_untouched(module) and type(module) is nn.Embedding and module.max_norm is None


def _runs(module: object, forward: Callable[..., Any]) -> bool:
    return _is_untouched(module) and same_code(type(cast(nn.Module, module)).forward, forward)


def _is_untouched(module: object) -> bool:
    if not isinstance(module, nn.Module):
        return False
    own = "forward" in vars(module)
    return not (own or module._forward_hooks or module._forward_pre_hooks)


def _is_linear(module: object, dtype: torch.dtype) -> bool:
    bare = _is_untouched(module) and type(module) is nn.Linear
    return bare and cast(nn.Linear, module).weight.dtype == dtype


def _is_silu(module: object) -> bool:
    return _is_untouched(module) and type(module) in (SiLUActivation, nn.SiLU)

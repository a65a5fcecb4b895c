"""The modules of a decoder layer over flat rows [T, H], fused or run by transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtp_plugin.hosts.embedded.layers import experts
from mtp_plugin.hosts.embedded.layers.mlp import silu_mul
from mtp_plugin.hosts.embedded.layers.norm import Norm, add_rms_norm, rms_norm
from mtp_plugin.hosts.embedded.layers.packing import Packer
from mtp_plugin.hosts.embedded.layers.recognise import Attention, GatedMLP, Mixture
from mtp_plugin.hosts.embedded.layers.rotary import Angles, HeadLayout, HeadNorms, rotate
from mtp_plugin.infer.language_model import cache_argument, transformers_arguments
from mtp_plugin.ops.backend import Backend

Rows = torch.Tensor
"""[T, H]."""


class Rotary:
    """A rotary embedding whose two halves are equal, with a table of its values by position.

    Only the rope type ``default`` has the same angles at every length; other types are computed at
    each call.

    Args:
        module: the target's rotary embedding.
        num_positions: rows of the table.
        like: gives dtype and device.
    """

    def __init__(self, module: nn.Module, num_positions: int, like: torch.Tensor) -> None:
        self.module = module
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        if getattr(module, "rope_type", None) == "default":
            every = torch.arange(num_positions, device=like.device)[None]
            cos, sin = module(like, every)
            n = cos.shape[-1] // 2
            self._table = (cos[0, :, :n].contiguous(), sin[0, :, :n].contiguous())

    def angles(self, position_ids: torch.Tensor, like: Rows) -> Angles:
        """Of positions [1, T]."""
        if self._table is not None:
            cos, sin = self._table
            return Angles(cos, sin, cos.shape[1], position_ids[0])
        cos, sin = self.module(like, position_ids)
        return Angles(cos[0], sin[0], cos.shape[-1] // 2, None)


class ForwardPass:
    """Values shared by the layers of one forward pass, computed at first use.

    Args:
        position_ids: [1, T].
        attn_metadata: as the layers of transformers get it. Where it has a method
            ``attend(layer_idx, q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv], scaling)``, fused
            attention calls it and gets [T, Hq, Dv]; otherwise it does what transformers does, with
            ``model_kwargs()``.
        rotary: the target's rotary embedding; None where no layer is fused.
        rotary_module: the same for layers that are not fused.
        like: rows [T, H] of the pass, for dtype and device.
        mask: makes the attention mask from the keyword arguments; None: they have it.
    """

    def __init__(
        self,
        position_ids: torch.Tensor,
        attn_metadata: Any,
        rotary: Rotary | None,
        rotary_module: nn.Module,
        like: Rows,
        mask: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.position_ids = position_ids
        self.attend: Callable[..., torch.Tensor] | None = getattr(attn_metadata, "attend", None)
        self._metadata = attn_metadata
        self._rotary = rotary
        self._rotary_module = rotary_module
        self._like = like
        self._mask = mask

    @cached_property
    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of transformers' decoder layers, but for the position embeddings."""
        kwargs: dict[str, Any] = dict(self._metadata.model_kwargs())
        if self._mask is not None:
            kwargs["attention_mask"] = self._mask(kwargs)
        return transformers_arguments(**kwargs, position_ids=self.position_ids)

    @cached_property
    def position_embeddings(self) -> Any:
        """Position embeddings of transformers' decoder layers."""
        return self._rotary_module(self._like, self.position_ids)

    @cached_property
    def angles(self) -> Angles:
        """Angles for the fused rotation."""
        return cast(Rotary, self._rotary).angles(self.position_ids, self._like)


class FusedAttention:
    """Attention with one QKV product, and one launch for head norms and rotation."""

    def __init__(self, found: Attention, backend: Backend, packer: Packer) -> None:
        self._found = found
        self._backend = backend
        inner = (found.query, found.key, found.value)
        self._weight = packer.pack([projection.weight for projection in inner])
        biases = [projection.bias for projection in inner if projection.bias is not None]
        self._bias = packer.pack(biases) if biases else None
        self._layout = HeadLayout(
            num_q_heads=found.query.out_features // found.head_dim,
            num_kv_heads=found.key.out_features // found.head_dim,
            head_dim=found.head_dim,
        )
        self._norms = None
        if found.norms is not None:
            q, k = found.norms
            self._norms = HeadNorms(q.weight, k.weight, q.eps, k.eps)

    def __call__(self, x: Rows, step: ForwardPass, output_rows: torch.Tensor | None = None) -> Rows:
        """[T, H] -> [T, H], or [N, H] of the given rows."""
        qkv = functional.linear(x, self._weight, self._bias)
        rotate(qkv, self._layout, step.angles, self._norms, backend=self._backend)
        queries, keys, values = self._layout.split(qkv)
        found = self._found
        if step.attend is not None:
            out = step.attend(found.layer_idx, queries, keys, values, found.scaling)
        else:
            out = self._attend(queries, keys, values, step)
        flat = out.reshape(x.shape[0], -1)
        if output_rows is not None:
            flat = flat[output_rows]
        return functional.linear(flat, found.output.weight, found.output.bias)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: ForwardPass
    ) -> torch.Tensor:
        """Attend as transformers' attention modules do, with a batch of one."""
        found = self._found
        q, k, v = (heads[None].transpose(1, 2) for heads in (queries, keys, values))
        kwargs = dict(step.model_kwargs)
        cache, mask = kwargs.pop(cache_argument()), kwargs.pop("attention_mask")
        if cache is not None:
            k, v = cache.update(k, v, found.layer_idx)
        config = cast(Any, found.module).config
        function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, found.eager)
        out, _ = function(
            found.module,
            q,
            k,
            v,
            mask,
            dropout=0.0,
            scaling=found.scaling,
            **found.extra_arguments,
            **kwargs,
        )
        return out[0]  # type: ignore[no-any-return]


class UnfusedAttention:
    """The attention module of transformers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Rows, step: ForwardPass, output_rows: torch.Tensor | None = None) -> Rows:
        """As `FusedAttention`."""
        out, _ = self._module(
            hidden_states=x[None],
            position_embeddings=step.position_embeddings,
            **step.model_kwargs,
        )
        return out[0] if output_rows is None else out[0][output_rows]  # type: ignore[no-any-return]


class FusedMLP:
    """A feed-forward layer with one product for gate and up."""

    def __init__(self, found: GatedMLP, backend: Backend, packer: Packer) -> None:
        self._backend = backend
        self._gate_up = packer.pack([found.gate, found.up])
        self._down = found.down

    def __call__(self, x: Rows) -> Rows:
        active = silu_mul(functional.linear(x, self._gate_up), backend=self._backend)
        return functional.linear(active, self._down)


class FusedMixture:
    """A mixture of experts with shared experts, without device-to-host copies.

    A shared layer as wide as an expert becomes one more expert that every row takes.
    """

    def __init__(self, found: Mixture, backend: Backend, packer: Packer) -> None:
        self._router_weight = found.router_weight
        self._router_bias = found.router_bias
        self._rule = found.rule
        self._backend = backend
        self._shared_mlp: FusedMLP | None = None
        self._shared = int(found.shared.down.shape[1] == found.down.shape[2])
        if self._shared:
            shared = found.shared
            gate_up = packer.pack([found.gate_up, shared.gate, shared.up])
            down = packer.pack([found.down, shared.down])
            self._gate_up = gate_up.view(-1, *found.gate_up.shape[1:])
            self._down = down.view(-1, *found.down.shape[1:])
        else:
            self._shared_mlp = FusedMLP(found.shared, backend, packer)
            self._gate_up, self._down = found.gate_up, found.down

    def __call__(self, x: Rows) -> Rows:
        rule, backend = self._rule, self._backend
        logits = experts.router_logits(x, self._router_weight, backend=backend)
        blocks = experts.assign(
            logits,
            self._router_bias,
            rule,
            shared=self._shared,
            block_rows=experts.block_rows_for(x.shape[0]),
            backend=backend,
        )
        active = experts.gate_up(x, self._gate_up, blocks, backend=backend)
        parts = experts.down(active, self._down, blocks, backend=backend)
        out = experts.combine(parts, top_k=rule.top_k, shared=self._shared, backend=backend)
        return out if self._shared_mlp is None else out + self._shared_mlp(x)


class UnfusedFeedForward:
    """The feed-forward module of transformers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Rows) -> Rows:
        return self._module(x[None])[0]  # type: ignore[no-any-return]


class FusedLayer:
    """A decoder layer whose residual additions are fused into the following norms.

    The hidden state is ``residual + delta``; the next norm adds them.
    """

    def __init__(
        self,
        input_norm: Norm,
        attention: FusedAttention | UnfusedAttention,
        inner_norm: Norm,
        feed_forward: FusedMLP | FusedMixture | UnfusedFeedForward,
        backend: Backend,
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._inner_norm = inner_norm
        self._feed_forward = feed_forward
        self._backend = backend

    def __call__(
        self,
        delta: Rows | None,
        residual: Rows,
        step: ForwardPass,
        output_rows: torch.Tensor | None = None,
    ) -> tuple[Rows | None, Rows]:
        """(delta, residual) after the layer, each [T, H], or [N, H] of the given rows."""
        normed, residual = normed_stream(self._input_norm, delta, residual, self._backend)
        attended = self._attention(normed, step, output_rows)
        if output_rows is not None:
            residual = residual[output_rows]
            if output_rows.shape[0] == 0:
                return None, residual
        normed, residual = normed_stream(self._inner_norm, attended, residual, self._backend)
        return self._feed_forward(normed), residual


class UnfusedLayer:
    """The decoder layer of transformers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(
        self, delta: Rows | None, residual: Rows, step: ForwardPass
    ) -> tuple[Rows | None, Rows]:
        x = residual if delta is None else residual + delta
        out = self._module(
            x[None], position_embeddings=step.position_embeddings, **step.model_kwargs
        )
        return None, out[0]


def normed_stream(
    norm: Norm, delta: Rows | None, residual: Rows, backend: Backend
) -> tuple[Rows, Rows]:
    """(the stream normed, the stream), each [T, H]."""
    if delta is None:
        return rms_norm(residual, norm.weight, norm.eps, backend=backend), residual
    return add_rms_norm(delta, residual, norm.weight, norm.eps, backend=backend)

"""Fuses the layers of a loaded model: the same weights, run in fewer kernel launches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask

from mtp_plugin.hosts.embedded.layers.fused_layers import (
    ForwardPass,
    FusedAttention,
    FusedLayer,
    FusedMixture,
    FusedMLP,
    Rotary,
    Rows,
    UnfusedAttention,
    UnfusedFeedForward,
    UnfusedLayer,
    normed_stream,
)
from mtp_plugin.hosts.embedded.layers.norm import Norm, join_norms
from mtp_plugin.hosts.embedded.layers.packing import Packer
from mtp_plugin.hosts.embedded.layers.recognise import (
    attention_of,
    is_decoder,
    is_decoder_layer,
    is_embedding,
    is_rotary,
    mixture_of,
    mlp_of,
    norm_of,
)
from mtp_plugin.hosts.embedded.models.loader import LoadedModel
from mtp_plugin.hosts.embedded.models.mtp_layer import MTPLayer, TransformersAttention
from mtp_plugin.infer.language_model import transformers_arguments
from mtp_plugin.ops.backend import Backend


@dataclass(frozen=True)
class FusionReport:
    """Names of the fused modules and of the others: layers, attention, feed-forward, norms."""

    fused: tuple[str, ...]
    """A fused layer has fused norms and residual additions; inner modules are listed separately."""
    left: tuple[str, ...]
    """Modules that run the transformers code."""
    kernels: str
    """Implementation of the ops: ``torch`` or ``triton``."""

    def __str__(self) -> str:
        """Return one line, such as `fused with triton: 36 modules; left: 2 self_attn, 1 norm`."""
        kinds = Counter(name.rstrip(".0123456789").rpartition(".")[2] for name in self.left)
        left = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"fused with {self.kernels}: {len(self.fused)} modules; left: {left or 'none'}"


class FusedDecoder:
    """Runs the target without its head: embedding, layers, final norm."""

    def __init__(
        self,
        decoder: Any,
        layers: list[FusedLayer | UnfusedLayer],
        norm: Norm | None,
        rotary: Rotary | None,
        backend: Backend,
    ) -> None:
        self._decoder = decoder
        self._layers = layers
        self._norm = norm
        self._rotary = rotary
        self._backend = backend

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attn_metadata: TransformersAttention,
    ) -> Rows:
        """Implement `LoadedModel.forward_target`."""
        embedded = self._decoder.embed_tokens(input_ids)

        def mask(kwargs: dict[str, Any]) -> Any:
            return create_causal_mask(
                config=self._decoder.config,
                inputs_embeds=embedded[None],
                attention_mask=kwargs["attention_mask"],
                position_ids=position_ids,
                **transformers_arguments(past_key_values=kwargs["past_key_values"]),
            )

        step = ForwardPass(
            position_ids, attn_metadata, self._rotary, self._decoder.rotary_emb, embedded, mask
        )
        delta: Rows | None = None
        residual: Rows = embedded
        for layer in self._layers:
            delta, residual = layer(delta, residual, step)
        if self._norm is not None:
            return normed_stream(self._norm, delta, residual, self._backend)[0]
        return self._decoder.norm(residual if delta is None else residual + delta)  # type: ignore[no-any-return]


class FusedMTPLayer(nn.Module):
    """An MTP layer with a fused decoder layer; it is called like `MTPLayer`.

    Args:
        layer: the original layer, which has the weights and the head.
        block: its decoder layer, fused.
        norms: of the embedding, of the hidden state, and the final one.
        rotary: the target's rotary embedding.
        backend: implementation of these norms.
    """

    takes_output_rows = True

    def __init__(
        self,
        layer: MTPLayer,
        block: FusedLayer,
        norms: tuple[Norm, Norm, Norm],
        rotary: Rotary | None,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._block = block
        self._enorm, self._hnorm, self._norm = norms
        self._fused_rotary = rotary
        self._backend = backend

    @property
    def layer_idx(self) -> int:
        """Index of the layer in the KV pools."""
        return self.layer.layer_idx

    @property
    def rotary(self) -> nn.Module:
        """The target's rotary embedding."""
        return self.layer.rotary

    def forward(
        self,
        *,
        embed_tokens: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        attn_metadata: TransformersAttention,
        output_rows: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Run as `MTPLayer.forward`; rows that are not returned skip the feed-forward layer."""
        traits = self.layer.traits
        gathers = is_embedding(embed_tokens)
        joined = join_norms(
            cast(nn.Embedding, embed_tokens).weight if gathers else embed_tokens(input_ids),
            input_ids if gathers else None,
            hidden_states,
            self._enorm,
            self._hnorm,
            embedding_first=traits.concat == "embed_hidden",
            backend=self._backend,
        )
        x = functional.linear(joined, self.layer.eh_proj.weight)
        rope_ids = position_ids + 1 if traits.position == "token" else position_ids
        step = ForwardPass(rope_ids, attn_metadata, self._fused_rotary, self.rotary, x)
        delta, residual = self._block(None, x, step, output_rows)
        if traits.recycle == "post_norm":
            return normed_stream(self._norm, delta, residual, self._backend)[0]
        return residual if delta is None else residual + delta

    def shared_head(
        self,
        hidden: torch.Tensor,
        lm_head: nn.Module,
        attn_metadata: TransformersAttention,
        return_all: bool = False,
    ) -> torch.Tensor:
        return self.layer.shared_head(hidden, lm_head, attn_metadata, return_all)


@dataclass(frozen=True, eq=False)
class FusedModel(LoadedModel):
    """A loaded model that runs fused layers; see `fuse`."""

    decoder: FusedDecoder | None
    """None if the target's decoder was not recognised."""
    report: FusionReport

    def forward_target(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attn_metadata: TransformersAttention,
    ) -> torch.Tensor:
        if self.decoder is None:
            return super().forward_target(input_ids, position_ids, attn_metadata)
        return self.decoder(input_ids, position_ids, attn_metadata)


def fuse(
    model: LoadedModel,
    *,
    kernels: str = "auto",
    max_positions: int | None = None,
) -> FusedModel:
    """Fuse every layer whose code is recognised; the others run unchanged.

    The model's modules remain usable, but their weights become views of concatenated weights: do
    not move or cast the model afterwards.

    Args:
        model: in its final dtype, on its final device.
        kernels: ``auto``, ``triton`` or ``reference``, see `Backend.of`. With torch,
            mixture-of-experts layers are not fused.
        max_positions: number of positions of the rotary table; default: the model's limit plus one.

    Returns:
        A model with a report of the fused modules, which may be none.

    Raises:
        ConfigError: kernels that cannot run.
    """
    weight = cast(torch.Tensor, model.embed_tokens.weight)
    backend = Backend.of(kernels, weight.device)
    positions = max_positions or model.facts.max_position_embeddings + 1
    return _Fuser(model, backend, weight, positions).run()


class _Fuser:
    """State of one call of `fuse`: collects the names of fused and other modules."""

    def __init__(
        self, model: LoadedModel, backend: Backend, weight: torch.Tensor, positions: int
    ) -> None:
        self._model = model
        self._backend = backend
        self._weight = weight
        self._positions = positions
        self._packer = Packer()
        self._fused: list[str] = []
        self._left: list[str] = []
        self._rotary: Rotary | None = None

    @torch.no_grad()
    def run(self) -> FusedModel:
        model = self._model
        decoder: Any = model.target.get_decoder()
        fused_decoder = None
        if is_rotary(decoder.rotary_emb):
            self._rotary = Rotary(decoder.rotary_emb, self._positions, self._weight[:1])
        if is_decoder(decoder):
            layers = [
                self._layer(layer, f"layers.{i}") or UnfusedLayer(layer)
                for i, layer in enumerate(decoder.layers[: decoder.config.num_hidden_layers])
            ]
            norm = norm_of(decoder.norm, self._weight.dtype)
            self._record("norm", norm is not None)
            fused_decoder = FusedDecoder(decoder, layers, norm, self._rotary, self._backend)
        else:
            self._record("decoder", False)
        mtp_layers = [
            self._mtp_layer(layer, f"mtp_layers.{depth}")
            for depth, layer in enumerate(model.mtp_layers)
        ]
        return FusedModel(
            target=model.target,
            mtp_layers=nn.ModuleList(mtp_layers).eval(),
            facts=model.facts,
            family=model.family,
            decoder=fused_decoder,
            report=FusionReport(tuple(self._fused), tuple(self._left), self._backend.value),
        )

    def _record(self, name: str, fused: bool) -> None:
        (self._fused if fused else self._left).append(name)

    def _layer(self, layer: nn.Module, name: str) -> FusedLayer | None:
        dtype = self._weight.dtype
        if is_decoder_layer(layer):
            modules = cast(Any, layer)
            norms = [
                norm_of(norm, dtype)
                for norm in (modules.input_layernorm, modules.post_attention_layernorm)
            ]
            if norms[0] is not None and norms[1] is not None:
                self._record(name, True)
                return FusedLayer(
                    norms[0],
                    self._attention(modules.self_attn, f"{name}.self_attn"),
                    norms[1],
                    self._feed_forward(modules.mlp, f"{name}.mlp"),
                    self._backend,
                )
        self._record(name, False)
        return None

    def _attention(self, module: nn.Module, name: str) -> FusedAttention | UnfusedAttention:
        found = attention_of(module, self._weight.dtype) if self._rotary is not None else None
        self._record(name, found is not None)
        if found is None:
            return UnfusedAttention(module)
        return FusedAttention(found, self._backend, self._packer)

    def _feed_forward(
        self, module: nn.Module, name: str
    ) -> FusedMLP | FusedMixture | UnfusedFeedForward:
        dtype = self._weight.dtype
        mlp = mlp_of(module, dtype)
        if mlp is not None:
            self._record(name, True)
            return FusedMLP(mlp, self._backend, self._packer)
        # the torch reference of expert products synchronizes with the device
        mixture = mixture_of(module, dtype) if self._backend is Backend.TRITON else None
        self._record(name, mixture is not None)
        if mixture is None:
            return UnfusedFeedForward(module)
        return FusedMixture(mixture, self._backend, self._packer)

    def _mtp_layer(self, layer: nn.Module, name: str) -> nn.Module:
        dtype = self._weight.dtype
        if isinstance(layer, MTPLayer):
            norms = [norm_of(norm, dtype) for norm in (layer.enorm, layer.hnorm, layer.norm)]
            block = self._layer(layer.block, f"{name}.block")
            if block is not None and all(norm is not None for norm in norms):
                self._record(name, True)
                layer_norms = cast("tuple[Norm, Norm, Norm]", tuple(norms))
                return FusedMTPLayer(layer, block, layer_norms, self._rotary, self._backend)
        self._record(name, False)
        return layer

"""Builds block configs, MTP layers and tensor sources from a family's entry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from mtp_plugin.errors import CheckpointError
from mtp_plugin.hosts.embedded.models.families import MTPFamily
from mtp_plugin.hosts.embedded.models.mtp_layer import MTPLayer

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of a module is made of checkpoint tensors."""

    module_key: str
    """Key in the module's state dict."""
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Checkpoint names: one, or one (two for gate and up) per expert in the order of experts."""
    source_shape: tuple[int, ...]
    fuse: Literal["copy", "experts", "gate_up_experts"]

    def assemble(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The module's tensor [shape] from the checkpoint's."""
        parts = [stored[name] for name in self.sources]
        if self.fuse == "copy":
            return parts[0]
        if self.fuse == "gate_up_experts":
            parts = [torch.cat(pair, dim=0) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return torch.stack(parts)

    def take_apart(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors from the module's; undoes `assemble`."""
        if self.fuse == "copy":
            return {self.sources[0]: tensor.clone()}
        parts = list(tensor)
        if self.fuse == "gate_up_experts":
            parts = [half for part in parts for half in part.chunk(2, dim=0)]
        return {name: part.clone() for name, part in zip(self.sources, parts, strict=True)}


def block_config(config: PreTrainedConfig, family: MTPFamily, num_layers: int) -> PreTrainedConfig:
    """A copy of the target's config under which its layer class builds MTP blocks.

    The blocks take the indices after the target's layers, because that index addresses the KV
    pools; so everything that is listed per layer grows by `num_layers` full-attention entries.
    """
    extended = copy.deepcopy(config)
    for key, value in family.block_config:
        setattr(extended, key, copy.copy(value))
    if getattr(config, "layer_types", None) is not None:
        extended.layer_types = [*config.layer_types, *[FULL_ATTENTION] * num_layers]
    extended.num_hidden_layers = config.num_hidden_layers + num_layers
    return extended


def target_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that runs the target of a config."""
    return cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def without_storage(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the target on the meta device: classes, names and shapes without weights."""
    with torch.device("meta"):
        return target_class(config)(config)


def build_layers(
    target: PreTrainedModel, config: PreTrainedConfig, family: MTPFamily, num_layers: int
) -> nn.ModuleList:
    """Build MTP layers of the target's classes, without storage.

    Args:
        target: gives the classes of layer and norm, and the rotary embedding to share.
        config: the target's full config.
    """
    decoder: Any = target.get_decoder()
    extended = block_config(config, family, num_layers)
    with torch.device("meta"):
        return nn.ModuleList(
            MTPLayer(
                extended,
                block_class=type(decoder.layers[-1]),
                norm_class=type(decoder.norm),
                layer_idx=config.num_hidden_layers + depth,
                traits=family.traits,
                rotary=decoder.rotary_emb,
            )
            for depth in range(num_layers)
        )


def plan_target(target: PreTrainedModel, stored: Collection[str]) -> tuple[TensorPlan, ...]:
    """Map each tensor of the target to its checkpoint tensors; a tied head has none."""
    tied = target.config.tie_word_embeddings
    plans = plan_tensors(target, lambda key: key, stored)
    return tuple(plan for plan in plans if not (tied and plan.module_key == "lm_head.weight"))


def plan_layer(
    layer: nn.Module,
    family: MTPFamily,
    *,
    num_hidden_layers: int,
    depth: int,
    stored: Collection[str],
) -> tuple[TensorPlan, ...]:
    """Map each tensor of an MTP layer to its checkpoint tensors."""

    def name_of(key: str) -> str:
        return family.names.of(key, layer=num_hidden_layers + depth, depth=depth)

    return tuple(plan_tensors(layer, name_of, stored))


def plan_tensors(
    module: nn.Module, name_of: Callable[[str], str], stored: Collection[str]
) -> Iterator[TensorPlan]:
    """Map each tensor of a module to its checkpoint tensors.

    Experts are one tensor in the module; checkpoints store them one by one, or fused where `stored`
    has the fused name.

    Raises:
        CheckpointError: more experts than `stored` has.
    """
    for key, tensor in module.state_dict().items():
        name = name_of(key)
        shape = tuple(tensor.shape)
        experts, _, projection = name.rpartition(".")
        if name in stored or not experts.endswith(".experts"):
            yield TensorPlan(key, shape, (name,), shape, "copy")
            continue
        first = "gate_proj" if projection == "gate_up_proj" else projection
        last = f"{experts}.{shape[0] - 1}.{first}.weight"
        if stored and last not in stored:
            raise CheckpointError(f"expected {shape[0]} experts in {experts}, there is no {last}")
        if projection == "gate_up_proj":
            sources = tuple(
                f"{experts}.{expert}.{half}.weight"
                for expert in range(shape[0])
                for half in ("gate_proj", "up_proj")
            )
            source_shape = (shape[1] // 2, shape[2])
            yield TensorPlan(key, shape, sources, source_shape, "gate_up_experts")
        else:
            sources = tuple(f"{experts}.{expert}.{projection}.weight" for expert in range(shape[0]))
            yield TensorPlan(key, shape, sources, shape[1:], "experts")

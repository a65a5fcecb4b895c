"""Table of MTP model families: traits of the draft head, tensor names, special cases.

Nothing is inferred from a checkpoint. A family without an entry is refused with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mtp_plugin.checkpoint import FAMILIES as STORED
from mtp_plugin.config.messages import got
from mtp_plugin.errors import UnsupportedModelError


@dataclass(frozen=True)
class ModelFacts:
    """Facts from a checkpoint's JSON files."""

    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    """Number of MTP layers the config declares (D)."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else from config.json; empty if neither has them."""
    dtype: torch.dtype
    """The config's dtype; default float32."""


@dataclass(frozen=True)
class DraftTraits:
    """Structure of a family's MTP head.

    A wrong trait does not change the output, it only lowers acceptance; every value is taken from
    the family's training and serving code.
    """

    concat: Literal["embed_hidden", "hidden_embed"]
    """Order of the two normed halves that `eh_proj` reads."""
    target_state: Literal["post_norm", "pre_norm"]
    """Hidden state of the target that the first depth reads: after or before the final norm."""
    recycle: Literal["post_norm", "pre_norm"]
    """Hidden state that an MTP layer passes to the next depth: after or before its last norm."""
    chain: Literal["output", "target_shift", "none"] = "output"
    """Hidden states that depth d > 1 reads."""
    head: Literal["shared", "own"] = "shared"
    """Whether the target's LM head or a head per depth gives the logits."""
    position: Literal["state", "token"] = "state"
    """Whether the pair (state i, token i+1) takes position id i or i+1."""


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names of an MTP layer's modules.

    `{layer}` is the number of target layers plus the depth, `{depth}` counts MTP layers from 0.
    """

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    block: str
    """Name of the decoder layer; the layer's own names follow after a dot."""

    def of(self, module_key: str, *, layer: int, depth: int) -> str:
        """Checkpoint name of an `MTPLayer` state-dict key, say `block.self_attn.q_proj.weight`."""
        module, rest = module_key.split(".", 1)
        template: str = getattr(self, module)
        return f"{template.format(layer=layer, depth=depth)}.{rest}"


@dataclass(frozen=True)
class MTPFamily:
    """One model family that runs here."""

    model_type: str
    traits: DraftTraits
    target_model_type: str
    """The transformers model type that runs the target."""
    names: TensorNames
    ignorable: tuple[str, ...] = ()
    """Stored copies of tensors that the MTP layers share with the target."""
    block_config: tuple[tuple[str, Any], ...] = field(default=())
    """Config values under which the target's layer class builds an MTP block."""
    partial_rotary: bool = False
    """Whether rotary positions may apply to a share of a head."""

    @property
    def count_key(self) -> str | None:
        """Config key with the number of MTP layers; None where the family's configs have none."""
        return next(iter(STORED[self.model_type].keys), None)

    @property
    def default_count(self) -> int:
        """Number of MTP layers where the config does not say."""
        return STORED[self.model_type].default


_DEEPSEEK_NAMES = TensorNames(
    enorm="model.layers.{layer}.enorm",
    hnorm="model.layers.{layer}.hnorm",
    eh_proj="model.layers.{layer}.eh_proj",
    norm="model.layers.{layer}.shared_head.norm",
    block="model.layers.{layer}",
)
_DEEPSEEK_COPIES = (
    "model.layers.{layer}.embed_tokens.weight",
    "model.layers.{layer}.shared_head.head.weight",
)
_EMBED_FIRST = DraftTraits(concat="embed_hidden", target_state="post_norm", recycle="post_norm")

FAMILIES: dict[str, MTPFamily] = {
    family.model_type: family
    for family in (
        MTPFamily(
            model_type="glm4_moe",
            traits=_EMBED_FIRST,
            target_model_type="glm4_moe",
            names=_DEEPSEEK_NAMES,
            ignorable=_DEEPSEEK_COPIES,
            # MTP blocks are always mixtures of experts, also after dense targets
            block_config=(("first_k_dense_replace", 0),),
            partial_rotary=True,
        ),
        MTPFamily(
            model_type="deepseek_v3",
            traits=_EMBED_FIRST,
            target_model_type="deepseek_v3",
            names=_DEEPSEEK_NAMES,
            ignorable=_DEEPSEEK_COPIES,
            block_config=(("first_k_dense_replace", 0),),
        ),
        MTPFamily(
            model_type="qwen3_next",
            traits=_EMBED_FIRST,
            target_model_type="qwen3_next",
            names=TensorNames(
                enorm="mtp.pre_fc_norm_embedding",
                hnorm="mtp.pre_fc_norm_hidden",
                eh_proj="mtp.fc",
                norm="mtp.norm",
                block="mtp.layers.{depth}",
            ),
            block_config=(("mlp_only_layers", []), ("decoder_sparse_step", 1)),
            partial_rotary=True,
        ),
        MTPFamily(
            model_type="mimo",
            traits=DraftTraits(
                concat="hidden_embed", target_state="post_norm", recycle="post_norm"
            ),
            # transformers has no mimo class; the target is a Qwen2 with the same config fields
            target_model_type="qwen2",
            names=TensorNames(
                enorm="model.mtp_layers.{depth}.token_layernorm",
                hnorm="model.mtp_layers.{depth}.hidden_layernorm",
                eh_proj="model.mtp_layers.{depth}.input_proj",
                norm="model.mtp_layers.{depth}.final_layernorm",
                block="model.mtp_layers.{depth}",
            ),
        ),
    )
}
"""Families that run, by `model_type`."""

NOT_RUNNABLE: dict[str, str] = {
    "bailing_hybrid": "its target has linear-attention layers",
    "deepseek_v32": "its layers use a sparse attention indexer",
    "deepseek_v4": "its MTP head sums projections of multi-stream residual states",
    "ernie4_5_moe": "its MTP head has no norm before the LM head",
    "gemma4_assistant": "its drafter reads the target's KV cache and has none of its own",
    "glm_moe_dsa": "its layers use a sparse attention indexer",
    "hy_v3": "its layer class has not been tried here",
    "inkling": "its MTP blocks have convolution states and a chain norm of their own",
    "longcat_flash": "its decoder layers hold two attention blocks",
    "mimo_v2_flash": "its layers use sliding windows and its depths are not chained",
    "minimax_m3_vl": "its MTP layers use sparse attention",
    "nemotron_h": "its target has recurrent layers and its MTP head two kinds of sublayer",
    "qwen3_5": "its target has linear-attention layers",
    "qwen3_5_moe": "its target has linear-attention layers",
    "step3p5": "it has an own LM head per depth and reads pre-norm states",
    "step3p7": "it has an own LM head per depth and reads pre-norm states",
}
"""Families known to carry MTP layers that do not run here, each with the reason."""


def family_of(model_type: str) -> MTPFamily:
    """Return the entry of a `model_type`.

    Raises:
        UnsupportedModelError: the family is unknown, or known and not runnable.
    """
    family = FAMILIES.get(model_type)
    if family is not None:
        return family
    runnable = ", ".join(sorted(FAMILIES))
    reason = NOT_RUNNABLE.get(model_type)
    if reason is not None:
        raise UnsupportedModelError(
            f"model family {got(model_type)} carries MTP layers but does not run here: {reason}; "
            f"families that run: {runnable}"
        )
    raise UnsupportedModelError(
        f"model family {got(model_type)} is not in the family table; families that run: {runnable}"
    )

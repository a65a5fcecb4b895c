"""Table of model families with MTP layers: names of their tensors, and how the embedded executor
runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtp_plugin.config.messages import got
from mtp_plugin.errors import UnsupportedModelError

MODULES = ("enorm", "hnorm", "eh_proj", "norm")
"""Modules of an MTP layer in addition to its block, in the embedded executor."""


@dataclass(frozen=True)
class DraftTraits:
    """Structure of a family's MTP head.

    A wrong trait does not change the output, it only lowers acceptance; every value is taken from
    the family's training and serving code.
    """

    concat: Literal["embed_hidden", "hidden_embed"]
    """Order of the two normed halves that `eh_proj` reads."""
    target_state: Literal["post_norm", "pre_norm"] = "post_norm"
    """Hidden state of the target that the first depth reads: after or before the final norm."""
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    """Hidden state that an MTP layer passes to the next depth: after or before its last norm."""
    chain: Literal["output", "target_shift", "none"] = "output"
    """Hidden states that depth d > 1 reads."""
    head: Literal["shared", "own"] = "shared"
    """Whether the target's LM head or a head per depth gives the logits."""
    position: Literal["state", "token"] = "state"
    """Whether the pair (state i, token i+1) takes position id i or i+1."""


@dataclass(frozen=True)
class Family:
    """Names of a family's MTP tensors, as vLLM reads them, without a prefix like `model.`."""

    pattern: str
    """Begin of every name; the group is the number of the layer."""
    own: tuple[str, ...] = ()
    """Modules of an MTP layer in addition to its block; `{n}` is the number of the layer."""
    once: tuple[str, ...] = ()
    """Modules that all MTP layers share."""
    block: str | None = None
    """Begin of the names of a block like the target's layers; None: a block of another kind."""
    prefix: str = "model."
    """What precedes all of these names."""
    is_absolute: bool = False
    """Whether MTP layers are numbered after the target's layers."""
    keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    """Keys of `config.json` with the number of MTP layers."""
    default_count: int = 0
    """Number of MTP layers without such a key."""
    reads: Literal["all", "first", "sublayers"] = "all"
    """What vLLM reads: every layer, the first one, or numbered sublayers of a single layer."""
    notices: Literal["norms", "layers", "tensors"] = "norms"
    """Missing tensors that vLLM refuses: norms if nothing is quantized, whole layers, or any."""
    ties_by_default: bool = False
    """Whether the head is the embedding where the config does not say it."""
    has_plain_projection: bool = True
    """Whether vLLM never quantizes the projection of embedding and hidden state."""
    model_type: str = ""

    @property
    def count_key(self) -> str | None:
        """The first of `keys`; None: configs have no number of MTP layers."""
        return next(iter(self.keys), None)


@dataclass(frozen=True)
class MTPFamily(Family):
    """A family that the embedded executor runs."""

    traits: DraftTraits = DraftTraits("embed_hidden")
    target_model_type: str | None = None
    """The transformers model type that runs the target; None: the family's own."""
    block_config: Mapping[str, Any] = field(default_factory=dict)
    """Config values under which the target's layer class builds an MTP block."""
    partial_rotary: bool = False
    """Whether rotary positions may apply to a share of a head."""

    @property
    def target_type(self) -> str:
        return self.target_model_type or self.model_type

    def stored_name(self, key: str, first_layer: int, depth: int) -> str:
        """Return the stored name of a tensor of an MTP layer, say `block.self_attn.q_proj.weight`.

        Args:
            first_layer: number of the target's layers.
        """
        module, _, rest = key.partition(".")
        begins = dict(zip(MODULES, (*self.own, *self.once), strict=True))
        stem = f"{begins[module]}." if module in begins else str(self.block)
        return self.prefix + stem.format(n=depth + first_layer * self.is_absolute) + rest


def _deepseek(norm: str, kind: type[Family] = Family, **others: Any) -> Family:
    own = tuple(f"layers.{{n}}.{name}" for name in ("enorm", "hnorm", "eh_proj", norm))
    pattern = r"layers\.([0-9]{1,9})\."
    return kind(pattern, own, is_absolute=True, **{"block": "layers.{n}.", **others})


def _qwen(*keys: str, kind: type[Family] = Family, **others: Any) -> Family:
    once = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    pattern = r"mtp\.(?:layers\.([0-9]{1,9})\.)?"
    default = int("num_nextn_predict_layers" not in keys)
    names: dict[str, Any] = {"block": "mtp.layers.{n}.", "prefix": "", "once": once}
    counts: dict[str, Any] = {"keys": keys, "default_count": default}
    return kind(pattern, has_plain_projection=False, **{**names, **counts, **others})


def _layers(stem: str, own: str, *once: str, kind: type[Family] = Family, **others: Any) -> Family:
    names = tuple(f"{stem}.{{n}}.{name}" for name in own.split())
    shared = "|".join(re.escape(name) for name in once)
    pattern = rf"{re.escape(stem)}\.([0-9]{{1,9}})\." + (rf"|(?:{shared})\." if once else "")
    return kind(pattern, names, once, **others)


_NEMOTRON = ("enorm", "hnorm", "eh_proj")
_QWEN4 = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")
_INKLING = ("hidden_norm", "embed_norm", "input_proj")
_ALL_SPARSE = {"first_k_dense_replace": 0}
"""MTP blocks are always mixtures of experts, also after dense targets."""
FAMILIES: Mapping[str, Family] = {
    model_type: replace(family, model_type=model_type)
    for model_types, family in {
        "glm4_moe": _deepseek(
            "shared_head.norm", MTPFamily, block_config=_ALL_SPARSE, partial_rotary=True
        ),
        "glm4_moe_lite pangu_ultra_moe": _deepseek("shared_head.norm"),
        "deepseek_v3": _deepseek(
            "shared_head.norm", MTPFamily, notices="layers", block_config=_ALL_SPARSE
        ),
        "deepseek_v32 glm_moe_dsa": _deepseek("shared_head.norm", notices="layers"),
        "glm_ocr": _deepseek("shared_head.norm", prefix="model.language_model."),
        "bailing_hybrid": _deepseek("final_layernorm", notices="layers"),
        "hy_v3": _deepseek("final_layernorm"),
        "hy_v4": _layers("mtp_layers", "enorm hnorm eh_proj final_layernorm", reads="first"),
        "glm5_next": _deepseek(
            "shared_head.norm", prefix="model.language_model.", block=None, notices="layers"
        ),
        "dots3_note": _deepseek(
            "shared_head.norm",
            block=None,
            notices="layers",
            default_count=1,
            has_plain_projection=False,
        ),
        "kimi_k3": _deepseek(
            "shared_head.norm", prefix="language_model.model.", block=None, notices="layers"
        ),
        "step3p5 step3p7": _deepseek("transformer.shared_head.norm", notices="tensors"),
        "step5 step5_vl": _deepseek("transformer.shared_head.norm", block=None, notices="tensors"),
        "qwen3_next": _qwen(
            kind=MTPFamily,
            block_config={"mlp_only_layers": [], "decoder_sparse_step": 1},
            partial_rotary=True,
        ),
        "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text": _qwen("mtp_num_hidden_layers"),
        "intern_s2_preview": _qwen("mtp_num_hidden_layers"),
        "interns2_mobius": _qwen("mtp_num_hidden_layers", block=None),
        "qwen4_exp qwen4_exp_text": Family(
            r"mtp\.(?:layers\.([0-9]{1,9})\.)?",
            once=tuple(f"mtp.{name}" for name in _QWEN4),
            prefix="",
            keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
            default_count=1,
            has_plain_projection=False,
        ),
        "exaone_moe exaone4_5": _qwen("num_nextn_predict_layers"),
        "mimo": _layers(
            "mtp_layers",
            "token_layernorm hidden_layernorm input_proj final_layernorm",
            kind=MTPFamily,
            block="mtp_layers.{n}.",
            traits=DraftTraits("hidden_embed"),
            # transformers has no mimo class; the target is a Qwen2 with the same config fields
            target_model_type="qwen2",
        ),
        "mimo_v2 mimo_v2_flash": _layers(
            "mtp.layers",
            "enorm hnorm eh_proj final_layernorm",
            keys=(),
            default_count=1,
            reads="first",
        ),
        "ernie4_5_moe": Family(
            r"mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.([0-9]{1,9})\.",
            ("mtp_emb_norm.{n}", "mtp_hidden_norm.{n}", "mtp_linear_proj.{n}"),
            ties_by_default=True,
        ),
        "longcat_flash": _layers(
            "mtp.layers",
            "enorm.m hnorm.m eh_proj",
            "mtp.norm",
            default_count=1,
            has_plain_projection=False,
        ),
        "nemotron_h nemotron_h_puzzle": Family(
            r"mtp\.layers\.([0-9]{1,9})\.",
            once=tuple(f"mtp.layers.0.{name}" for name in _NEMOTRON),
            prefix="",
            reads="sublayers",
            has_plain_projection=False,
        ),
        "deepseek_v4": _layers(
            "mtp", "enorm hnorm e_proj h_proj", prefix="", has_plain_projection=False
        ),
        "minimax_m3_vl": _layers(
            "mtp.layers",
            "enorm hnorm eh_proj final_layernorm",
            keys=("num_mtp_modules",),
            has_plain_projection=False,
        ),
        "inkling_mm_model inkling_model": Family(
            r"mtp\.(?:layers\.([0-9]{1,9})|chain_norm)\.",  # the norm is an option of the config
            tuple(f"mtp.layers.{{n}}.{name}" for name in _INKLING),
            notices="tensors",
            has_plain_projection=False,
        ),
    }.items()
    for model_type in model_types.split()
}
"""Families with MTP layers in their checkpoints, by `model_type`."""

RUNNABLE: Mapping[str, MTPFamily] = {
    name: family for name, family in FAMILIES.items() if isinstance(family, MTPFamily)
}
"""Those that the embedded executor runs."""

NOT_RUNNABLE: Mapping[str, str] = {
    "bailing_hybrid": "its target has linear-attention layers",
    "deepseek_v32": "its layers use a sparse attention indexer",
    "deepseek_v4": "its MTP head sums projections of multi-stream residual states",
    "ernie4_5_moe": "its MTP head has no norm before the LM head",
    "gemma4_assistant": "its drafter reads the target's KV cache and has none of its own",
    "glm_moe_dsa": "its layers use a sparse attention indexer",
    "hy_v3": "its layer class has not been tried here",
    "inkling_mm_model": "its MTP blocks have convolution states and a chain norm of their own",
    "longcat_flash": "its decoder layers hold two attention blocks",
    "mimo_v2_flash": "its layers use sliding windows and its depths are not chained",
    "minimax_m3_vl": "its MTP layers use sparse attention",
    "nemotron_h": "its target has recurrent layers and its MTP head two kinds of sublayer",
    "qwen3_5": "its target has linear-attention layers",
    "qwen3_5_moe": "its target has linear-attention layers",
    "step3p5": "it has an own LM head per depth and reads pre-norm states",
    "step3p7": "it has an own LM head per depth and reads pre-norm states",
}
"""Why it does not run others, by `model_type`."""

SEPARATE_DRAFTERS: Mapping[str, str] = {
    "gemma4_assistant": "mtp",
    "gemma4_unified_assistant": "mtp",
    "muse_glimmer_assistant": "dflash",
}
"""Those whose checkpoint has the MTP layers, or the draft head, of another checkpoint -> the method
of vLLM."""

DSPARK = frozenset({"deepseek_v41"})
"""Those whose MTP layers are stages of DSpark, which vLLM refuses as method `mtp`."""

_PREFIX = re.compile(r"(?:(?:model|language_model)\.)*")


def without_prefix(name: str) -> str:
    """Return a tensor name without prefixes like `model.language_model.`."""
    return _PREFIX.sub("", name, count=1)


def family_of(model_type: str) -> MTPFamily:
    """Return a family that the embedded executor runs.

    Raises:
        UnsupportedModelError: it does not run, or is unknown.
    """
    family = RUNNABLE.get(model_type)
    if family is not None:
        return family
    runnable = f"families that run: {', '.join(sorted(RUNNABLE))}"
    reason = NOT_RUNNABLE.get(model_type)
    if reason is not None:
        raise UnsupportedModelError(
            f"model family {got(model_type)} carries MTP layers but does not run here: {reason}; "
            f"{runnable}"
        )
    raise UnsupportedModelError(
        f"model family {got(model_type)} is not in the family table; {runnable}"
    )

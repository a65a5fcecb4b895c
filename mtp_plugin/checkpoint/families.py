"""Names of the MTP tensors in the checkpoints of model families, as vLLM reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """Names of a family's MTP tensors, without a prefix like `model.`."""

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
    default: int = 0
    """Number of MTP layers without such a key."""
    reads: Literal["all", "first", "sublayers"] = "all"
    """What vLLM reads: every layer, the first one, or numbered sublayers of a single layer."""
    notices: Literal["norms", "layers", "tensors"] = "norms"
    """Missing tensors that vLLM refuses: norms if nothing is quantized, whole layers, or any."""


def _deepseek(norm: str, **others: Any) -> Family:
    own = tuple(f"layers.{{n}}.{name}" for name in ("enorm", "hnorm", "eh_proj", norm))
    return Family(r"layers\.([0-9]{1,9})\.", own, block="layers.{n}.", is_absolute=True, **others)


def _qwen(*keys: str) -> Family:
    once = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    pattern = r"mtp\.(?:layers\.([0-9]{1,9})\.)?"
    default = int("num_nextn_predict_layers" not in keys)
    return Family(pattern, (), once, "mtp.layers.{n}.", "", keys=keys, default=default)


def _layers(stem: str, own: str, *once: str, **others: Any) -> Family:
    names = tuple(f"{stem}.{{n}}.{name}" for name in own.split())
    shared = "|".join(re.escape(name) for name in once)
    pattern = rf"{re.escape(stem)}\.([0-9]{{1,9}})\." + (rf"|(?:{shared})\." if once else "")
    return Family(pattern, names, once, **others)


_NEMOTRON = ("enorm", "hnorm", "eh_proj")
FAMILIES: Mapping[str, Family] = {
    model_type: family
    for model_types, family in {
        "glm4_moe glm4_moe_lite pangu_ultra_moe": _deepseek("shared_head.norm"),
        "deepseek_v3 deepseek_v32 glm_moe_dsa": _deepseek("shared_head.norm", notices="layers"),
        "glm_ocr": _deepseek("shared_head.norm", prefix="model.language_model."),
        "bailing_hybrid": _deepseek("final_layernorm", notices="layers"),
        "hy_v3": _deepseek("final_layernorm"),
        "step3p5 step3p7": _deepseek("transformer.shared_head.norm", notices="tensors"),
        "qwen3_next": _qwen(),
        "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text": _qwen("mtp_num_hidden_layers"),
        "exaone_moe exaone4_5": _qwen("num_nextn_predict_layers"),
        "mimo": _layers(
            "mtp_layers",
            "token_layernorm hidden_layernorm input_proj final_layernorm",
            block="mtp_layers.{n}.",
        ),
        "mimo_v2 mimo_v2_flash": _layers(
            "mtp.layers", "enorm hnorm eh_proj final_layernorm", keys=(), default=1, reads="first"
        ),
        "ernie4_5_moe": Family(
            r"mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.([0-9]{1,9})\.",
            ("mtp_emb_norm.{n}", "mtp_hidden_norm.{n}", "mtp_linear_proj.{n}"),
        ),
        "longcat_flash": _layers("mtp.layers", "enorm.m hnorm.m eh_proj", "mtp.norm", default=1),
        "nemotron_h": Family(
            r"mtp\.layers\.([0-9]{1,9})\.",
            once=tuple(f"mtp.layers.0.{name}" for name in _NEMOTRON),
            prefix="",
            reads="sublayers",
        ),
        "deepseek_v4": _layers("mtp", "enorm hnorm e_proj h_proj", prefix=""),
        "minimax_m3_vl": _layers(
            "mtp.layers", "enorm hnorm eh_proj final_layernorm", keys=("num_mtp_modules",)
        ),
        "inkling": _layers("mtp.layers", "hidden_norm embed_norm input_proj", "mtp.chain_norm"),
    }.items()
    for model_type in model_types.split()
}
"""Families with MTP layers in their checkpoints, by `model_type`."""

SEPARATE_DRAFTERS = frozenset({"gemma4_assistant"})
"""Those whose checkpoint has the MTP layers of another checkpoint."""

_PREFIX = re.compile(r"(?:(?:model|language_model)\.)*")


def without_prefix(name: str) -> str:
    """Return a tensor name without prefixes like `model.language_model.`."""
    return _PREFIX.sub("", name, count=1)

"""Names of tensors: layers, experts, copies, and what belongs to a quantized weight."""

from __future__ import annotations

import re

from mtp_plugin.checkpoint.files import StoredTensor

FLOATING = ("F32", "F16", "BF16")
TARGET_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.*)")
HEAD = re.compile(r"(?:lm_)?head\.|(?:.*\.)?unembed\.")
COPY = re.compile(r"(?:.*\.)?(?:embed_tokens|shared_head\.(?:head|output))\.")
"""Copies of the target's embedding and head, or a head per layer."""
LIKE_MTP = re.compile(r"(?:.*\.)?(?:mtp\w*|nextn\w*|enorm|hnorm|eh_proj)\.")
EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?:(?P<number>[0-9]{1,9})\.)?(?P<name>\w+)(?:\.(?P<leaf>.*))?"
)
PACKED = ("qweight", "weight_packed")
SCALE = re.compile(
    r"(?:\w*_)?(?:scales?|qzeros|g_idx|zero_point|shape|absmax|quant_map)(?:_\w+)?|bitsandbytes__\w+"
)
"""Last part of the name of what belongs to a quantized weight."""
_QUANTIZED = ("F8", "F4", "F6", "I8", "U8", "I4", "U4")


def is_quantized(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a quantized weight."""
    leaf = name.rpartition(".")[2]
    if SCALE.fullmatch(leaf):
        return False
    return leaf in PACKED or tensor.dtype.startswith(_QUANTIZED)


def canonical(name: str) -> tuple[str, ...]:
    """Return the names of the unquantized tensors of one expert; none: a scale or a buffer."""
    leaf = name.rpartition(".")[2]
    if SCALE.fullmatch(leaf) or leaf == "inv_freq":
        return ()
    expert = EXPERT.fullmatch(name)
    if expert is None:
        return (f"{name[: -len(leaf)]}weight" if leaf in PACKED else name,)
    names = ("gate_proj", "up_proj") if expert["name"] == "gate_up_proj" else (expert["name"],)
    leaf = "weight" if expert["leaf"] in (None, *PACKED) else expert["leaf"]
    return tuple(f"{expert['experts']}.{name}.{leaf}" for name in names)

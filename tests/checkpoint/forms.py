"""Forms of a checkpoint that tuning and quantizing tools write, and what vLLM does with each."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "integration/tiny_model/checkpoint"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}
Header = dict[str, tuple[str, list[int]]]
"""Name -> dtype, shape."""
Edit = Callable[[dict[str, Any], Header], object]
LAYERS = ("model.layers.12.", "model.layers.13.", "model.layers.14.")


def tiny_header() -> Header:
    with (TINY / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {n: (e["dtype"], e["shape"]) for n, e in header.items() if n != "__metadata__"}


def write_file(file: Path, tensors: Header, *, with_weights: bool = False) -> None:
    """Write a header, and zeros or the weights of the tensors that have their names and shapes."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        if with_weights:
            weights = dict(tiny_weights())
            for name, (dtype, shape) in tensors.items():
                size = BYTES[dtype] * math.prod(shape)
                given = weights.get(name, b"")
                opened.write(given if len(given) == size else bytes(size))
        opened.truncate(8 + len(header) + end)


def tiny_weights() -> Iterator[tuple[str, bytes]]:
    content = (TINY / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, content[begin:end]


def write(
    path: Path,
    edit: Edit,
    *,
    shards: int = 1,
    mtp_file: bool = False,
    index: bool = False,
    after: Callable[[Path], object] | None = None,
    with_weights: bool = False,
) -> None:
    """Write a checkpoint; ``after`` changes its files."""
    config, tensors = json.loads((TINY / "config.json").read_text()), tiny_header()
    edit(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    own = {n: t for n, t in tensors.items() if mtp_file and n.startswith(LAYERS)}
    listed = {name: tensor for name, tensor in tensors.items() if name not in own}
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors" if index or shards > 1 else SINGLE
        part = dict(list(listed.items())[shard::shards])
        write_file(path / file, part, with_weights=with_weights)
        weight_map |= dict.fromkeys(part, file)
    if own:
        write_file(path / "mtp.safetensors", own, with_weights=with_weights)
    if index:
        write_index(path, weight_map)
    if after is not None:
        after(path)


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_whole(path: Path) -> None:
    """Write the tiny model's file as it is."""
    shutil.copy(TINY / SINGLE, path / SINGLE)


def link(path: Path) -> None:
    blob = (path / SINGLE).rename(path / "blob")
    (path / SINGLE).symlink_to(blob)


def name_in_index(**files: str) -> Callable[[Path], object]:
    """Return what writes an index with one tensor of each file, named by a key of ``files``."""
    return lambda path: write_index(path, {f"x.{key}": file for key, file in files.items()})


def drop(*begins: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(begins)]:
            del tensors[name]

    return edit


def rename(old: str, new: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return edit


def declare(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def reshape(*begins: str, **sizes: int) -> Edit:
    """Return what replaces sizes, say ``d192=256``, in the shapes of tensors."""

    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name, (dtype, shape) in list(tensors.items()):
            if name.startswith(begins):
                tensors[name] = dtype, [sizes.get(f"d{size}", size) for size in shape]

    return edit


def add(*names: str, dtype: str = "BF16", shape: Sequence[int] = (2048, 192)) -> Edit:
    return lambda _, tensors: tensors.update((name, (dtype, [*shape])) for name in names)


def store_in_float32(_: dict[str, Any], tensors: Header) -> None:
    tensors.update((n, ("F32", shape)) for n, (_, shape) in tensors.items() if n.startswith(LAYERS))


def quantize(*begins: str, scale: str = "_scale", projection: bool = False) -> Edit:
    """Return what stores weights in FP8, with `eh_proj` if ``projection`` is true."""

    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name, (_dtype, shape) in list(tensors.items()):
            is_kept = name.endswith("eh_proj.weight") and not projection
            is_one = name.startswith(begins) and name.endswith(("_proj.weight", "head.weight"))
            if is_one and not is_kept:
                tensors[name] = ("F8_E4M3", shape)
                tensors[f"{name}{scale}"] = ("F32", [1])

    return edit


def pack(*begins: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(begins)]:
            if name.endswith("_proj.weight") and "eh_proj" not in name:
                stem = name.removesuffix("weight")
                _dtype, (rows, columns) = tensors.pop(name)
                tensors[f"{stem}qweight"] = ("I32", [columns // 8, rows])
                tensors[f"{stem}scales"] = ("BF16", [1, rows])

    return edit


def fuse_experts(_: dict[str, Any], tensors: Header) -> None:
    for name, (dtype, shape) in list(tensors.items()):
        stem, experts, rest = name.partition(".experts.")
        if experts and name.startswith(LAYERS):
            del tensors[name]
            if rest.endswith("gate_proj.weight"):
                tensors[f"{stem}.experts.gate_up_proj"] = (dtype, [4, 2 * shape[0], shape[1]])
            elif rest.endswith("down_proj.weight"):
                tensors[f"{stem}.experts.down_proj"] = (dtype, [4, *shape])


def leave_copies(config: dict[str, Any], tensors: Header) -> None:
    drop(*LAYERS)(config, tensors)
    tensors["model.layers.12.embed_tokens.weight"] = ("BF16", [2048, 192])


def all_of(*edits: Edit) -> Edit:
    return lambda config, tensors: [edit(config, tensors) for edit in edits]


def quantized_by(method: str, **values: Any) -> Edit:
    return declare(quantization_config={"quant_method": method, **values})


FP8 = quantized_by("fp8")
TARGET = tuple(f"model.layers.{layer}." for layer in range(12))
NO_MTP = "config.json declares 3 MTP layer(s), the files have none of their tensors"
CHECKPOINTS: dict[str, tuple[Edit, dict[str, Any], str, str]] = {
    # name: edit, how it is written, what vLLM does, begin of the problem
    "whole": (declare(), {}, "drafts", ""),
    "shards without an index": (declare(), {"shards": 2, "mtp_file": True}, "drafts", ""),
    "experts as one tensor": (
        fuse_experts,
        {},
        "refuses",
        "6 tensor(s) of the MTP layers hold all experts: model.layers.12.mlp.experts.",
    ),
    "no MTP tensors": (drop(*LAYERS), {}, "refuses", NO_MTP),
    "copies alone": (leave_copies, {}, "refuses", NO_MTP),
    "no MTP tensors, quantized": (
        all_of(drop(*LAYERS), quantize(*TARGET), FP8),
        {},
        "drafts at random",
        NO_MTP,
    ),
    "a projection is missing": (
        drop("model.layers.13.self_attn.o_proj"),
        {},
        "drafts at random",
        "1 tensor(s) of the MTP layers are missing: model.layers.13.self_attn.o_proj.weight",
    ),
    "a norm is missing": (
        drop("model.layers.14.enorm"),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers are missing: model.layers.14.enorm.weight",
    ),
    "an expert is missing": (
        drop("model.layers.12.mlp.experts.2."),
        {},
        "drafts at random",
        "3 tensor(s) of the MTP layers are missing: model.layers.12.mlp.experts.2.down_proj.weight",
    ),
    "further tensors": (
        rename("model.layers.12.self_attn.q_norm", "model.layers.12.self_attn.qk_norm"),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers are missing: model.layers.12.self_attn.q_norm.weight",
    ),
    "a file that the index does not name": (
        declare(),
        {"shards": 2, "mtp_file": True, "index": True},
        "refuses",
        "model.safetensors.index.json does not name mtp.safetensors, which has MTP tensors",
    ),
    "more layers declared": (
        declare(num_nextn_predict_layers=4),
        {},
        "refuses",
        "config.json declares 4 MTP layers, the files have 3: set num_nextn_predict_layers to 3",
    ),
    "a layer in the middle is missing": (
        drop("model.layers.13."),
        {},
        "refuses",
        "config.json declares 3 MTP layers, the files have 2: take the files of the original",
    ),
    "fewer layers declared": (
        declare(num_nextn_predict_layers=1),
        {},
        "refuses",
        "config.json declares 1 MTP layer(s), the files have 3: set num_nextn_predict_layers to 3",
    ),
    "none declared": (
        declare(num_nextn_predict_layers=0),
        {},
        "refuses",
        "config.json declares no MTP layer(s), the files have 3: set num_nextn_predict_layers to 3",
    ),
    "no head": (
        drop("lm_head"),
        {},
        "refuses",
        "lm_head.weight is missing, and tie_word_embeddings is false",
    ),
    "head quantized, no method": (
        quantize("lm_head"),
        {},
        "refuses",
        "1 weight(s) of the head are quantized, config.json names no method and leaves them out",
    ),
    "head quantized by another method": (
        all_of(quantize("lm_head", *TARGET, *LAYERS), FP8),
        {},
        "refuses",
        "1 weight(s) of the head are quantized, the quantization config (fp8) leaves them out",
    ),
    "MTP layers not quantized": (
        all_of(quantize(*TARGET), FP8),
        {},
        "drafts at random",
        "57 weight(s) of the MTP layers are not quantized, the quantization config (fp8) covers",
    ),
    "MTP layers not packed": (
        all_of(pack(*TARGET), quantized_by("gptq")),
        {},
        "refuses",
        "36 weight(s) of the MTP layers are not quantized, the quantization config (gptq) covers",
    ),
    "packed": (
        all_of(pack(*TARGET, *LAYERS), quantized_by("gptq")),
        {},
        "drafts",
        "",
    ),
    "MTP layers left out": (
        all_of(
            quantize(*TARGET),
            quantized_by("compressed-tensors", ignore=["lm_head", r"re:model\.layers\.1[234]\."]),
        ),
        {},
        "drafts",
        "",
    ),
    "MTP layers left out, though quantized": (
        all_of(
            quantize(*TARGET, *LAYERS),
            quantized_by("compressed-tensors", ignore=["lm_head", r"re:.*layers\.1[234]\."]),
        ),
        {},
        "refuses",
        "57 weight(s) of the MTP layers are quantized, the quantization config (compressed-t",
    ),
    "projection quantized, with a scale that is skipped": (
        all_of(quantize("model.layers.12.eh_proj", projection=True), FP8),
        {},
        "drafts at random",
        "1 projection(s) of the MTP layers are quantized: model.layers.12.eh_proj.weight",
    ),
    "begins of names left out": (
        all_of(quantize(*TARGET), quantized_by("fp8", modules_to_not_convert=["model.layers.12"])),
        {},
        "drafts at random",
        "57 weight(s) of the MTP layers are not quantized, the quantization config (fp8) covers",
    ),
    "projection quantized": (
        all_of(quantize("model.layers.12.eh_proj", scale="_scale_inv", projection=True), FP8),
        {},
        "refuses",
        "1 projection(s) of the MTP layers are quantized: model.layers.12.eh_proj.weight",
    ),
    "MTP layers renamed": (
        rename("model.layers.12.", "model.language_model.layers.12."),
        {},
        "refuses",
        "29 MTP tensor(s) are named like model.language_model.layers.12.",
    ),
    "names of another family": (
        rename("model.layers.12.", "mtp.layers.0."),
        {},
        "refuses",
        "29 tensor(s) such as mtp.layers.0.",
    ),
    "no target layers": (
        drop(*TARGET),
        {},
        "refuses",
        "config.json says num_hidden_layers = 12, the files have no tensor of model.layers.0",
    ),
    "target renamed": (
        rename("model.", "model.language_model."),
        {},
        "refuses",
        "tensors of the target are named like model.language_model.layers.",
    ),
    "MTP layers of another model size": (
        reshape(*LAYERS, d192=256, d384=512),
        {},
        "refuses",
        "69 tensor(s) of the MTP layers do not fit: model.layers.12.",
    ),
    "projection transposed": (
        all_of(drop("model.layers.12.eh"), add("model.layers.12.eh_proj.weight", shape=(384, 192))),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers do not fit: model.layers.12.eh_proj.weight [384, 192] "
        "(expected [192, 384])",
    ),
    "projection cut": (
        reshape("model.layers.12.eh_proj", d384=192),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers do not fit: model.layers.12.eh_proj",
    ),
    "larger vocab_size": (
        declare(vocab_size=4096),
        {},
        "refuses",
        "2 tensor(s) of the target do not fit: model.embed_tokens.weight ",
    ),
    "smaller vocab_size": (
        declare(vocab_size=1024),
        {},
        "refuses",
        "2 tensor(s) of the target do not fit: model.embed_tokens.weight ",
    ),
    "MTP layers of another vocabulary": (
        add(
            *(f"{LAYERS[0]}{n}.weight" for n in ("embed_tokens", "shared_head.head")),
            shape=(99, 192),
        ),
        {},
        "refuses",
        "2 tensor(s) of the MTP layers do not fit: model.layers.12.embed",
    ),
    "no head, nothing said of it": (
        all_of(drop("lm_head"), lambda config, _: config.pop("tie_word_embeddings")),
        {},
        "refuses",
        "lm_head.weight is missing, and tie_word_embeddings is false for glm4_moe where it is not",
    ),
    "a projection of the target is missing": (
        drop("model.layers.3.self_attn.o_proj"),
        {},
        "refuses",
        "1 tensor(s) of the target are missing: model.layers.3.self_attn.o_proj.weight; take the",
    ),
    "no last norm": (
        drop("model.norm"),
        {},
        "refuses",
        "1 tensor(s) of the target are missing: model.norm.weight; take the files",
    ),
    "no embedding": (
        drop("model.embed"),
        {},
        "refuses",
        "1 tensor(s) of the target are missing: model.embed_tokens.weight; take the files",
    ),
    "an expert of the target is missing": (
        drop("model.layers.11.mlp.experts.3."),
        {},
        "refuses",
        "3 tensor(s) of the target are missing: model.layers.11.mlp.experts.3.down_proj.weight",
    ),
    "a file of 0 bytes": (
        declare(),
        {"after": lambda path: (path / "training.safetensors").touch()},
        "refuses",
        "PATH/training.safetensors: expected a safetensors file, got a header of 0 bytes in a file",
    ),
    "a stale index": (
        drop(*LAYERS),
        {"shards": 2, "index": True, "after": write_whole},
        "refuses",
        f"{INDEX} does not name model.safetensors, which has MTP tensors; vLLM reads named files "
        "alone: remove the index",
    ),
    "an index of absent files": (
        declare(),
        {"after": name_in_index(a="model-00001-of-00002.safetensors")},
        "refuses",
        f"PATH/{INDEX}: names 1 file(s) that are not there: model-00001-of-00002.safetensors; "
        "download them; if model.safetensors is whole, remove the index",
    ),
    "a file of its own for the MTP layers": (
        declare(),
        {"mtp_file": True, "after": name_in_index(a=SINGLE, b="mtp.safetensors")},
        "drafts",
        "",
    ),
    "a stale whole file": (
        declare(),
        {"shards": 2, "index": True, "after": lambda path: (path / SINGLE).write_bytes(b"stale")},
        "drafts",
        "",
    ),
    "a tensor in two files": (
        declare(),
        {
            "shards": 2,
            "index": True,
            "after": lambda path: write_file(
                path / "model-0.safetensors", tiny_header(), with_weights=True
            ),
        },
        "drafts",
        "",
    ),
    "links to the hub's cache": (
        declare(),
        {"after": link},
        "drafts",
        "",
    ),
    "MTP layers in float32": (store_in_float32, {}, "drafts", ""),
    "a head of its own, said to be tied": (declare(tie_word_embeddings=True), {}, "drafts", ""),
    "a count that is a fraction": (
        declare(num_nextn_predict_layers=3.0),
        {},
        "refuses",
        "PATH/config.json: num_nextn_predict_layers: expected an integer of at least 0, got 3.0",
    ),
    "a count that is a flag": (
        declare(num_nextn_predict_layers=True),
        {},
        "refuses",
        "PATH/config.json: num_nextn_predict_layers: expected an integer of at least 0, got true",
    ),
    "an index of paths": (
        declare(),
        {"after": name_in_index(a=f"./{SINGLE}")},
        "refuses",
        f"PATH/{INDEX}: expected plain names of .safetensors files next to it, got './model.safe",
    ),
    "an index of joined paths": (
        declare(),
        {"after": name_in_index(a=f"a/../{SINGLE}")},
        "refuses",
        f"PATH/{INDEX}: expected plain names of .safetensors files next to it, got 'a/../",
    ),
}

O_PROJ, Q_PROJ = "model.layers.12.self_attn.o_proj", "model.layers.12.self_attn.q_proj"
UP_PROJ = "model.layers.12.mlp.experts.0.up_proj"
LEFT_OUT: list[tuple[str, str, str, bool]] = [
    # method, entry of the list, module, whether vLLM leaves it out
    *(
        (method, entry, O_PROJ, False)
        for method in ("fp8", "compressed-tensors")
        for entry in (
            "model.layers.12",
            "layers.12",
            "o_proj",
            "model.layers.12.self_attn",
            "layers.12.self_attn.o_proj",
            "*self_attn*",
            r"re:layers\.12",
        )
    ),
    *((method, O_PROJ, O_PROJ, True) for method in ("fp8", "compressed-tensors", "awq")),
    *((m, "model.layers.12.self_attn.qkv_proj", Q_PROJ, True) for m in ("fp8", "awq")),
    ("compressed-tensors", "model.layers.12.self_attn.qkv_proj", Q_PROJ, True),
    ("fp8", r"re:.*\.12\..*", O_PROJ, False),
    ("compressed-tensors", r"re:.*\.12\..*", O_PROJ, True),
    ("compressed-tensors", r"re:.*\.12\..*", Q_PROJ, True),
    ("compressed-tensors", r"re:.*self_attn\..*_proj$", Q_PROJ, True),
    ("fp8", "mtp", "mtp.layers.0.self_attn.o_proj", False),
    ("compressed-tensors", "mtp", "mtp.layers.0.self_attn.o_proj", False),
    ("awq", "mtp", "mtp.layers.0.self_attn.o_proj", True),
    ("fp8", "model.layers.12.mlp.experts", UP_PROJ, True),
    ("fp8", "model.layers.12.mlp.experts.3.down_proj", UP_PROJ, True),
    ("fp8", "experts", UP_PROJ, False),
    ("fp8", "model.layers.1.mlp.experts", UP_PROJ, False),
    ("compressed-tensors", "model.layers.12.mlp.experts", UP_PROJ, False),
    ("compressed-tensors", UP_PROJ, UP_PROJ, True),
    ("awq", "model.layers.12.mlp.experts", UP_PROJ, True),
    ("awq", UP_PROJ, UP_PROJ, False),
    ("awq", "layers.12.", O_PROJ, True),
    ("awq", "layers.1", O_PROJ, True),
    ("awq", "mlp.gate", "model.layers.12.mlp.gate_proj", True),
    ("gptq", r"-:.*\.12\..*", O_PROJ, True),
    ("gptq", r"-:.*\.12\..*", UP_PROJ, True),
    ("gptq", r"-:.*q_proj", Q_PROJ, False),
    ("gptq", r"+:.*\.12\..*", O_PROJ, False),
]

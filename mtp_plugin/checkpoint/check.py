"""What a checkpoint's JSON files and headers say, and what is wrong with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_plugin.checkpoint.families import (
    DSPARK,
    FAMILIES,
    SEPARATE_DRAFTERS,
    Family,
    without_prefix,
)
from mtp_plugin.checkpoint.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    StoredTensor,
    check_kind,
    checkpoint_directory,
    file_headers,
    listed,
    read_index,
    read_json,
)
from mtp_plugin.checkpoint.problems import (
    PARTS,
    Part,
    Problem,
    differences_of,
    problems_of,
)
from mtp_plugin.checkpoint.skipped import Skipped
from mtp_plugin.checkpoint.tensor_names import COPY, HEAD, is_quantized
from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.config.messages import got, spelled
from mtp_plugin.errors import CheckpointError, one_line

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
OWN_HEAD = "which differs from the embedding, though tie_word_embeddings is true"
OTHER_COPIES = "unlike the target's, with which drafts are computed"

_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Checkpoint:
    """JSON files and headers of a checkpoint directory."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    """Every tensor by name: those of the listed files, and MTP tensors of the others."""
    unlisted: tuple[Path, ...]
    """Files with MTP tensors that the index does not name."""
    repeated: tuple[str, ...] = ()
    """Tensors in several files, of which the last one counts."""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def family(self) -> Family | None:
        return FAMILIES.get(self.model_type)

    def value(self, *keys: str) -> Any:
        """Return the first of the keys that `config.json` or a section of it has, else None."""
        sections = _sections(self.config)
        return next((s[key] for key in keys for s in sections if s.get(key) is not None), None)

    def number(self, *keys: str) -> int:
        """Return a number of the language model, 0 without such a key; see `value`.

        Raises:
            CheckpointError: it is no integer of at least 0.
        """
        text = self.config.get("text_config")
        inner = text if isinstance(text, dict) else {}
        given = (inner[key] for key in keys if inner.get(key) is not None)
        value = next(given, self.value(*keys))
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: {keys[0]}: expected an integer of at least 0, "
                f"got {got(value)}"
            )
        return value or 0

    @cached_property
    def declared(self) -> int:
        """Number of MTP layers that `config.json` declares."""
        keys = _COUNT_KEYS if self.family is None else self.family.keys
        default = 0 if self.family is None else self.family.default_count
        return default if self.value(*keys) is None else self.number(*keys)

    @cached_property
    def first_layer(self) -> int:
        """Number of the first MTP layer in names."""
        absolute = self.family is not None and self.family.is_absolute
        return self.number("num_hidden_layers") if absolute else 0

    @cached_property
    def mtp(self) -> Mapping[str, int | None]:
        """Name of every MTP tensor -> its layer from 0; None: of all layers."""
        return dict(_mtp_tensors(self.tensors, self.config))

    @cached_property
    def copies(self) -> frozenset[str]:
        """MTP tensors that are copies of the target's embedding and head."""
        return frozenset(name for name in self.mtp if COPY.match(name))

    @cached_property
    def is_tied(self) -> bool:
        """Whether `config.json`, or without a key the family, ties the head to the embedding."""
        given, family = self.value("tie_word_embeddings"), self.family
        return given is True or (given is None and family is not None and family.ties_by_default)

    @cached_property
    def has_own_head(self) -> bool:
        """Whether a head is stored that differs from the embedding."""
        names = self._shared.get("shared_head.head.weight"), self._shared.get("embed_tokens.weight")
        one, other = (self.tensors.get(name or "") for name in names)
        return one is not None and other is not None and one.differs(other)

    @cached_property
    def _shared(self) -> Mapping[str, str]:
        """End of the names of copies in MTP layers -> the tensor of the target."""
        names = {without_prefix(name): name for name in self.parts["target"]}
        embedding = names.get("embed_tokens.weight")
        head = next((name for name in self.parts["head"] if name.endswith(".weight")), embedding)
        ends = {"embed_tokens.weight": embedding, "shared_head.head.weight": head}
        return {end: name for end, name in ends.items() if name is not None}

    @cached_property
    def other_copies(self) -> list[str]:
        """Tensors of MTP layers that differ from the target's embedding or head."""
        return [
            copy
            for copy in sorted(self.copies)
            for end, name in self._shared.items()
            if copy.endswith(f".{end}") and self.tensors[copy].differs(self.tensors[name])
        ]

    @cached_property
    def found(self) -> tuple[int, ...]:
        """MTP layers that have more than copies of the target's tensors."""
        layers = {d for name, d in self.mtp.items() if d is not None and name not in self.copies}
        if layers and self.family is not None and self.family.reads == "sublayers":
            return (0,)
        return tuple(sorted(layers))

    @cached_property
    def parts(self) -> Mapping[Part, list[str]]:
        """Names of the tensors of each part."""
        parts: dict[Part, list[str]] = {part: [] for part in PARTS}
        for name in self.tensors:
            is_head = HEAD.match(without_prefix(name)) is not None
            parts["mtp" if name in self.mtp else "head" if is_head else "target"].append(name)
        return parts

    @cached_property
    def quantized(self) -> Mapping[Part, list[str]]:
        """Names of the quantized weights of each part."""
        return {
            part: [name for name in names if is_quantized(name, self.tensors[name])]
            for part, names in self.parts.items()
        }

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization config; empty: there is none."""
        given = self.value("quantization_config", "compression_config")
        file = self.directory / "hf_quant_config.json"
        if given is None and file.is_file():
            given = read_json(file).get("quantization")
        return given if isinstance(given, dict) else {}

    @cached_property
    def method(self) -> str:
        """Names of the quantization method; empty: none is given."""
        given = (
            self.quantization.get(key) for key in ("quant_method", "quant_algo", "fmt", "format")
        )
        return " ".join(dict.fromkeys(spelled(name) for name in given if isinstance(name, str)))

    @cached_property
    def skipped(self) -> Skipped:
        """Layers that the quantization config leaves out."""
        return Skipped(self.quantization)

    @cached_property
    def differences(self) -> tuple[list[str], list[str]]:
        """Names that the found MTP layers lack, and further names that they have."""
        return differences_of(self)

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, the target first."""
        return tuple(problems_of(self))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read `config.json`, the index and the headers of every safetensors file.

    As by vLLM: the files that the index names are read whole, without an index every file, and of a
    tensor in several files the last one counts. Of other files, only tensors of MTP layers are
    read.

    Raises:
        CheckpointError: no directory or another kind of checkpoint, bad JSON, a git-lfs pointer, a
            missing or broken file.
    """
    directory = checkpoint_directory(path)
    check_kind(directory)
    config = read_json(directory / CONFIG_FILE)
    every = sorted(file.name for file in directory.glob("*.safetensors"))
    # the same weights under other names, for another loader
    names = [name for name in every if not name.startswith("consolidated")] or every
    has_index = (directory / INDEX_FILE).is_file()
    chosen = read_index(directory / INDEX_FILE, names) if has_index else names
    if not chosen:
        raise CheckpointError(f"checkpoint {directory}: expected *.safetensors files, found none")
    tensors: dict[str, StoredTensor] = {}
    repeated = []
    for file in chosen:
        for name, tensor in file_headers(directory / file):
            if name in tensors:
                repeated.append(name)
            tensors[name] = tensor
    unlisted = []
    has_mtp = any(True for _ in _mtp_tensors(tensors, config))
    for file in (name for name in names if name not in chosen):
        try:
            headers = dict(file_headers(directory / file))
        except CheckpointError:
            if has_mtp:  # a file of something else
                continue
            raise
        further = [name for name, _ in _mtp_tensors(headers, config) if name not in tensors]
        tensors.update((name, headers[name]) for name in further)
        if further:
            unlisted.append(directory / file)
    return Checkpoint(directory, config, tensors, tuple(unlisted), tuple(repeated))


def describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return what was found as (name, value) pairs."""
    tensors, mtp, found = checkpoint.tensors, checkpoint.mtp, checkpoint.found
    files = len({tensor.file for tensor in tensors.values()})
    where = listed(sorted({tensors[name].file.name for name in mtp}))
    layers = f"{checkpoint.declared} declared, {len(found)} found{where and f' in {where}'}"
    lines = [
        ("checkpoint", f"{checkpoint.directory}: {len(tensors)} tensors in {files} file(s)"),
        ("family", spelled(checkpoint.model_type)),
        ("MTP layers", layers if checkpoint.family else _unknown(checkpoint.model_type)),
    ]
    if checkpoint.repeated:
        lines.append(
            (
                "warning",
                f"{len(checkpoint.repeated)} tensor(s) are in several files, of which the last one "
                f"counts: {listed(checkpoint.repeated)}",
            )
        )
    if mtp:
        missing, extra = checkpoint.differences
        parts = [
            f"{len(names)} {word}: {listed(names)}"
            for word, names in (("missing", missing), ("extra", extra))
            if names
        ]
        lines.append(("MTP tensors", f"{len(mtp)}, {'; '.join(parts) or 'none missing or extra'}"))
    quantized = []
    for part, title in PARTS.items():
        names = checkpoint.quantized[part]
        dtypes = ", ".join(sorted({tensors[name].dtype for name in names}))
        count = f"{len(names)} weights in {dtypes}" if names else "not quantized"
        if checkpoint.parts[part]:
            quantized.append(f"{title} {count}")
    is_quantized = checkpoint.quantization or any(checkpoint.quantized.values())
    method = f"{checkpoint.method or 'no method named'}: {'; '.join(quantized)}"
    tied = checkpoint.is_tied
    head = (
        "lm_head" if checkpoint.parts["head"] else "tied to the embedding" if tied else "not found"
    )
    if tied and checkpoint.has_own_head:
        head += f", {OWN_HEAD}"
    copies = listed([name for name in mtp if name in checkpoint.copies])
    shared = f"; MTP layers store {copies}" if copies else "; MTP layers share it" if mtp else ""
    if checkpoint.other_copies:
        shared += f"; {listed(checkpoint.other_copies)}: {OTHER_COPIES}"
    stops = ", ".join(map(str, _stop_ids(checkpoint))) or "none"
    tags = ", ".join(f"{t} {i}" for t, i in thinking_tags(checkpoint.directory).items())
    return [
        *lines,
        ("quantization", method if is_quantized else "none"),
        ("head", head + shared),
        ("vocabulary", f"{checkpoint.value('vocab_size') or 'unknown'} ids, stop ids {stops}"),
        ("thinking tags", tags or "none"),
    ]


def _unknown(model_type: str) -> str:
    if model_type in SEPARATE_DRAFTERS:
        return "a drafter for another checkpoint"
    if model_type in DSPARK:
        return "not examined, they are stages of DSpark"
    return "not known, the table of this package lacks the family"


def write_report(facts: Iterable[tuple[str, object]], problems: Iterable[str]) -> None:
    """Print (name, value) pairs, such as those of `describe`, and problems, a line each."""
    for name, value in facts:
        sys.stdout.write(f"{name:14} {one_line(value)}\n")
    for problem in problems:
        sys.stdout.write(f"problem: {one_line(problem)}\n")


def thinking_options(directory: Path) -> dict[str, int]:
    """Return the options of the adapters for the tags of `thinking_tags`."""
    names = ("thinking_begin_token", "thinking_end_token")
    return dict(zip(names, thinking_tags(directory).values(), strict=False))


def thinking_tags(directory: Path) -> dict[str, int]:
    """Return the tags that begin and end thinking with their ids; empty: the tokenizer has none."""
    ids: dict[object, object] = {}
    for file in (directory / TOKENIZER_SETTINGS, directory / TOKENIZER_FILE):
        content = read_json(file) if file.is_file() else {}
        decoder, added = content.get("added_tokens_decoder"), content.get("added_tokens")
        for key, entry in decoder.items() if isinstance(decoder, dict) else ():
            if key.isdecimal() and len(key) < 10 and isinstance(entry, dict):
                ids[str(entry.get("content"))] = int(key)
        for entry in added if isinstance(added, list) else ():
            if isinstance(entry, dict):
                ids[str(entry.get("content"))] = entry.get("id")
    for tags in THINKING_TAGS:
        found = {tag: token for tag in tags if type(token := ids.get(tag)) is int}
        if len(found) == len(tags):
            return found
    return {}


def vllm_command_of(directory: Path, config: Mapping[str, Any], **options: int) -> str:
    """Return `vllm_command` for the `config.json` of any family.

    Args:
        options: of the plugin.
    """
    model_type = str(config.get("model_type"))
    if model_type in SEPARATE_DRAFTERS:
        method = SEPARATE_DRAFTERS[model_type]
        return vllm_command("TARGET", drafter=directory, method=method)
    given = (section.get(key) for section in _sections(config) for key in _COUNT_KEYS)
    default = int(model_type in FAMILIES)
    layers = next((n for n in given if isinstance(n, int)), default)
    # vLLM refuses 3 drafts by 2 layers
    method = "dspark" if model_type in DSPARK else "mtp"
    return vllm_command(
        directory, layers if layers in (0, 2) else 3, method=method, options=options
    )


def _sections(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    inner = (config.get("text_config"), config.get("mtp_config"))
    return (config, *(section for section in inner if isinstance(section, dict)))


def _stop_ids(checkpoint: Checkpoint) -> tuple[object, ...]:
    file = checkpoint.directory / GENERATION_FILE
    given = read_json(file).get("eos_token_id") if file.is_file() else None
    given = checkpoint.value("eos_token_id") if given is None else given
    return tuple(given) if isinstance(given, list) else () if given is None else (given,)


def _mtp_tensors(
    names: Iterable[str], config: Mapping[str, Any]
) -> Iterator[tuple[str, int | None]]:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return
    given = (section.get("num_hidden_layers") for section in _sections(config))
    first = next((n for n in given if isinstance(n, int)), 0) if family.is_absolute else 0
    pattern = re.compile(family.pattern)
    for name in names:
        found = pattern.match(without_prefix(name))
        if found and (found[1] is None or int(found[1]) >= first):
            yield name, None if found[1] is None else int(found[1]) - first

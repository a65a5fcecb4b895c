"""What a checkpoint's JSON files and headers say, and what is wrong with it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mtp_plugin.checkpoint.families import (
    FAMILIES,
    SEPARATE_DRAFTERS,
    Family,
    MTPFamily,
    without_prefix,
)
from mtp_plugin.checkpoint.files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
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
from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.config.messages import got, spelled
from mtp_plugin.errors import CheckpointError

FLOATING = ("F32", "F16", "BF16")
THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
OWN_HEAD = "which differs from the embedding, though tie_word_embeddings is true"
OTHER_COPIES = "unlike the target's, with which drafts are computed"
InVllm = Literal["drafts", "random", "refusal"]
IN_VLLM: Mapping[InVllm, str] = {
    "drafts": "drafts",
    "random": "drafts at random: it starts, acceptance is near 0, outputs are those without drafts",
    "refusal": "refuses to start, or its outputs are wrong",
}
"""What vLLM does with a checkpoint, from good to bad."""
Part = Literal["target", "mtp", "head"]
PARTS: Mapping[Part, str] = {"target": "target", "mtp": "MTP layers", "head": "head"}

_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_MAX_EXPERTS = 2**16
_SKIPPED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
"""Keys of quantization configs with the layers that are not quantized."""
_SKIPPED_BY = {"fp8": "modules_to_not_convert", "awq": "modules_to_not_convert", "gptq": "dynamic"}
"""Their usual key, by quantization method."""
_HEADLESS = ("fp8", "gptq", "awq")
"""Quantization methods of vLLM that leave out the head, unless `lm_head` is true."""
_TARGET_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.*)")
_COPY = re.compile(r"(?:.*\.)?(?:embed_tokens|shared_head\.(?:head|output))\.")
"""Copies of the target's embedding and head, or a head per layer."""
_LIKE_MTP = re.compile(r"(?:.*\.)?(?:mtp\w*|nextn\w*|enorm|hnorm|eh_proj)\.")
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?:(?P<number>[0-9]{1,9})\.)?(?P<name>\w+)(?:\.(?P<leaf>.*))?"
)
_MAX_PATTERN, _MAX_REPEATS, _MAX_NAME = 1000, 5, 128
"""Limits under which one match of a pattern with a name takes seconds at most."""
_MAX_SECONDS = 20.0
"""CPU time of all matches."""
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape or a character class."""
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?[A-Za-z-]*x")
"""Also the flag by which spaces may precede a repeat."""
_QUANTIZED = ("F8", "F4", "F6", "I8", "U8", "I4", "U4")
_PACKED = ("qweight", "weight_packed")
_SCALE = re.compile(
    r"(?:\w*_)?(?:scales?|qzeros|g_idx|zero_point|shape|absmax|quant_map)(?:_\w+)?|bitsandbytes__\w+"
)
"""Last part of the name of what belongs to a quantized weight."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a checkpoint."""

    text: str
    in_vllm: InVllm
    is_of_mtp: bool = True
    """Whether the target alone runs."""
    is_of_vllm: bool = False
    """Whether it matters in vLLM only."""


@dataclass(frozen=True)
class Skipped:
    """What the lists of layers of a quantization config mean."""

    deadline: float
    """Of all matches, in CPU time of the process."""
    parts: dict[str, set[str]] = field(default_factory=dict)
    """Parts of names by their last word."""
    patterns: list[re.Pattern[str]] = field(default_factory=list)
    """Of begins of names, for entries with `*` and for the regular expressions after `re:`."""
    unread: list[str] = field(default_factory=list)
    """Entries whose match may not end."""


@dataclass(frozen=True)
class Checkpoint:
    """JSON files and headers of a checkpoint directory."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    """Every tensor by name: those of the listed files, and MTP tensors of the others."""
    unlisted: tuple[Path, ...]
    """Files with MTP tensors that the index does not name."""

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
        """Return a number of `config.json`, 0 without such a key; see `value`.

        Raises:
            CheckpointError: it is no integer of at least 0.
        """
        value = self.value(*keys)
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
        return frozenset(name for name in self.mtp if _COPY.match(name))

    @cached_property
    def is_tied(self) -> bool:
        """Whether `config.json` ties the head to the embedding."""
        return self.value("tie_word_embeddings") is True

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
            is_head = without_prefix(name).startswith("lm_head.")
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
    def _skipped(self) -> Skipped:
        """Layers that the quantization config leaves out."""
        lists = [self.quantization.get(key) for key in _SKIPPED]
        entries = [entry for entries in lists if isinstance(entries, list) for entry in entries]
        dynamic = self.quantization.get("dynamic")
        if isinstance(dynamic, dict):
            entries += [f"re:{key[2:]}" for key in dynamic if key.startswith("-:")]
        return _split_skipped(entry for entry in entries if isinstance(entry, str))

    def is_skipped(self, name: str) -> bool:
        """Whether the quantization config leaves out the layer of a tensor."""
        parts, patterns = self._skipped.parts, self._skipped.patterns
        words = name.split(".")
        for end, word in enumerate(words, 1):
            if word in parts and any(".".join(words[i:end]) in parts[word] for i in range(end)):
                return True
        if not patterns:
            return False
        if len(name) > _MAX_NAME or time.process_time() > self._skipped.deadline:
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: the patterns of the quantization config take too "
                f"long: expected names of up to {_MAX_NAME} characters and {_MAX_SECONDS:.0f} s, "
                f"got to {listed([name])}"
            )
        bare = without_prefix(name)
        names = (name, bare, name.rpartition(".")[0], bare.rpartition(".")[0])
        return any(pattern.match(each) for pattern in patterns for each in dict.fromkeys(names))

    @cached_property
    def differences(self) -> tuple[list[str], list[str]]:
        """Names that the found MTP layers lack, and further names that they have."""
        return _differences(self)

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, the target first."""
        return (*_target_problems(self), *_mtp_problems(self), *_quantization_problems(self))


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read `config.json`, the index and the headers of every safetensors file.

    Without an index, every file is read, as by vLLM; of files that are not listed, only the tensors
    of MTP layers count.

    Raises:
        CheckpointError: no directory or another kind of checkpoint, bad JSON, a git-lfs pointer, a
            missing or broken file, a tensor in several files.
    """
    directory = checkpoint_directory(path)
    check_kind(directory)
    config = read_json(directory / CONFIG_FILE)
    every = sorted(file.name for file in directory.glob("*.safetensors"))
    # the same weights under other names, for another loader
    names = [name for name in every if not name.startswith("consolidated")] or every
    has_index, indexed = (directory / INDEX_FILE).is_file(), dict[str, str]()
    if SINGLE_FILE in names:  # as in transformers
        chosen = [SINGLE_FILE]
    elif has_index:
        indexed = read_index(directory / INDEX_FILE)
        chosen = sorted(set(indexed.values()))
    else:
        chosen = names
    if not chosen:
        raise CheckpointError(f"checkpoint {directory}: expected *.safetensors files, found none")
    tensors: dict[str, StoredTensor] = {}
    for file in chosen:
        for name, tensor in file_headers(directory / file):
            if name in tensors:
                raise CheckpointError(
                    f"checkpoint {directory}: a tensor is in several files: {listed([name])}"
                )
            tensors[name] = tensor
    absent = sorted(indexed.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX_FILE} names {len(absent)} tensor(s) that its files do "
            f"not hold: {listed(absent)}"
        )
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
        if further and has_index:
            unlisted.append(directory / file)
    return Checkpoint(directory, config, tensors, tuple(unlisted))


def describe(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return what was found as (name, value) pairs."""
    tensors, mtp, found = checkpoint.tensors, checkpoint.mtp, checkpoint.found
    files = len({tensor.file for tensor in tensors.values()})
    known = "" if checkpoint.family else " (no MTP layers known)"
    where = listed(sorted({tensors[name].file.name for name in mtp}))
    lines = [
        ("checkpoint", f"{checkpoint.directory}: {len(tensors)} tensors in {files} file(s)"),
        ("family", f"{spelled(checkpoint.model_type)}{known}"),
        (
            "MTP layers",
            f"{checkpoint.declared} declared, {len(found)} found{where and f' in {where}'}",
        ),
    ]
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
        return vllm_command("TARGET", drafter=directory)
    given = (section.get(key) for section in _sections(config) for key in _COUNT_KEYS)
    default = int(model_type in FAMILIES)
    layers = next((n for n in given if isinstance(n, int)), default)
    # vLLM refuses 3 drafts by 2 layers
    return vllm_command(directory, layers if layers in (0, 2) else 3, options=options)


def is_quantized(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a quantized weight."""
    leaf = name.rpartition(".")[2]
    if _SCALE.fullmatch(leaf):
        return False
    return leaf in _PACKED or tensor.dtype.startswith(_QUANTIZED)


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


def _differences(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    family = checkpoint.family
    if family is None or not checkpoint.found:
        return [], []
    have = {name for stored in checkpoint.mtp for name in _canonical(without_prefix(stored))}
    missing = {f"{module}.weight" for module in family.once} - have
    extra: set[str] = set()
    layers = _target_layers(checkpoint)
    for depth in checkpoint.found:
        own = {f"{name.format(n=checkpoint.first_layer + depth)}.weight" for name in family.own}
        missing |= own - have
        if family.block is None:
            continue
        stem = family.block.format(n=checkpoint.first_layer + depth)
        block = {name.removeprefix(stem) for name in have - own if name.startswith(stem)}
        lacks, others = _compare({name for name in block if not _COPY.match(name)}, layers)
        missing.update(stem + name for name in lacks)
        extra.update(stem + name for name in others)
    missing.update(_missing_experts(checkpoint))
    return tuple(sorted(family.prefix + name for name in names) for names in (missing, extra))  # type: ignore[return-value]


def _compare(block: set[str], layers: list[set[str]]) -> tuple[set[str], set[str]]:
    """Return what a block lacks of the most similar layers of the target, and what they lack.

    Feed-forward parts are compared with those of the same kind alone: MTP blocks may be mixtures of
    experts after dense targets, and the other way round.
    """
    lacks, others = set[str](), set[str]()
    for is_mlp in (False, True):
        part = {name for name in block if name.startswith("mlp.") == is_mlp}
        known = [{name for name in layer if name.startswith("mlp.") == is_mlp} for layer in layers]
        if is_mlp and part:
            is_sparse = any(".experts." in name for name in part)
            known = [k for k in known if any(".experts." in name for name in k) == is_sparse]
        nearest = min(known, key=lambda names: len(names ^ part), default=part)
        lacks |= nearest - part
        others |= part - nearest
    return lacks, others


def _target_layers(checkpoint: Checkpoint) -> list[set[str]]:
    """Return the names in each kind of layer of the target that has full attention."""
    layers: dict[str, set[str]] = {}
    for name in checkpoint.parts["target"]:
        found = _TARGET_LAYER.fullmatch(without_prefix(name))
        if found:
            layers.setdefault(found[1], set()).update(_canonical(found[2]))
    kinds = [set(kind) for kind in {frozenset(layer) for layer in layers.values()}]
    return [kind for kind in kinds if any(n.startswith("self_attn.") for n in kind)] or kinds


def _missing_experts(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the experts that are missing where they are stored one by one."""
    seen: dict[tuple[str, str], set[int]] = {}
    for name in checkpoint.mtp:
        found = _EXPERT.fullmatch(without_prefix(name))
        if found and found["number"] and not _SCALE.fullmatch(found["leaf"] or ""):
            numbers = seen.setdefault((found["experts"], found["name"]), set())
            numbers.add(int(found["number"]))
    count = min(checkpoint.number(*_EXPERT_KEYS), _MAX_EXPERTS)
    for (experts, name), numbers in seen.items():
        for number in sorted(set(range(count)) - numbers):
            yield f"{experts}.{number}.{name}.weight"


def _canonical(name: str) -> tuple[str, ...]:
    """Return the names of the unquantized tensors of one expert; none: a scale or a buffer."""
    leaf = name.rpartition(".")[2]
    if _SCALE.fullmatch(leaf) or leaf == "inv_freq":
        return ()
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return (f"{name[: -len(leaf)]}weight" if leaf in _PACKED else name,)
    names = ("gate_proj", "up_proj") if expert["name"] == "gate_up_proj" else (expert["name"],)
    leaf = "weight" if expert["leaf"] in (None, *_PACKED) else expert["leaf"]
    return tuple(f"{expert['experts']}.{name}.{leaf}" for name in names)


def _split_skipped(entries: Iterable[str]) -> Skipped:
    """Return what the entries of a list of layers mean.

    A checkpoint may have hundreds of entries and 100,000 tensors, so that patterns are joined.
    """
    found = Skipped(time.process_time() + _MAX_SECONDS)
    joined = []
    for entry in entries:
        pattern = entry[3:] if entry.startswith("re:") else _pattern_of(entry)
        if pattern is None:
            part = without_prefix(entry.strip("."))
            found.parts.setdefault(part.rpartition(".")[2], set()).add(part)
            continue
        repeats = _repeats(pattern)
        if repeats > _MAX_REPEATS or time.process_time() > found.deadline:
            found.unread.append(entry)
            continue
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            found.parts.setdefault(pattern.rpartition(".")[2], set()).add(pattern)
            continue
        # joined, groups would have other numbers, and many slow patterns no time limit
        if compiled.groups or "(?" in entry or repeats > 2:
            found.patterns.append(compiled)
        else:
            joined.append(pattern)
    if joined:
        found.patterns.append(re.compile("|".join(f"(?:{pattern})" for pattern in joined)))
    return found


def _pattern_of(entry: str) -> str | None:
    """Return the pattern of an entry with `*`, which begins and ends at a dot; None: no `*`."""
    part = without_prefix(entry.strip("."))
    if "*" not in part:
        return None
    any_of = ".*".join(map(re.escape, re.split(r"\*+", part)))
    begin = "" if part.startswith("*") else r"(?:.*\.)?"
    return begin + any_of.removesuffix(".*") + ("" if part.endswith("*") else r"(?:\.|\Z)")


def _repeats(pattern: str) -> float:
    """Return the number of repeats of a pattern; infinity: a group is repeated, or it is too long.

    A match takes as many steps as there are ways to divide a name between the repeats. With
    repeats in a repeated group, their number grows exponentially with the length of the name.
    """
    bare = _ATOM.sub("x", pattern[: _MAX_PATTERN + 1])
    if len(pattern) > _MAX_PATTERN or _REPEATED_GROUP.search(bare):
        return math.inf
    bare = re.sub(r"(?<=[*+?}])[?+]", "", bare.replace("(?", "("))
    return sum(map(bare.count, "*+?{"))


def _target_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    names, number = checkpoint.parts["target"], checkpoint.number("num_hidden_layers")
    stored = {found[1]: n for n in names if (found := _TARGET_LAYER.match(without_prefix(n)))}
    absent = next((layer for layer in range(number) if str(layer) not in stored), None)
    # other families may name layers otherwise
    if absent is not None and (stored or isinstance(checkpoint.family, MTPFamily)):
        yield Problem(
            f"config.json says num_hidden_layers = {number}, the files have no tensor of "
            f"model.layers.{absent}",
            "refusal",
            is_of_mtp=False,
        )
    is_text = "text_config" not in checkpoint.config and checkpoint.family is not None
    odd = next((n for n in stored.values() if not n.startswith("model.layers.")), None)
    if is_text and odd is not None:
        yield Problem(
            f"tensors of the target are named like {spelled(odd)}, family {checkpoint.model_type} "
            f"has model.{without_prefix(odd)}: rename them",
            "refusal",
            is_of_mtp=False,
        )
    if checkpoint.value("tie_word_embeddings") is False and not checkpoint.parts["head"]:
        yield Problem(
            "lm_head.weight is missing, and tie_word_embeddings is false: take the files of the "
            "original checkpoint, or set it to true if the head is the embedding",
            "refusal",
            is_of_mtp=False,
        )
    ties = checkpoint.family is not None and checkpoint.family.ties_head
    if ties and checkpoint.is_tied and checkpoint.has_own_head:
        yield Problem(
            f"vLLM uses the embedding as the head of {checkpoint.model_type}, not lm_head.weight, "
            f"{OWN_HEAD}: set it to false",
            "refusal",
            is_of_mtp=False,
            is_of_vllm=True,
        )


def _mtp_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    family, declared, found = checkpoint.family, checkpoint.declared, checkpoint.found
    if family is None:
        return
    key = next(iter(family.keys), "the number of MTP layers")
    unnoticed = family.notices == "norms" and bool(checkpoint.quantization)
    whole: InVllm = "random" if unnoticed else "refusal"
    alike = [n for n in checkpoint.parts["target"] if _LIKE_MTP.match(n) and not _COPY.match(n)]
    if alike:
        example = (family.own or family.once)[0].format(n=checkpoint.first_layer)
        yield Problem(
            f"{len(alike)} tensor(s) such as {spelled(alike[0])} look like MTP layers, family "
            f"{checkpoint.model_type} names them like {family.prefix}{example}.weight: rename them",
            "refusal",
        )
    elif declared and not found:
        yield Problem(
            f"config.json declares {declared} MTP layer(s), the files have none of their tensors "
            "(transformers leaves them out when it saves a model): take the files of the original "
            "checkpoint",
            whole,
        )
    elif declared > len(found):
        is_begin = found == tuple(range(len(found)))
        fewer = f"set {key} to {len(found)}, or " if is_begin else ""
        yield Problem(
            f"config.json declares {declared} MTP layers, the files have {len(found)}: {fewer}"
            "take the files of the original checkpoint",
            whole,
        )
    if declared < len(found) and family.reads == "all":
        yield Problem(
            f"config.json declares {declared or 'no'} MTP layer(s), the files have {len(found)}: "
            f"set {key} to {len(found)}",
            "refusal",
        )
    renamed = [n for n in checkpoint.mtp if n != family.prefix + without_prefix(n)]
    if renamed:
        yield Problem(
            f"{len(renamed)} MTP tensor(s) are named like {spelled(renamed[0])}, family "
            f"{checkpoint.model_type} has {family.prefix}{without_prefix(renamed[0])}: rename them",
            whole,
        )
    if checkpoint.unlisted:
        yield Problem(
            f"{INDEX_FILE} does not name {listed(file.name for file in checkpoint.unlisted)}, "
            "which has MTP tensors; vLLM reads named files alone: add its tensors to weight_map",
            whole,
            is_of_vllm=True,
        )
    missing, extra = checkpoint.differences
    if missing:
        norms = not checkpoint.quantization and any("norm" in name for name in missing)
        experts = checkpoint.number(*_EXPERT_KEYS)
        count = f" (of {experts} experts)" if any(".experts." in name for name in missing) else ""
        yield Problem(
            f"{len(missing)} tensor(s) of the MTP layers are missing: {listed(missing)}{count}; "
            "take the files of the original checkpoint",
            "refusal" if norms or family.notices == "tensors" else "random",
        )
    if extra:
        yield Problem(
            f"{len(extra)} tensor(s) of the MTP layers are unknown to family "
            f"{checkpoint.model_type}: {listed(extra)}",
            "refusal",
        )


def _quantization_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    config, method = checkpoint.quantization, checkpoint.method
    named = f"the quantization config ({method})" if config else "config.json names no method and"
    for part, title in PARTS.items():
        names = checkpoint.quantized[part]
        is_left_out = not config or (
            part == "head" and method.partition(" ")[0] in _HEADLESS and not config.get("lm_head")
        )
        odd = names if is_left_out else [name for name in names if checkpoint.is_skipped(name)]
        if odd:
            yield Problem(
                f"{len(odd)} weight(s) of the {title} are quantized, {named} leaves them out: "
                f"{listed(odd)}",
                "random" if part == "mtp" else "refusal",
                is_of_mtp=part == "mtp",
                is_of_vllm=True,
            )
    unread = checkpoint._skipped.unread
    if unread:
        yield Problem(
            f"{len(unread)} pattern(s) of the quantization config are not read, their matches may "
            f"not end: {listed(unread)}; expected at most {_MAX_REPEATS} repeats and no repeated "
            "group",
            "refusal",
            is_of_mtp=False,
            is_of_vllm=True,
        )
    modules = {name.split(".")[-2] for name in checkpoint.quantized["target"] if "." in name}
    odd = [
        name
        for name in checkpoint.mtp
        if name.endswith(".weight")
        and name.split(".")[-2] in modules
        and not is_quantized(name, checkpoint.tensors[name])
        and not checkpoint.is_skipped(name)
    ]
    if config and odd:
        key = next((key for key in _SKIPPED if key in config), None)
        key = key or _SKIPPED_BY.get(method.partition(" ")[0], _SKIPPED[0])
        target = checkpoint.quantized["target"]
        # vLLM has no parameter of the name `weight` then
        is_packed = any(name.endswith(_PACKED) for name in target)
        yield Problem(
            f"{len(odd)} weight(s) of the MTP layers are not quantized, {named} covers them: "
            f"{listed(odd)}; add these layers to its {key}",
            "refusal" if is_packed else "random",
            is_of_vllm=True,
        )

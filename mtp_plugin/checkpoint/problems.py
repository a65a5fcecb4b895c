"""What is wrong with a checkpoint, and what vLLM does with it then."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from mtp_plugin.checkpoint.families import MTPFamily, without_prefix
from mtp_plugin.checkpoint.files import INDEX_FILE, SINGLE_FILE, StoredTensor, listed
from mtp_plugin.checkpoint.skipped import MAX_REPEATS
from mtp_plugin.checkpoint.tensor_names import (
    COPY,
    EXPERT,
    FLOATING,
    LIKE_MTP,
    PACKED,
    SCALE,
    TARGET_LAYER,
    canonical,
    is_quantized,
)
from mtp_plugin.config.messages import spelled

if TYPE_CHECKING:
    from mtp_plugin.checkpoint.check import Checkpoint

InVllm = Literal["drafts", "random", "refusal"]
IN_VLLM: Mapping[InVllm, str] = {
    "drafts": "drafts",
    "random": "drafts at random: it starts, acceptance is near 0, outputs are those without drafts",
    "refusal": "refuses to start, or its outputs are wrong",
}
"""What vLLM does with a checkpoint, from good to bad."""
Part = Literal["target", "mtp", "head"]
PARTS: Mapping[Part, str] = {"target": "target", "mtp": "MTP layers", "head": "head"}
ORIGINAL = "take the files of the original checkpoint"

_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_MAX_EXPERTS, _MAX_NAMES, _MAX_KINDS = 2**16, 2**18, 64
"""Of names that a config or a header may ask for."""
_HEADLESS = ("fp8", "gptq", "awq")
"""Quantization methods of vLLM that leave out the head, unless `lm_head` is true."""
_ANY_EXPERT = re.compile(r"(?<=\.experts)\.[0-9]{1,9}\.")
_ALIKE = 3
"""Layers of the target that show what another one lacks."""
_EMBEDDING = re.compile(r"(?:embed_tokens|word_embeddings|lm_head)\.weight")
_FINAL_NORM = re.compile(r"\w*norm\w*\.weight")
_PROJECTION = re.compile(r"(?:.*\.)?(?:eh_proj|input_proj|mtp\.fc|mtp_linear_proj\.[0-9]+)\.\w+")
"""Of a normed embedding and a normed hidden state, to one hidden state."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a checkpoint."""

    text: str
    in_vllm: InVllm
    is_of_mtp: bool = True
    """Whether the target alone runs."""
    is_of_vllm: bool = False
    """Whether it matters in vLLM only."""


def problems_of(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what is wrong, the target first."""
    yield from _target_problems(checkpoint)
    yield from _mtp_problems(checkpoint)
    yield from _shape_problems(checkpoint)
    yield from _quantization_problems(checkpoint)


# --- names ---


def differences_of(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    family = checkpoint.family
    if family is None or not checkpoint.found:
        return [], []
    have = {name for stored in checkpoint.mtp for name in canonical(without_prefix(stored))}
    missing = {f"{module}.weight" for module in family.once} - have
    extra: set[str] = set()
    kinds = [set(kind) for kind in set(map(frozenset, _target_layers(checkpoint).values()))]
    layers = [kind for kind in kinds if any(n.startswith("self_attn.") for n in kind)] or kinds
    for depth in checkpoint.found[:_MAX_KINDS]:
        own = {f"{name.format(n=checkpoint.first_layer + depth)}.weight" for name in family.own}
        missing |= own - have
        if family.block is None:
            continue
        stem = family.block.format(n=checkpoint.first_layer + depth)
        block = {name.removeprefix(stem) for name in have - own if name.startswith(stem)}
        lacks, others = _compare({name for name in block if not COPY.match(name)}, layers)
        missing.update(stem + name for name in lacks)
        extra.update(stem + name for name in others)
    missing.update(_missing_experts(checkpoint, checkpoint.mtp))
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


def _target_layers(checkpoint: Checkpoint) -> Mapping[str, set[str]]:
    """Return the names in each layer of the target, by its number."""
    layers: dict[str, set[str]] = {}
    for name in checkpoint.parts["target"]:
        found = TARGET_LAYER.fullmatch(without_prefix(name))
        if found:
            layers.setdefault(found[1], set()).update(canonical(found[2]))
    return layers


def _incomplete_layers(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield what a single layer of the target lacks of several others."""
    layers = _target_layers(checkpoint)
    for is_mlp in (False, True):
        parts = {
            number: frozenset(n for n in names if n.startswith("mlp.") == is_mlp)
            for number, names in layers.items()
        }
        counts = Counter(parts.values())
        kinds = [kind for kind, count in counts.most_common(_MAX_KINDS) if count >= _ALIKE]
        for number, part in parts.items():
            if counts[part] == 1:
                whole = (kind - part for kind in kinds if part < kind)
                lacks = min(whole, key=len, default=frozenset[str]())
                names = (n for n in sorted(lacks) if n.endswith(".weight") and "indexer" not in n)
                yield from (f"layers.{number}.{name}" for name in names)


def _missing_experts(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[str]:
    """Yield the experts that are missing where they are stored one by one."""
    seen: dict[tuple[str, str], set[int]] = {}
    for name in names:
        found = EXPERT.fullmatch(without_prefix(name))
        if found and found["number"] and not SCALE.fullmatch(found["leaf"] or ""):
            numbers = seen.setdefault((found["experts"], found["name"]), set())
            numbers.add(int(found["number"]))
    count = min(checkpoint.number(*_EXPERT_KEYS), _MAX_EXPERTS)
    missing = (
        f"{experts}.{number}.{name}.weight"
        for (experts, name), numbers in seen.items()
        for number in range(count)
        if number not in numbers
    )
    yield from islice(missing, _MAX_NAMES)


def _target_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    names, number = checkpoint.parts["target"], checkpoint.number("num_hidden_layers")
    stored = {found[1]: n for n in names if (found := TARGET_LAYER.match(without_prefix(n)))}
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
    given, family = checkpoint.value("tie_word_embeddings"), checkpoint.family
    is_untied = given is False or (family is not None and not checkpoint.is_tied)
    if is_untied and not checkpoint.parts["head"]:
        default = "" if given is False else f" for {checkpoint.model_type} where it is not given"
        yield Problem(
            f"lm_head.weight is missing, and tie_word_embeddings is false{default}: take the files "
            "of the original checkpoint, or set it to true if the head is the embedding",
            "refusal",
            is_of_mtp=False,
        )
    missing = [*_missing_of_target(checkpoint)] if stored and absent is None else []
    if missing:
        yield Problem(
            f"{len(missing)} tensor(s) of the target are missing: {listed(missing)}; {ORIGINAL}",
            "refusal",
            is_of_mtp=False,
        )


def _missing_of_target(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the tensors that the target lacks: embedding, last norm, and parts of its layers.

    Of families whose MTP layers have a block of another kind, too little is known of the target.
    """
    if checkpoint.family is None or checkpoint.family.block is None:
        return
    bare = {without_prefix(name): name for name in checkpoint.parts["target"]}
    layer = next(name for name in bare if TARGET_LAYER.match(name))
    prefix = bare[layer].removesuffix(layer)
    if not any("embed" in name for name in bare):
        yield f"{prefix}embed_tokens.weight"
    if not any(map(_FINAL_NORM.fullmatch, bare)):
        yield f"{prefix}norm.weight"
    experts = _missing_experts(checkpoint, filter(TARGET_LAYER.match, bare))
    yield from (f"{prefix}{name}" for name in (*_incomplete_layers(checkpoint), *experts))


def _mtp_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    family, declared, found = checkpoint.family, checkpoint.declared, checkpoint.found
    if family is None:
        return
    key = next(iter(family.keys), "the number of MTP layers")
    unnoticed = family.notices == "norms" and bool(checkpoint.quantization)
    whole: InVllm = "random" if unnoticed else "refusal"
    alike = [n for n in checkpoint.parts["target"] if LIKE_MTP.match(n) and not COPY.match(n)]
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
            f"(transformers leaves them out when it saves a model): {ORIGINAL}",
            whole,
        )
    elif declared > len(found) and family.reads != "first":
        is_begin = found == tuple(range(len(found)))
        fewer = f"set {key} to {len(found)}, or " if is_begin else ""
        yield Problem(
            f"config.json declares {declared} MTP layers, the files have {len(found)}: {fewer}"
            f"{ORIGINAL}",
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
        is_whole = any(file.name == SINGLE_FILE for file in checkpoint.unlisted)
        advice = "remove the index" if is_whole else "add its tensors to weight_map"
        yield Problem(
            f"{INDEX_FILE} does not name {listed(file.name for file in checkpoint.unlisted)}, "
            f"which has MTP tensors; vLLM reads named files alone: {advice}",
            whole,
            is_of_vllm=True,
        )
    fused = [n for n in checkpoint.mtp if (e := EXPERT.fullmatch(n)) and e["number"] is None]
    if fused and family.is_absolute:
        yield Problem(
            f"{len(fused)} tensor(s) of the MTP layers hold all experts: {listed(fused)}; vLLM "
            f"reads those of {checkpoint.model_type} one by one: split them into tensors such as "
            "experts.0.down_proj.weight",
            "refusal",
            is_of_vllm=True,
        )
    missing, extra = checkpoint.differences
    if missing:
        norms = not checkpoint.quantization and any("norm" in name for name in missing)
        experts = checkpoint.number(*_EXPERT_KEYS)
        count = f" (of {experts} experts)" if any(".experts." in name for name in missing) else ""
        yield Problem(
            f"{len(missing)} tensor(s) of the MTP layers are missing: {listed(missing)}{count}; "
            f"{ORIGINAL}",
            "refusal" if norms or family.notices == "tensors" else "random",
        )
    if extra:
        yield Problem(
            f"{len(extra)} tensor(s) of the MTP layers are unknown to family "
            f"{checkpoint.model_type}: {listed(extra)}",
            "refusal",
        )


# --- shapes ---


def _shape_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    wrong: dict[bool, list[str]] = {}
    for name, shapes in _expected_shapes(checkpoint):
        stored = checkpoint.tensors[name]
        if _is_unpacked(stored) and stored.shape not in shapes:
            expected = " or ".join(str([*shape]) for shape in sorted(shapes))
            shown = f"{spelled(name)} {[*stored.shape]} (expected {expected})"
            wrong.setdefault(name in checkpoint.mtp, []).append(shown)
    for is_of_mtp, names in wrong.items():
        yield Problem(
            f"{len(names)} tensor(s) of the {PARTS['mtp' if is_of_mtp else 'target']} do not fit: "
            f"{listed(names)}; {ORIGINAL}, or correct vocab_size and "
            "hidden_size",
            "refusal",
            is_of_mtp,
        )


def _expected_shapes(checkpoint: Checkpoint) -> Iterator[tuple[str, Collection[tuple[int, ...]]]]:
    """Yield tensors whose shapes vLLM asserts, each with the shapes that fit."""
    family = checkpoint.family
    hidden, rows = checkpoint.number("hidden_size"), checkpoint.number("vocab_size")
    if family is None or not hidden or not rows:
        return
    has_heads = any("shared_head" in name for name in family.own)  # others do not read copies
    copies = sorted(checkpoint.copies) if has_heads else ()
    for name in (*checkpoint.parts["target"], *checkpoint.parts["head"], *copies):
        if name in copies or _EMBEDDING.fullmatch(without_prefix(name)):
            yield name, [(rows, hidden)]
    projections = (name for name in _projections(checkpoint) if name.endswith(".weight"))
    yield from ((name, [(hidden, 2 * hidden)]) for name in projections)
    if family.block is None:
        return
    known: dict[str, set[tuple[int, ...]]] = {}
    for name in checkpoint.parts["target"]:
        found = TARGET_LAYER.fullmatch(without_prefix(name))
        if found and _is_unpacked(checkpoint.tensors[name]):
            known.setdefault(_ANY_EXPERT.sub(".", found[2]), set()).add(
                checkpoint.tensors[name].shape
            )
    for name, depth in checkpoint.mtp.items():
        stem = family.block.format(n=checkpoint.first_layer + (depth or 0))
        rest = _ANY_EXPERT.sub(".", without_prefix(name).removeprefix(stem))
        if rest in known:
            yield name, known[rest]


def _is_unpacked(tensor: StoredTensor) -> bool:
    return tensor.dtype in FLOATING or tensor.dtype.startswith("F8")


def _projections(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.mtp if _PROJECTION.fullmatch(without_prefix(name))]


# --- quantization ---


def _quantization_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    config, method = checkpoint.quantization, checkpoint.method
    named = f"the quantization config ({method})" if config else "config.json names no method and"
    for part, title in PARTS.items():
        names = checkpoint.quantized[part]
        is_left_out = not config or (
            part == "head" and method.partition(" ")[0] in _HEADLESS and not config.get("lm_head")
        )
        odd = names if is_left_out else [name for name in names if checkpoint.skipped.holds(name)]
        if odd:
            yield Problem(
                f"{len(odd)} weight(s) of the {title} are quantized, {named} leaves them out: "
                f"{listed(odd)}",
                "refusal",
                is_of_mtp=part == "mtp",
                is_of_vllm=True,
            )
    unread = checkpoint.skipped.unread
    if unread:
        yield Problem(
            f"{len(unread)} pattern(s) of the quantization config are not read, their matches may "
            f"not end: {listed(unread)}; expected at most {MAX_REPEATS} repeats and no repeated "
            "group",
            "refusal",
            is_of_mtp=False,
            is_of_vllm=True,
        )
    yield from _quantized_projections(checkpoint)
    modules = {name.split(".")[-2] for name in checkpoint.quantized["target"] if "." in name}
    odd = [
        name
        for name in checkpoint.mtp
        if name.endswith(".weight")
        and name.split(".")[-2] in modules
        and not is_quantized(name, checkpoint.tensors[name])
        and not checkpoint.skipped.holds(name)
        and not checkpoint.skipped.is_found_in_files(name)
    ]
    if config and odd:
        # vLLM has no parameter of the name `weight` then
        is_packed = any(name.endswith(PACKED) for name in checkpoint.quantized["target"])
        yield Problem(
            f"{len(odd)} weight(s) of the MTP layers are not quantized, {named} covers them: "
            f"{listed(odd)}; {checkpoint.skipped.advice(odd)}",
            "refusal" if is_packed else "random",
            is_of_vllm=True,
        )


def _quantized_projections(checkpoint: Checkpoint) -> Iterator[Problem]:
    family = checkpoint.family
    names = [n for n in _projections(checkpoint) if is_quantized(n, checkpoint.tensors[n])]
    if names and family is not None and family.has_plain_projection:
        # the loaders of two families skip a scale of this name, so that the weight is used without
        is_random = checkpoint.model_type in ("glm4_moe", "glm_ocr") and all(
            f"{name}_scale" in checkpoint.tensors for name in names
        )
        yield Problem(
            f"{len(names)} projection(s) of the MTP layers are quantized: {listed(names)}; vLLM "
            f"never quantizes them in family {checkpoint.model_type}: store them in the dtype of "
            f"the original, and name them in {checkpoint.skipped.key}",
            "random" if is_random else "refusal",
            is_of_vllm=True,
        )

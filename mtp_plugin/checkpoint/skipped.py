"""Which layers a quantization config leaves out, by the rules of vLLM's loader of its method."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mtp_plugin.checkpoint.families import without_prefix
from mtp_plugin.checkpoint.files import listed
from mtp_plugin.errors import CheckpointError

Rule = Literal["whole", "whole or re:", "pieces", "dynamic", "parts"]
"""What an entry is: the whole name of a module, also a regular expression, a piece of the name,
the regular expression of a key of `dynamic`, or a part of the name between dots."""

_RULES: Mapping[str, tuple[Rule, tuple[str, ...]]] = {
    "fp8": ("whole", ("ignored_layers", "modules_to_not_convert")),
    "fbgemm_fp8": ("whole", ("modules_to_not_convert",)),
    "compressed-tensors": ("whole or re:", ("ignore",)),
    "awq": ("pieces", ("modules_to_not_convert",)),
    "gptq": ("dynamic", ("dynamic",)),
}
"""By `quant_method`: how vLLM reads entries, and their keys, of which the first that is given
counts."""
_ANY = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
"""Modules that vLLM fuses, whose name may be in the list instead of theirs."""
_LAYER = re.compile(r".*?\.[0-9]+\.")
MAX_PATTERN, MAX_REPEATS, MAX_NAME = 1000, 5, 128
"""Limits under which one match of a pattern with a name takes seconds at most."""
_MAX_SECONDS = 20.0
"""CPU time of all matches."""
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape or a character class."""
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?[A-Za-z-]*x")
"""Also the flag by which spaces may precede a repeat."""


@dataclass(frozen=True)
class Skipped:
    """The layers that the quantization config of a checkpoint leaves out."""

    config: Mapping[str, Any]
    """The quantization config."""
    deadline: float = field(default_factory=lambda: time.process_time() + _MAX_SECONDS)
    """Of all matches, in CPU time of the process."""
    answers: dict[str, bool] = field(default_factory=dict)
    """By module."""

    @cached_property
    def rule(self) -> Rule:
        return self._rule[0]

    @cached_property
    def key(self) -> str:
        """The key for further entries."""
        keys = self._rule[1]
        return next((key for key in keys if self.config.get(key)), keys[-1])

    @property
    def _rule(self) -> tuple[Rule, tuple[str, ...]]:
        return _RULES.get(str(self.config.get("quant_method")).lower(), ("parts", _ANY))

    @cached_property
    def entries(self) -> list[str]:
        """Entries that vLLM reads."""
        rule, keys = self._rule
        if rule == "dynamic":
            given = self.config.get(self.key)
            return (
                [f"re:{k[2:]}" for k in given if k[:2] == "-:"] if isinstance(given, dict) else []
            )
        lists = [self.config.get(key) for key in (keys if rule == "parts" else [self.key])]
        every = [entry for entries in lists if isinstance(entries, list) for entry in entries]
        return [entry for entry in every if isinstance(entry, str)]

    @cached_property
    def _blocks(self) -> list[str]:
        """Pieces of the names of all quantized layers, in a config of GPTQ; empty: not given."""
        given = self.config.get("modules_in_block_to_quantize") if self.rule == "dynamic" else None
        lists = given if isinstance(given, list) else []
        every = (each if isinstance(each, list) else [each] for each in lists)
        return [piece for pieces in every for piece in pieces if isinstance(piece, str)]

    def is_found_in_files(self, name: str) -> bool:
        """Whether vLLM looks up in the files if the layer of a tensor is quantized."""
        given = {"pieces": self.entries, "dynamic": self._blocks}.get(self.rule, [name])
        return not given and ".experts." not in name

    def advice(self, names: Sequence[str]) -> str:
        """Return how to leave out the layers of these tensors."""
        modules, begin = dict.fromkeys(map(self._module, names)), _LAYER.match(names[0])
        expression = f"{re.escape(begin[0] if begin else names[0])}.*"
        whole = f"add the whole names of their modules, {listed(modules)}, to its {self.key}"
        return {
            "whole": f"{whole}: parts of names leave out nothing",
            "whole or re:": f"{whole}, or an expression, such as re:{expression}",
            "dynamic": f'add "-:{expression}": {{}} to its {self.key}',
        }.get(self.rule, f"add these layers to its {self.key}")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(map(_in_vllm, self.entries))

    @property
    def unread(self) -> list[str]:
        """Entries whose match may not end."""
        return self._patterns[2]

    @cached_property
    def _patterns(self) -> tuple[dict[str, set[str]], list[re.Pattern[str]], list[str]]:
        """Parts of names by their last word, patterns of begins of names, and unread entries."""
        patterns = [entry for entry in self.entries if entry.startswith("re:")]
        every = {"parts": self.entries, "whole": [], "pieces": []}
        return _split(every.get(self.rule, patterns), self.deadline)

    def holds(self, name: str) -> bool:
        """Whether the layer of a tensor is left out.

        Raises:
            CheckpointError: the matches take too long.
        """
        name = name if self.rule == "parts" else self._module(name)
        if name not in self.answers:
            parts, patterns, _ = self._patterns
            if patterns or self.rule in ("whole", "pieces"):
                self._check_time(name, is_pattern=bool(patterns))
            self.answers[name] = self._is_part(name, parts, patterns)
        return self.answers[name]

    def _module(self, name: str) -> str:
        """Return the module with which vLLM compares the entries."""
        experts, found, _ = name.rpartition(".experts.")
        is_one = found and self.rule != "whole or re:"  # all experts at once
        return f"{experts}.experts" if is_one else name.rpartition(".")[0]

    def _is_part(
        self, name: str, parts: Mapping[str, set[str]], patterns: list[re.Pattern[str]]
    ) -> bool:
        stem, _, word = name.rpartition(".")
        if self.rule == "parts":
            words, bare = name.split("."), without_prefix(name)
            for end, last in enumerate(words, 1):
                if last in parts and any(".".join(words[i:end]) in parts[last] for i in range(end)):
                    return True
            forms = {name, bare, stem, bare.rpartition(".")[0]}
            return any(pattern.match(each) for pattern in patterns for each in forms)
        own, fused = _in_vllm(name), f"{_in_vllm(stem)}.{_FUSED.get(word, word)}"
        if self.rule == "pieces":
            return any(entry in own or entry in fused for entry in self.names)
        if self.rule == "dynamic":
            is_outside = self._blocks and not any(piece in own for piece in self._blocks)
            return any(pattern.match(fused) for pattern in patterns) or (
                bool(is_outside) and "experts" not in word
            )
        if self.rule == "whole" and "experts" in own and own == fused:
            return any(own in entry for entry in self._of_experts)
        is_named = own in self.names or fused in self.names
        return is_named or any(p.match(each) for p in patterns for each in (own, fused))

    @cached_property
    def _of_experts(self) -> list[str]:
        return [entry for entry in self.names if "experts" in entry]

    def _check_time(self, name: str, *, is_pattern: bool) -> None:
        if (is_pattern and len(name) > MAX_NAME) or time.process_time() > self.deadline:
            raise CheckpointError(
                "the patterns of the quantization config take too long: expected names of up to "
                f"{MAX_NAME} characters and {_MAX_SECONDS:.0f} s, got to {listed([name])}"
            )


def _in_vllm(name: str) -> str:
    """Return a name of a multimodal model in one of its two orders of prefixes."""
    rest = name.removeprefix("model.language_model.")
    return name if rest == name else f"language_model.model.{rest}"


def _split(
    entries: Iterable[str], deadline: float
) -> tuple[dict[str, set[str]], list[re.Pattern[str]], list[str]]:
    """Return parts, patterns and unread entries.

    A checkpoint may have hundreds of entries and 100,000 tensors, so that patterns are joined.
    """
    parts, patterns, unread, joined = dict[str, set[str]](), list[re.Pattern[str]](), [], []
    for entry in entries:
        pattern = entry[3:] if entry.startswith("re:") else _pattern_of(entry)
        if pattern is None:
            part = without_prefix(entry.strip("."))
            parts.setdefault(part.rpartition(".")[2], set()).add(part)
            continue
        repeats = _repeats(pattern)
        if repeats > MAX_REPEATS or time.process_time() > deadline:
            unread.append(entry)
            continue
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            parts.setdefault(pattern.rpartition(".")[2], set()).add(pattern)
            continue
        # joined, groups would have other numbers, and many slow patterns no time limit
        if compiled.groups or "(?" in entry or repeats > 2:
            patterns.append(compiled)
        else:
            joined.append(pattern)
    if joined:
        patterns.append(re.compile("|".join(f"(?:{pattern})" for pattern in joined)))
    return parts, patterns, unread


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
    bare = _ATOM.sub("x", pattern[: MAX_PATTERN + 1])
    if len(pattern) > MAX_PATTERN or _REPEATED_GROUP.search(bare):
        return math.inf
    bare = re.sub(r"(?<=[*+?}])[?+]", "", bare.replace("(?", "("))
    return sum(map(bare.count, "*+?{"))

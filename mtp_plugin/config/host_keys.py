"""Config keys of other engines that this executor does not use, and the values it accepts for them.

The table is ``host_keys.json``: why a key has no effect, the accepted values, the types whose
values are all accepted, or the keys inside a mapping. An accepted value has no effect: the key is
dropped, and one log line lists all dropped keys. Any other value is an error (`schema`). Names and
defaults are those of ``llmapi/llm_args.py`` of TensorRT-LLM 1.2 to 1.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_plugin.config.messages import got

_TYPES: Mapping[str, type] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "object": dict,
}


@dataclass(frozen=True)
class HostKey:
    """A key of another engine without effect here, and its accepted values."""

    why: str
    """Why the key has no effect; the first part of the error message."""
    values: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    """Types, as JSON names them, whose values are all accepted."""
    inside: Mapping[str, HostKey] | None = None
    """Accepted keys, if the value is a mapping."""

    def accepts(self, value: Any) -> bool:
        if isinstance(value, Mapping) and self.inside is not None:
            return not self.refused(value)
        kind = dict if isinstance(value, Mapping) else type(value)
        # in Python 1 == True and 0 == False
        alike = any(type(each) is kind and each == value for each in self.values)
        return alike or any(_TYPES[each] is kind for each in self.types)

    def refused(self, value: Mapping[Any, Any]) -> list[tuple[str, str]]:
        """Return (key, message) for every key of the mapping that is refused."""
        inside = self.inside or {}
        return [
            (str(name), inside[name].message(item) if name in inside else "unknown key")
            for name, item in value.items()
            if name not in inside or not inside[name].accepts(item)
        ]

    def message(self, value: Any) -> str:
        words = [*map(got, self.values), *(f"any {each}" for each in self.types)]
        if self.inside is not None:
            words.append(f"a mapping of {', '.join(self.inside)}")
        return f"{self.why}; expected {' or '.join(words)}, got {got(value)}"

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        schema: dict[str, Any] = {"description": f"no effect: {self.why}"}
        if not self.types and self.inside is None:
            schema["enum"] = list(self.values)
        return schema


def _keys_of(rows: list[dict[str, Any]]) -> dict[str, HostKey]:
    return {
        name: HostKey(
            row["why"],
            tuple(row.get("values", ())),
            tuple(row.get("types", ())),
            _keys_of(row["inside"]) if "inside" in row else None,
        )
        for row in rows
        for name in row["keys"]
    }


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

TOP_LEVEL = _keys_of(_TABLE["top_level"])
"""TensorRT-LLM's, at the top level of the file."""
TOP_LEVEL_OF_ALL = {**TOP_LEVEL, **_keys_of(_TABLE["vllm"]), **_keys_of(_TABLE["sglang"])}
"""Those of TensorRT-LLM, vLLM and SGLang."""
KV_CACHE = _keys_of(_TABLE["kv_cache_config"])
CUDA_GRAPHS = _keys_of(_TABLE["cuda_graph_config"])
SPECULATIVE_OF_TRTLLM = _keys_of(_TABLE["speculative_config"])
SPECULATIVE = {**SPECULATIVE_OF_TRTLLM, **_keys_of(_TABLE["speculative_config_of_vllm"])}
"""Under a ``speculative_config`` of MTP."""

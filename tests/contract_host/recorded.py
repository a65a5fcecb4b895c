"""The recorded facts of each API version of TensorRT-LLM.

``lines/LINE.json`` has names, parameters, fields, members, bases and calls, and no body of a
function. It was copied by hand from the public sources that its modules name. What equals its
default is left out.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LINES = ("1.2", "1.3a", "1.3b")
FOLDER = Path(__file__).parent / "lines"
MOVED = {
    "get_spec_metadata": "build_draft_metadata",
    "get_spec_resource_manager": "build_draft_resources",
    "get_spec_decoder": "build_draft_sampler",
    "get_spec_worker": "build_draft_worker",
    "SpecWorkerBase": "DraftWorkerBase",
}
"""Other names for what the plugin needs, as a future API version may have."""
BY_NAME = {"modules", "classes", "functions", "methods"}
LISTED = {"imports", "parameters", "fields", "calls"}
DEFAULTS: dict[str, Any] = {
    **{name: {} for name in (*BY_NAME, "aliases", "constants", "members", "options")},
    **{name: [] for name in (*LISTED, "bases", "keywords")},
    "kind": "any",  # or positional, *, keyword, **
    "role": "function",  # or static, class, property, cached_property
    "note": "",
    "within": "",  # the function of an import
    "default": None,
    "default_factory": None,
    "call": None,  # makes the default of a field
    "dataclass": None,  # the decorator's options
    **dict.fromkeys(("abstract", "setter", "type_checking"), False),
}


class Facts(SimpleNamespace):
    """What is recorded of a line, module, class, function, parameter, field, import or call."""

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(name)
        setattr(self, name, copy.copy(DEFAULTS[name]))
        return getattr(self, name)

    def bind(self, signature: inspect.Signature) -> inspect.BoundArguments:
        """A call bound to ``signature``, starred arguments left out; TypeError where it fails."""
        return signature.bind(*[None] * self.positionals, **dict.fromkeys(self.keywords))


Class = Function = Import = Module = Facts


class Line(Facts):
    """An API version; ``modules`` by dotted name, ``pins`` by distribution."""

    def calls(self, function: str) -> list[tuple[str, Facts]]:
        """Every recorded call whose last name is ``function``, with the module that makes it."""
        return [
            (name, call)
            for name, module in self.modules.items()
            for call in module.calls
            if call.function.rpartition(".")[2] == function
        ]


def load_line(line: str, *, moved: bool = False) -> Line:
    """The recorded facts; with ``moved`` under the names of `MOVED`."""
    text = (FOLDER / f"{line}.json").read_text()
    if moved:
        text = re.sub(rf"\b({'|'.join(MOVED)})\b", lambda found: MOVED[found[0]], text)
    return Line(**_read(json.loads(text)))


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    for name, value in raw.items():
        if name in BY_NAME:
            raw[name] = {key: Facts(**_read(each)) for key, each in value.items()}
        elif name in LISTED:
            raw[name] = [Facts(**_read(each)) for each in value]
    return raw

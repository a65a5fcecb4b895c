"""The recorded facts of one line of TensorRT-LLM, typed: what ``lines/LINE.json`` holds.

Facts only: names, parameters, fields, members, bases, calls. No body, no sentence of the recorded
package. A line whose ``transcribed`` is true was copied by hand from the texts that its modules
name; the others were recorded from source files.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINES = ("1.2", "1.3a", "1.3b")
FOLDER = Path(__file__).parent / "lines"

# what evaluating a text raises that uses more than is recorded
UNKNOWN = (NameError, AttributeError, SyntaxError, TypeError, NotImplementedError)

KINDS = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "any": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "*": inspect.Parameter.VAR_POSITIONAL,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "**": inspect.Parameter.VAR_KEYWORD,
}


@dataclass(frozen=True)
class Unevaluated:
    """A default that is no literal, by its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass
class Parameter:
    """One parameter; ``kind`` is a key of ``KINDS``; ``annotation`` and ``default`` are texts."""

    name: str
    kind: str = "any"
    annotation: str | None = None
    default: str | None = None


@dataclass
class Function:
    """A function or method.

    ``role`` is ``function``, ``static``, ``class``, ``property`` or ``cached_property``; ``setter``
    marks that the property can be assigned. ``decorators`` are those that a plugin must know.
    """

    parameters: list[Parameter] = field(default_factory=list)
    returns: str | None = None
    role: str = "function"
    is_async: bool = False
    abstract: bool = False
    setter: bool = False
    decorators: list[str] = field(default_factory=list)


@dataclass
class Field:
    """An annotated name of a class body, with its default: a text, a factory's text, or none.

    ``call`` names what makes it, such as ``Field``, ``field`` or ``PrivateAttr``; ``options`` are
    the call's other keywords that are no documentation.
    """

    name: str
    annotation: str
    default: str | None = None
    default_factory: str | None = None
    call: str | None = None
    options: dict[str, str] = field(default_factory=dict)


@dataclass
class Class:
    """A class: bases and keywords as written, its members by name.

    ``dataclass`` holds the decorator's options where it is one. ``attributes`` are assignments of
    names or literals, ``members`` those of an enum, ``config`` is pydantic's ``model_config``.
    ``instance`` are names assigned to ``self``.
    """

    bases: list[str] = field(default_factory=list)
    keywords: dict[str, str] = field(default_factory=dict)
    dataclass: dict[str, bool] | None = None
    decorators: list[str] = field(default_factory=list)
    members: dict[str, str] = field(default_factory=dict)
    fields: list[Field] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    instance: list[str] = field(default_factory=list)


@dataclass
class Import:
    """``from module import name as asname``; ``module`` is absolute, ``within`` the function."""

    module: str
    name: str
    asname: str
    within: str = ""
    type_checking: bool = False


@dataclass
class Call:
    """A call of one of our pieces, made in the function ``within``."""

    function: str
    positionals: int
    keywords: list[str] = field(default_factory=list)
    star: bool = False
    double_star: bool = False
    within: str = ""

    def bind(self, signature: inspect.Signature) -> inspect.BoundArguments:
        """The call bound to ``signature``, starred arguments as none; TypeError where it fails."""
        return signature.bind(*[None] * self.positionals, **dict.fromkeys(self.keywords))


@dataclass
class Module:
    """One source file; ``commit`` is null where the text's is not known, ``id`` names the text."""

    path: str
    commit: str | None
    id: str | None
    note: str = ""
    imports: list[Import] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


@dataclass
class KeyList:
    """A published list of configuration keys: name to annotation."""

    path: str
    commit: str | None
    id: str | None
    keys: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass
class Line:
    """All that is recorded of one line; ``modules`` by dotted name, ``pins`` by distribution."""

    line: str
    transcribed: bool = False
    pins: dict[str, str] = field(default_factory=dict)
    note: str = ""
    modules: dict[str, Module] = field(default_factory=dict)
    key_lists: dict[str, KeyList] = field(default_factory=dict)

    def function(self, name: str) -> Function:
        """The function or method ``module:qualified.name``; KeyError where it is not recorded."""
        module, _, qualified = name.partition(":")
        *owners, last = qualified.split(".")
        place: Module | Class = self.modules[module]
        for owner in owners:
            place = place.classes[owner]
        return place.functions[last] if isinstance(place, Module) else place.methods[last]

    def calls(self, function: str) -> list[tuple[str, Call]]:
        """Every recorded call whose last name is ``function``, with the module that makes it."""
        return [
            (name, call)
            for name, module in self.modules.items()
            for call in module.calls
            if call.function.rpartition(".")[2] == function
        ]

    def importers(self, name: str) -> list[str]:
        """Modules that import ``name`` by value when they are loaded."""
        return [
            module
            for module, facts in self.modules.items()
            if any(i.name == name and not i.within and not i.type_checking for i in facts.imports)
        ]


def load_line(line: str) -> Line:
    """The recorded line; FileNotFoundError where ``lines/`` has none."""
    result: Line = from_json(Line, json.loads((FOLDER / f"{line}.json").read_text()))
    return result


def parameter_default(parameter: Parameter, evaluate: Callable[[str], Any] | None = None) -> Any:
    """The default's value: a literal, else ``evaluate`` of its text, else ``Unevaluated``."""
    if parameter.default is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(parameter.default)
    except (ValueError, SyntaxError):
        pass
    if evaluate is not None:
        try:
            return evaluate(parameter.default)
        except UNKNOWN:
            pass
    return Unevaluated(parameter.default)


def signature(
    function: Function, evaluate: Callable[[str], Any] | None = None
) -> inspect.Signature:
    """The function's signature; annotations are texts, defaults those of ``parameter_default``."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                KINDS[p.kind],
                default=parameter_default(p, evaluate),
                annotation=empty if p.annotation is None else p.annotation,
            )
            for p in function.parameters
        ],
        return_annotation=empty if function.returns is None else function.returns,
    )


def to_json(value: Any) -> Any:
    """``value`` as JSON has it; what equals its default is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            if default is dataclasses.MISSING or item != default:
                result[f.name] = to_json(item)
        return result
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind, globals(), {"dataclass": dataclass})


def from_json(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``; TypeError for a key that ``kind`` has not, or one that is missing."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return from_json(next(a for a in arguments if a is not type(None)), value)
    if origin is list:
        return [from_json(arguments[0], item) for item in value]
    if origin is dict:
        return {key: from_json(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        hints = _hints(kind)
        if unknown := set(value) - set(hints):
            raise TypeError(f"{kind.__name__} has no {sorted(unknown)}")
        return kind(**{name: from_json(hints[name], item) for name, item in value.items()})
    return value

"""A package ``tensorrt_llm`` generated from the recorded facts of an API version.

Classes have the recorded bases, constructors, methods and abstract flags; dataclasses and enums are
real ones. Bodies raise ``NotImplementedError``, apart from those that are given. A name that one
module imports from another by value is the same object in both.
"""

from __future__ import annotations

import abc
import ast
import builtins
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from tests.contract_host.recorded import Class, Function, Import, Line, Module, load_line

PACKAGE = "tensorrt_llm"
MISSING: Any = object()
KNOWN = {
    **vars(builtins),
    "ABC": abc.ABC,
    "Enum": enum.Enum,
    "IntEnum": enum.IntEnum,
    "StrEnum": types.new_class("StrEnum", (str, enum.Enum)),
    "enum": enum,
    "nn": torch.nn,
    "torch": torch,
}
Bodies = Mapping[str, Callable[..., Any]]


@contextmanager
def fake_tree(
    line: str | Line, *, behaviours: Bodies | None = None, moved: bool = False
) -> Iterator[types.ModuleType]:
    """Put the generated ``tensorrt_llm`` of ``line`` into ``sys.modules``, and take it out again.

    ``behaviours`` are bodies, by ``"module:function"``, ``"module:Class.method"`` and, for the
    assignment of a property, ``"module:Class.name.setter"``. They are called with the arguments in
    the recorded order, keyword-only ones by keyword. KeyError for one that names nothing recorded.
    ``moved``: what the plugin needs has other names. An installed package is back afterwards.
    """
    facts = load_line(line, moved=moved) if isinstance(line, str) else line
    before = {name: module for name, module in sys.modules.items() if _is_inside(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield _Generator(facts, behaviours or {}).build()
    finally:
        for name in [name for name in sys.modules if _is_inside(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_inside(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _is_bound(imported: Import) -> bool:
    """Whether the import gives its module a name; a module's ``__getattr__`` does so too."""
    return not imported.type_checking and imported.within in ("", "__getattr__")


class _Generator:
    """Makes the modules of one API version, and every object once, on first use."""

    def __init__(self, line: Line, behaviours: Bodies) -> None:
        self.line = line
        self.behaviours = behaviours
        self.used: set[str] = set()

    def build(self) -> types.ModuleType:
        for facts in self.line.modules.values():
            for imported in facts.imports:
                self._module(imported.module)
        for name, facts in self.line.modules.items():
            self._module(name)
            bound = [imported.asname for imported in facts.imports if _is_bound(imported)]
            for each in (
                *facts.classes,
                *facts.functions,
                *facts.constants,
                *facts.aliases,
                *bound,
            ):
                self._find(name, each)
        if unknown := set(self.behaviours) - self.used:
            raise KeyError(f"line {self.line.line} has no {sorted(unknown)}")
        return sys.modules[PACKAGE]

    def _module(self, name: str) -> types.ModuleType:
        if name not in sys.modules:
            module = sys.modules[name] = types.ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(self._module(parent), last, module)
        return sys.modules[name]

    def _find(self, module: str, name: str) -> Any:
        """The module's object of that name, made on first use; `MISSING` where it has none."""
        here, facts = self._module(module), self.line.modules.get(module, Module())
        found = vars(here).get(name, MISSING)
        is_own = name in facts.classes or name in facts.functions
        if found is MISSING or (is_own and isinstance(found, types.ModuleType)):
            found = self._make(module, facts, name)
            if found is not MISSING:
                setattr(here, name, found)
        return found

    def _make(self, module: str, facts: Module, name: str) -> Any:
        if name in facts.classes:
            return self._class(module, name, facts.classes[name])
        if name in facts.functions and name != "__getattr__":
            return self._function(module, name, facts.functions[name])
        if name in facts.constants:
            return ast.literal_eval(facts.constants[name])
        if name in facts.aliases:
            return self._imported(*facts.aliases[name].rpartition(".")[::2])
        for imported in facts.imports:
            if imported.asname == name and _is_bound(imported):
                return self._imported(imported.module, imported.name)
        return MISSING

    def _imported(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in self.line.modules:
            return self._module(f"{module}.{name}")
        found = self._find(module, name)
        if found is MISSING:  # nothing is recorded of it
            found = type(name, (), {"__module__": module})
            setattr(self._module(module), name, found)
        return found

    def _value(self, module: str, text: str) -> Any:
        """A literal, or what a dotted name means; the text where that is not recorded."""
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            pass
        first, *others = text.split(".")
        found = self._find(module, first)
        found = KNOWN.get(first, text) if found is MISSING else found
        return functools.reduce(lambda value, name: getattr(value, name, text), others, found)

    def _class(self, module: str, qualified: str, facts: Class) -> type[Any]:
        # those of pydantic get a constructor with all keys, each of which may be left out
        is_model = module.endswith(".llm_args") and not facts.members
        body: dict[str, Any] = {"__module__": module, "__qualname__": qualified}
        body["__doc__"] = "Generated."  # dataclasses would compute one
        body["__annotations__"] = {each.name: each.annotation for each in facts.fields}
        for name, text in facts.members.items():
            body[name] = enum.auto() if text == "auto()" else ast.literal_eval(text)
        for name, inner in facts.classes.items():
            body[name] = self._class(module, f"{qualified}.{name}", inner)
        for name, function in facts.methods.items():
            is_called_by_python = name.startswith("__") and name != "__init__"
            is_given = f"{module}:{qualified}.{name}" in self.behaviours
            if is_given or not (is_called_by_python or is_model):
                body[name] = self._method(module, f"{qualified}.{name}", function)
        for each in facts.fields:
            if is_model:
                body[each.name] = None
            elif each.call == "field":
                options = {name: self._value(module, text) for name, text in each.options.items()}
                if each.default_factory is not None:
                    made = self._value(module, each.default_factory)
                    options["default_factory"] = made if callable(made) else lambda: None
                elif each.default is not None:
                    options["default"] = self._value(module, each.default)
                body[each.name] = dataclasses.field(**options)
            elif each.default is not None:
                body[each.name] = self._value(module, each.default)
        bases = [self._value(module, text.partition("[")[0]) for text in facts.bases]
        # Generic, Protocol, NamedTuple and BaseModel are not needed
        kinds = tuple(base for base in bases if isinstance(base, type))

        def fill(namespace: dict[str, Any]) -> None:
            for name, value in body.items():  # update() would pass by the namespace of enums
                namespace[name] = value

        made = types.new_class(qualified.rpartition(".")[2], kinds, {}, fill)
        decorated = {"kw_only": True} if is_model else facts.dataclass
        if decorated is None:
            return made
        return dataclasses.dataclass(**decorated, eq=False, repr=False)(made)

    def _method(self, module: str, qualified: str, facts: Function) -> Any:
        function = self._function(module, qualified, facts)
        if facts.role in ("property", "cached_property"):
            assign = self._behaviour(module, f"{qualified}.setter") if facts.setter else None
            return property(function, assign)
        if facts.role == "class" or qualified.endswith(".__init_subclass__"):
            return classmethod(function)
        return staticmethod(function) if facts.role == "static" else function

    def _behaviour(self, module: str, qualified: str) -> Callable[..., Any]:
        key = f"{module}:{qualified}"
        if key in self.behaviours:
            self.used.add(key)
            return self.behaviours[key]

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{module}.{qualified}")

        return missing

    def _function(self, module: str, qualified: str, facts: Function) -> Callable[..., Any]:
        """A function with the recorded parameters, so that Python binds and refuses."""
        kinds = [each.kind for each in facts.parameters]
        header, passed, defaults = list[str](), list[str](), dict[str, Any]()
        for place, each in enumerate(facts.parameters):
            stars = each.kind if each.kind in ("*", "**") else ""
            if each.kind == "keyword" and not {"*", "keyword"} & {*kinds[:place]}:
                header.append("*")
            header.append(f"{stars}{each.name}")
            if each.default is not None:
                header[-1] += f"=__defaults__['{each.name}']"
                defaults[each.name] = self._value(module, each.default)
            if each.kind == "positional" and "positional" not in kinds[place + 1 :]:
                header.append("/")
            prefix = f"{each.name}=" if each.kind == "keyword" else stars
            passed.append(f"{prefix}{each.name}")
        namespace = {"__body__": self._behaviour(module, qualified), "__defaults__": defaults}
        exec(_compiled(", ".join(header), ", ".join(passed)), namespace)
        function: Any = namespace["function"]
        function.__qualname__, function.__module__ = qualified, module
        return abc.abstractmethod(function) if facts.abstract else function


@functools.cache
def _compiled(header: str, passed: str) -> types.CodeType:
    return compile(f"def function({header}):\n return __body__({passed})\n", "<host>", "exec")

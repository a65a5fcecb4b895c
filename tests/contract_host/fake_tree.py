"""A package ``tensorrt_llm`` generated from a line's recorded facts, while a ``with`` lasts.

Classes have the recorded bases, signatures and abstract flags; dataclasses, enums and pydantic
models are real ones. Bodies raise ``NotImplementedError`` with their own name, apart from the
behaviours that are given. A name that one module imports from another by value is the same object
in both.
"""

from __future__ import annotations

import abc
import ast
import builtins
import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pydantic
import torch

from tests.contract_host.signatures import (
    UNKNOWN,
    Class,
    Field,
    Function,
    Import,
    Line,
    Module,
    Unevaluated,
    from_json,
    load_line,
    parameter_default,
    to_json,
)

PACKAGE = "tensorrt_llm"
MISSING: Any = object()

# what the fourth tree calls the seams
MOVED = {
    "get_spec_metadata": "build_draft_metadata",
    "get_spec_resource_manager": "build_draft_resources",
    "get_spec_decoder": "build_draft_sampler",
    "get_spec_worker": "build_draft_worker",
    "SpecWorkerBase": "DraftWorkerBase",
}

# a body that raises would break what Python itself calls on an object
LEFT_OUT = {
    "__repr__",
    "__str__",
    "__eq__",
    "__hash__",
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__del__",
}


class _StrEnum(str, enum.Enum):
    """``StrEnum`` of the standard library and of the package of that name, on every Python."""


KNOWN: dict[str, Any] = {
    **{name: getattr(typing, name) for name in typing.__all__},
    "ABC": abc.ABC,
    "abc": abc,
    "enum": enum,
    "Enum": enum.Enum,
    "IntEnum": enum.IntEnum,
    "IntFlag": enum.IntFlag,
    "StrEnum": _StrEnum,
    "auto": enum.auto,
    "functools": functools,
    "typing": typing,
    "Path": Path,
    "torch": torch,
    "nn": torch.nn,
}


@contextmanager
def fake_tree(
    line: str | Line,
    *,
    behaviours: Mapping[str, Callable[..., Any]] | None = None,
    moved: bool = False,
) -> Iterator[types.ModuleType]:
    """Puts the generated ``tensorrt_llm`` of ``line`` into ``sys.modules`` and takes it out again.

    ``behaviours`` are bodies, by ``"module:function"`` or ``"module:Class.method"``, and by
    ``"module:Class.name.setter"`` for the assigning of a property. They are called with the
    arguments in the recorded order, keyword-only ones by keyword. KeyError for one that names
    nothing recorded. ``moved``: a tree whose seams have other names. A package that is really
    installed is back afterwards.
    """
    facts = load_line(line) if isinstance(line, str) else line
    if moved:
        facts = _renamed(facts)
    before = {name: module for name, module in sys.modules.items() if _inside(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield _Tree(facts, dict(behaviours or {})).build()
    finally:
        for name in [name for name in sys.modules if _inside(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _inside(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _renamed(line: Line) -> Line:
    pattern = re.compile(rf"\b({'|'.join(MOVED)})\b")

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: MOVED[found[0]], value)
        if isinstance(value, list):
            return [rename(item) for item in value]
        if isinstance(value, dict):
            return {rename(key): rename(item) for key, item in value.items()}
        return value

    result: Line = from_json(Line, rename(to_json(line)))
    return result


def _binds(imported: Import) -> bool:
    """The import gives its module a name; so does a module's ``__getattr__``."""
    return not imported.type_checking and imported.within in ("", "__getattr__")


class _Names(dict[str, Any]):
    """Names that a text may use: of the class body, then of its module, then the known ones."""

    def __init__(self, tree: _Tree, module: str, scope: Mapping[str, Any]) -> None:
        super().__init__()
        self.tree, self.module, self.scope = tree, module, scope

    def __missing__(self, name: str) -> Any:
        if name in self.scope:
            return self.scope[name]
        if (found := self.tree.find(self.module, name)) is not MISSING:
            return found
        if name in KNOWN:
            return KNOWN[name]
        if hasattr(pydantic, name):
            return getattr(pydantic, name)
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NameError(name)


class _Tree:
    """Builds the modules of one line; every object once, on first use."""

    def __init__(self, line: Line, behaviours: dict[str, Callable[..., Any]]) -> None:
        self.line = line
        self.behaviours = behaviours
        self.used: set[str] = set()
        self.building: set[tuple[str, str]] = set()

    def build(self) -> types.ModuleType:
        """All modules, in ``sys.modules``; gives the package."""
        names = set(self.line.modules)
        names |= {i.module for facts in self.line.modules.values() for i in facts.imports}
        for name in sorted(names):
            self._module(name)
        for name, facts in self.line.modules.items():
            bound = [i.asname for i in facts.imports if _binds(i)]
            for each in [
                *facts.classes,
                *facts.functions,
                *facts.constants,
                *facts.aliases,
                *bound,
            ]:
                self.find(name, each)
        if unknown := set(self.behaviours) - self.used:
            raise KeyError(f"line {self.line.line} has no {sorted(unknown)}")
        return sys.modules[PACKAGE]

    def _module(self, name: str) -> types.ModuleType:
        if name in sys.modules:
            return sys.modules[name]
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(self._module(parent), last, module)
        return module

    def find(self, module: str, name: str) -> Any:
        """The module's object of that name, made now if need be; ``MISSING`` where it has none."""
        here = self._module(module)
        facts = self.line.modules.get(module, Module("", None, None))
        found = vars(here).get(name, MISSING)
        own = name in facts.classes or name in facts.functions
        if found is not MISSING and not (own and isinstance(found, types.ModuleType)):
            return found
        if (module, name) in self.building:
            raise ValueError(f"{module}.{name} is needed to make itself")
        self.building.add((module, name))
        try:
            found = self._make(module, facts, name)
        finally:
            self.building.discard((module, name))
        if found is not MISSING:
            setattr(here, name, found)
        return found

    def _make(self, module: str, facts: Module, name: str) -> Any:
        if name in facts.classes:
            return self._class(module, name, facts.classes[name], {})
        if name in facts.functions and name not in LEFT_OUT:
            return self._function(module, name, facts.functions[name], {})
        if name in facts.constants:
            return ast.literal_eval(facts.constants[name])
        if name in facts.aliases:
            return self._dotted(facts.aliases[name])
        for imported in facts.imports:
            if imported.asname == name and _binds(imported):
                return self._imported(imported.module, imported.name)
        return MISSING

    def _imported(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in self.line.modules:
            return self._module(f"{module}.{name}")
        found = self.find(module, name)
        if found is MISSING:
            found = _unrecorded(module, name)
            setattr(self._module(module), name, found)
        return found

    def _dotted(self, name: str) -> Any:
        module, _, last = name.rpartition(".")
        if name in self.line.modules:
            return self._module(name)
        return self._imported(module, last)

    def evaluate(self, module: str, text: str, scope: Mapping[str, Any]) -> Any:
        """The text's value; NameError or AttributeError where it uses what is not recorded."""
        return eval(text, {"__builtins__": {}}, _Names(self, module, scope))

    def _class(
        self, module: str, qualified: str, facts: Class, outer: Mapping[str, Any]
    ) -> type[Any]:
        bases = self._bases(module, facts, outer)
        keywords = {}
        for key, text in facts.keywords.items():
            try:
                keywords[key] = self.evaluate(module, text, outer)
            except UNKNOWN:
                continue
        if not _is_metaclass(keywords.get("metaclass", type)):
            del keywords["metaclass"]
        model = any(isinstance(b, type) and issubclass(b, pydantic.BaseModel) for b in bases)
        made: list[type[Any]] = []

        def body(namespace: dict[str, Any]) -> None:
            namespace["__module__"] = module
            namespace["__qualname__"] = qualified
            for name, text in facts.members.items():
                namespace[name] = (
                    enum.auto() if text == "auto()" else self.evaluate(module, text, namespace)
                )
            scope = {**outer, **namespace}
            for name, inner in facts.classes.items():
                scope[name] = namespace[name] = self._class(
                    module, f"{qualified}.{name}", inner, scope
                )
            for name, text in facts.attributes.items():
                scope[name] = namespace[name] = self._value(module, text, scope)
            for name, function in facts.methods.items():
                method = self._method(module, f"{qualified}.{name}", function, scope, made, model)
                if method is not None:
                    namespace[name] = method
            if model:
                self._model_body(module, facts, scope, namespace)
            elif facts.fields:
                self._field_body(module, facts, scope, namespace)

        result = types.new_class(qualified.rpartition(".")[2], bases, keywords, body)
        made.append(result)
        if facts.dataclass is not None:
            result = dataclasses.dataclass(**facts.dataclass)(result)
        return result

    def _bases(self, module: str, facts: Class, outer: Mapping[str, Any]) -> tuple[Any, ...]:
        bases: list[Any] = []
        generic = False
        for text in facts.bases:
            plain = text.partition("[")[0]
            if plain.rpartition(".")[2] in ("Generic", "Protocol"):
                generic = True
                continue
            try:
                base = self.evaluate(module, plain, outer)
            except UNKNOWN:
                base = _unrecorded(module, plain.rpartition(".")[2])
            if not isinstance(base, type) and not hasattr(base, "__mro_entries__"):
                raise TypeError(f"{module}: base {text} is {base!r}, no class")
            bases.append(base)
        if generic and not any(hasattr(base, "__class_getitem__") for base in bases):
            bases.append(_Subscriptable)
        return tuple(bases)

    def _value(self, module: str, text: str, scope: Mapping[str, Any]) -> Any:
        try:
            return self.evaluate(module, text, scope)
        except UNKNOWN:
            return Unevaluated(text)

    def _field_body(
        self,
        module: str,
        facts: Class,
        scope: Mapping[str, Any],
        namespace: dict[str, Any],
    ) -> None:
        """Annotations and defaults; a property of a field's name is its default, as in Python."""
        namespace["__annotations__"] = {f.name: f.annotation for f in facts.fields}
        for each in facts.fields:
            if each.call == "field":
                options = {k: self._value(module, v, scope) for k, v in each.options.items()}
                if each.default_factory is not None:
                    options["default_factory"] = self._factory(module, each, scope)
                elif each.default is not None:
                    options["default"] = self._value(module, each.default, scope)
                namespace[each.name] = dataclasses.field(**options)
            elif each.default is not None:
                namespace[each.name] = self._value(module, each.default, scope)

    def _model_body(
        self,
        module: str,
        facts: Class,
        scope: Mapping[str, Any],
        namespace: dict[str, Any],
    ) -> None:
        """Annotations, fields and settings of a pydantic model; what is not recorded is Any."""
        config = {k: self._value(module, v, scope) for k, v in facts.config.items()}
        settings = {**config, "arbitrary_types_allowed": True, "protected_namespaces": ()}
        namespace["model_config"] = settings
        annotations: dict[str, Any] = {}
        for each in facts.fields:
            annotation = self._value(module, each.annotation, scope)
            annotations[each.name] = Any if isinstance(annotation, Unevaluated) else annotation
            options: dict[str, Any] = {}
            if each.default_factory is not None:
                options["default_factory"] = self._factory(module, each, scope)
            elif each.default is not None:
                options["default"] = self._value(module, each.default, scope)
            if each.name.startswith("_"):
                namespace[each.name] = pydantic.PrivateAttr(**options)
                continue
            for option in ("alias", "validation_alias", "exclude", "repr"):
                if option in each.options:
                    options[option] = self._value(module, each.options[option], scope)
            if options:
                namespace[each.name] = pydantic.Field(**options)
        namespace["__annotations__"] = annotations

    def _factory(self, module: str, each: Field, scope: Mapping[str, Any]) -> Callable[[], Any]:
        made = self._value(module, each.default_factory or "", scope)
        return made if callable(made) else lambda: made

    def _method(
        self,
        module: str,
        qualified: str,
        facts: Function,
        scope: Mapping[str, Any],
        made: list[type[Any]],
        model: bool,
    ) -> Any:
        name = qualified.rpartition(".")[2]
        key = f"{module}:{qualified}"
        if name in LEFT_OUT and key not in self.behaviours:
            return None
        if model and facts.decorators and key not in self.behaviours:
            return None
        if name == "__init_subclass__" and key not in self.behaviours:
            return classmethod(
                lambda cls, **keywords: super(made[0], cls).__init_subclass__(**keywords)
            )
        function = self._function(module, qualified, facts, scope)
        result: Any = function
        match facts.role:
            case "static":
                result = staticmethod(function)
            case "class":
                result = classmethod(function)
            case "cached_property":
                result = functools.cached_property(function)
            case "property":
                assign = None
                if facts.setter:
                    setter = f"{qualified}.setter"
                    body = self._behaviour(module, setter)

                    def assign(self: Any, value: Any) -> None:
                        body(self, value)

                result = property(function, assign)
        for text in facts.decorators if model else []:
            result = self.evaluate(module, text, scope)(result)
        return result

    def _behaviour(self, module: str, qualified: str) -> Callable[..., Any]:
        key = f"{module}:{qualified}"
        if key in self.behaviours:
            self.used.add(key)
            return self.behaviours[key]

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{module}.{qualified}")

        return missing

    def _function(
        self, module: str, qualified: str, facts: Function, scope: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """A function that has the recorded parameters, so that Python binds and refuses."""
        name = qualified.rpartition(".")[2]
        evaluate = functools.partial(self.evaluate, module, scope=scope)
        defaults = [parameter_default(p, evaluate) for p in facts.parameters]
        header, passed = _texts(facts)
        call = f"__body__({', '.join(passed)})"
        if facts.is_async:
            call = f"await __awaited__({call})"
        prefix = "async " if facts.is_async else ""
        source = f"{prefix}def {name}({', '.join(header)}):\n return {call}\n"
        namespace: dict[str, Any] = {
            "__body__": self._behaviour(module, qualified),
            "__defaults__": defaults,
            "__awaited__": _awaited,
            "__name__": module,
        }
        exec(compile(source, f"<{module}>", "exec"), namespace)
        function: Any = namespace[name]
        function.__qualname__ = qualified
        function.__module__ = module
        function.__annotations__ = {
            p.name: p.annotation for p in facts.parameters if p.annotation is not None
        }
        if facts.returns is not None:
            function.__annotations__["return"] = facts.returns
        made: Callable[..., Any] = abc.abstractmethod(function) if facts.abstract else function
        return made


class _Subscriptable:
    """Replaces ``Generic``: the class can be subscripted, and is itself then."""

    def __class_getitem__(cls, _: Any) -> type[Any]:
        return cls


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _is_metaclass(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, type)


def _texts(facts: Function) -> tuple[list[str], list[str]]:
    """Parameters as a header has them, and as the body is called with them."""
    header: list[str] = []
    passed: list[str] = []
    kinds = [p.kind for p in facts.parameters]
    for i, p in enumerate(facts.parameters):
        default = "" if p.default is None else f"=__defaults__[{i}]"
        if p.kind == "keyword" and "*" not in kinds[:i] and "keyword" not in kinds[:i]:
            header.append("*")
        stars = p.kind if p.kind in ("*", "**") else ""
        header.append(f"{stars}{p.name}{default}")
        passed.append(f"{p.name}={p.name}" if p.kind == "keyword" else f"{stars}{p.name}")
        if p.kind == "positional" and "positional" not in kinds[i + 1 :]:
            header.append("/")
    return header, passed


def _unrecorded(module: str, name: str) -> type[Any]:
    """A class for a name of which nothing is recorded; it cannot be instantiated."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{module}.{name}")

    return type(name, (), {"__module__": module, "__init__": refuse})

"""The generated package: what it has, what it refuses, and that it cleans up."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from tests.contract_host.fake_tree import MOVED, fake_tree
from tests.contract_host.record import record_module
from tests.contract_host.signatures import (
    KINDS,
    LINES,
    Class,
    Function,
    Line,
    Unevaluated,
    load_line,
    signature,
)

BASE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Generic, Optional

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import nn

from tensorrt_llm.elsewhere import Unknown

LIMIT = (1 << 64) - 1
NOTHING = None


class Mode(IntEnum):
    ONE = auto()
    TWO = auto()

    def is_one(self): ...


@dataclass(kw_only=True)
class Store:
    tokens: Tensor
    width: int = 3
    mode: Mode = Mode.TWO
    made_of: Any = missing.name
    rows: list = field(default_factory=list)


@dataclass
class Metadata:
    lens: int
    total: int = field(init=False, default=0)

    def __post_init__(self): ...

    @property
    def lens(self) -> int: ...

    @lens.setter
    def lens(self, value: int): ...


class Piece(nn.Module, ABC, Generic[T]):
    Store = Store

    class Args(Store):
        pass

    def __init__(self, config, *, mode: Mode = Mode.ONE): ...

    def __init_subclass__(cls, **kwargs): ...

    def __repr__(self): ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    def run(self, first, /, second, *rest, last=Mode.TWO, **others) -> int: ...

    @staticmethod
    def plain(a, b=2): ...

    @classmethod
    def make(cls, a): ...

    async def wait(self, a): ...


class Pair(NamedTuple):
    first: int
    second: Optional[Unknown] = None


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: Optional[int] = Field(default=1)
    mode: Mode = Mode.TWO
    unknown: Optional[NotRecorded] = None
    name: str = Field(alias="label")
    _hidden: bool = PrivateAttr(True)

    @model_validator(mode="after")
    def check(self): ...


def build(config, model_config, mapping=Mode.ONE): ...
"""
USER = """
from .base import Mode, Piece, Unknown, build
from . import base


class Worker(Piece):
    def run(self, first): ...
"""
NAME = "tensorrt_llm.pieces.base"


def made_up() -> Line:
    modules = {"base": BASE, "user": USER, "__init__": "from .base import build"}
    recorded = [
        record_module(text, f"tensorrt_llm/pieces/{name}.py") for name, text in modules.items()
    ]
    names = ["tensorrt_llm.pieces.base", "tensorrt_llm.pieces.user", "tensorrt_llm.pieces"]
    return Line("made up", modules=dict(zip(names, recorded, strict=True)))


def ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]


def modules(*names: str) -> list[Any]:
    return [importlib.import_module(f"tensorrt_llm.pieces.{name}") for name in names]


def test_a_name_imported_by_value_is_the_same_object():
    with fake_tree(made_up()) as package:
        base, user = modules("base", "user")
        assert package.pieces.build is base.build is user.build
        assert user.Worker.__mro__[1] is base.Piece is user.Piece
        assert user.base is base
        assert user.Unknown is base.Unknown
        assert sys.modules["tensorrt_llm.elsewhere"].Unknown is base.Unknown
        assert (base.LIMIT, base.NOTHING) == (2**64 - 1, None)


def test_nothing_is_left():
    assert ours() == []

    def fail():
        with fake_tree(made_up()):
            importlib.import_module(NAME)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert ours() == []


def test_a_package_that_was_there_is_back(monkeypatch: pytest.MonkeyPatch):
    real, part = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.real")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", real)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.real", part)
    with fake_tree(made_up()) as package:
        assert sys.modules["tensorrt_llm"] is package is not real
        assert "tensorrt_llm.real" not in sys.modules
    assert sys.modules["tensorrt_llm"] is real
    assert ours() == ["tensorrt_llm", "tensorrt_llm.real"]


def test_modules_that_are_not_recorded_are_not_there():
    with fake_tree(made_up()), pytest.raises(ModuleNotFoundError, match=r"tensorrt_llm\.pieces\.x"):
        importlib.import_module("tensorrt_llm.pieces.x")


def test_bodies_name_themselves():
    with fake_tree(made_up()):
        base, user = modules("base", "user")
        for call, name in [
            (lambda: base.build(1, 2), "build"),
            (lambda: base.Mode.ONE.is_one(), "Mode.is_one"),
            (lambda: base.Piece.plain(1), "Piece.plain"),
            (lambda: base.Piece.make(1), "Piece.make"),
            (lambda: base.Metadata(3), "Metadata.lens.setter"),
            (lambda: base.Unknown(), None),
        ]:
            with pytest.raises(NotImplementedError) as error:
                call()
            expected = "tensorrt_llm.elsewhere.Unknown" if name is None else f"{NAME}.{name}"
            assert str(error.value) == expected
        with pytest.raises(NotImplementedError, match=r"base\.Piece\.__init__$"):
            base.Piece.__init__(object(), 1)
        assert user.Worker.run.__qualname__ == "Worker.run"


def test_arguments_that_do_not_bind_are_refused_as_python_does():
    with fake_tree(made_up()):
        (base,) = modules("base")
        with pytest.raises(TypeError, match=r"missing 1 required .* 'model_config'"):
            base.build(1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nextn'"):
            base.build(1, 2, nextn=3)
        with pytest.raises(TypeError, match=r"missing 1 required .* 'first'"):
            base.Piece.run(None, first=1, second=2)


def test_abstract_classes_cannot_be_made():
    with fake_tree(made_up()):
        base, user = modules("base", "user")
        assert base.Piece.__abstractmethods__ == {"width"}
        with pytest.raises(TypeError, match="abstract"):
            user.Worker(1)

        class Whole(user.Worker):
            width = 3

            def __init__(self):
                pass

        assert Whole().width == 3


def test_an_unrecorded_body_does_not_break_what_python_calls():
    with fake_tree(made_up()):
        (base,) = modules("base")

        class Child(base.Piece, metaclass=type(base.Piece)):
            def __init__(self):
                pass

            width = 1

        assert "Child" in object.__repr__(Child())
        assert base.Piece[int] is not None


def test_behaviours_are_the_bodies_and_the_signature_stays():
    seen: list[Any] = []

    async def wait(_, a):
        return [a]

    behaviours = {
        f"{NAME}:build": lambda *a: a,
        f"{NAME}:Piece.__init__": lambda _, config, *, mode: seen.append((config, mode)),
        f"{NAME}:Piece.run": lambda _, first, second, *rest, last, **others: (
            first,
            second,
            rest,
            last,
            others,
        ),
        f"{NAME}:Piece.plain": lambda a, b: a + b,
        f"{NAME}:Piece.make": lambda cls, a: (cls, a),
        f"{NAME}:Piece.wait": wait,
        f"{NAME}:Mode.is_one": lambda self: self == 1,
        f"{NAME}:Metadata.__post_init__": lambda _: seen.append("made"),
        f"{NAME}:Metadata.lens": lambda self: self.kept * 2,
        f"{NAME}:Metadata.lens.setter": lambda self, value: setattr(self, "kept", value),
        f"{NAME}:Config.check": lambda self: setattr(self, "depth", 9) or self,
    }
    with fake_tree(made_up(), behaviours=behaviours):
        (base,) = modules("base")
        assert base.build(1, model_config=2) == (1, 2, base.Mode.ONE)

        class Whole(base.Piece):
            width = 3

        whole = Whole("config")
        assert seen == [("config", base.Mode.ONE)]
        assert whole.run(1, second=2, other=4) == (1, 2, (), base.Mode.TWO, {"other": 4})
        assert whole.run(1, 2, 3, last=5) == (1, 2, (3,), 5, {})
        assert base.Piece.plain(1) == 3
        assert Whole.make(1) == (Whole, 1)
        assert asyncio.run(whole.wait(7)) == [7]
        assert base.Mode.ONE.is_one()
        assert not base.Mode.TWO.is_one()
        metadata = base.Metadata(4)
        assert (metadata.lens, metadata.total, seen[-1]) == (8, 0, "made")
        assert base.Config(label="x").depth == 9
        with pytest.raises(TypeError, match="missing"):
            base.Piece.plain()
        assert str(inspect.signature(base.Piece.plain)) == "(a, b=2)"


def test_a_behaviour_of_nothing_is_refused():
    with (
        pytest.raises(KeyError, match=r"line made up has no .*Piece\.walk"),
        fake_tree(made_up(), behaviours={f"{NAME}:Piece.walk": print}),
    ):
        pass
    assert ours() == []


def test_dataclasses_are_real():
    with fake_tree(made_up()):
        (base,) = modules("base")
        store = base.Store(tokens=1)
        assert (store.width, store.mode, store.rows) == (3, base.Mode.TWO, [])
        assert store.made_of == Unevaluated("missing.name")
        assert store.rows is not base.Store(tokens=1).rows
        assert issubclass(base.Piece.Args, base.Store)
        assert base.Piece.Store is base.Store
        assert base.Pair(1) == (1, None)
        with pytest.raises(TypeError, match="positional"):
            base.Store(1)


def test_models_are_real():
    with fake_tree(made_up()):
        (base,) = modules("base")
        config = base.Config(label="x", depth=3, unknown=object())
        assert (config.depth, config.mode, config.name, config._hidden) == (3, 2, "x", True)
        with pytest.raises(pydantic.ValidationError, match="Extra inputs are not permitted"):
            base.Config(label="x", dept=3)
        assert not hasattr(base.Config, "check")


def functions(facts: Any, name: str) -> Iterator[tuple[str, Function]]:
    """All functions below a module's or a class's facts."""
    for each, function in getattr(facts, "functions", getattr(facts, "methods", {})).items():
        yield f"{name}{each}", function
    for each, inner in facts.classes.items():
        yield from functions(inner, f"{name}{each}.")


def looked_up(module: Any, qualified: str) -> Any:
    """The function itself, out of what wraps it."""
    owner, (*path, last) = module, qualified.split(".")
    for name in path:
        owner = vars(owner)[name]
    found = vars(owner).get(last)
    if isinstance(found, property):
        return found.fget
    return getattr(found, "__func__", getattr(found, "func", found))


@pytest.mark.parametrize("line", LINES)
def test_every_recorded_module_imports_and_has_the_recorded_signatures(line: str):
    facts = load_line(line)
    compared = 0
    with fake_tree(line):
        for name, module in facts.modules.items():
            made = importlib.import_module(name)
            for qualified, function in functions(module, ""):
                found = looked_up(made, qualified)
                if found is None or "__init_subclass__" in qualified:
                    continue
                got = inspect.signature(found)
                expected = signature(function)
                assert list(got.parameters) == list(expected.parameters), (name, qualified)
                assert got.return_annotation == expected.return_annotation
                for ours_, theirs in zip(function.parameters, got.parameters.values(), strict=True):
                    assert theirs.kind == KINDS[ours_.kind]
                    assert (theirs.default is theirs.empty) == (ours_.default is None)
                    assert theirs.annotation == (ours_.annotation or theirs.empty)
                assert inspect.iscoroutinefunction(found) == function.is_async
                compared += 1
    assert compared > 100
    assert ours() == []


@pytest.mark.parametrize("line", LINES)
def test_every_recorded_class_is_what_it_was(line: str):
    facts = load_line(line)

    def compare(made: Any, recorded: Class) -> None:
        assert (recorded.dataclass is not None) == ("__dataclass_params__" in vars(made))
        assert list(recorded.members) == [m.name for m in made] if recorded.members else True
        own = {name for name, method in recorded.methods.items() if method.abstract}
        if "ABC" in recorded.bases:
            assert own <= made.__abstractmethods__
        if recorded.dataclass is not None:
            names = {f.name for f in recorded.fields}
            assert names <= set(made.__dataclass_fields__)
        for name, inner in recorded.classes.items():
            compare(getattr(made, name), inner)

    with fake_tree(line):
        for name, module in facts.modules.items():
            for each, recorded in module.classes.items():
                compare(getattr(importlib.import_module(name), each), recorded)


@pytest.mark.parametrize("line", LINES)
def test_imports_by_value_of_every_line_are_the_same_objects(line: str):
    facts = load_line(line)
    with fake_tree(line):
        utils = importlib.import_module("tensorrt_llm._torch.speculative.utils")
        for name in ("metadata", "resource_manager", "decoder", "worker"):
            importers = facts.importers(f"get_spec_{name}")
            assert importers
            for importer in importers:
                module = importlib.import_module(importer)
                assert getattr(module, f"get_spec_{name}") is getattr(utils, f"get_spec_{name}")


@pytest.mark.parametrize("line", LINES)
def test_the_tree_of_moved_names(line: str):
    with fake_tree(line, moved=True):
        utils = importlib.import_module("tensorrt_llm._torch.speculative.utils")
        interface = importlib.import_module("tensorrt_llm._torch.speculative.interface")
        for old, new in MOVED.items():
            module = utils if old.startswith("get_") else interface
            assert not hasattr(module, old)
            assert getattr(module, new).__name__ == new

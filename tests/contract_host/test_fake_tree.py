"""The generated package: what it has, what it refuses, and that it cleans up."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract_host.fake_tree import fake_tree
from tests.contract_host.record import record_module
from tests.contract_host.signatures import (
    KINDS,
    LINES,
    Function,
    Line,
    load_line,
    signature,
)

BASE = """
from abc import ABC, abstractmethod
from enum import IntEnum, auto

from torch import nn

from tensorrt_llm.elsewhere import Unknown


class Mode(IntEnum):
    ONE = auto()
    TWO = auto()

    def is_one(self): ...


class Piece(nn.Module, ABC):
    def __init__(self, config, *, mode: Mode = Mode.ONE): ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    def run(self, first, /, second, *rest, last=Mode.TWO, **others) -> int: ...

    @staticmethod
    def plain(a, b=2): ...

    @classmethod
    def make(cls, a): ...


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


def test_nothing_is_left():
    assert ours() == []

    def fail():
        with fake_tree(made_up()):
            importlib.import_module(NAME)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert ours() == []


def test_bodies_name_themselves_and_refuse_other_arguments():
    with fake_tree(made_up()):
        (base,) = modules("base")
        for call, name in [
            (lambda: base.build(1, 2), f"{NAME}.build"),
            (lambda: base.Mode.ONE.is_one(), f"{NAME}.Mode.is_one"),
            (lambda: base.Piece.plain(1), f"{NAME}.Piece.plain"),
            (lambda: base.Unknown(), "tensorrt_llm.elsewhere.Unknown"),
        ]:
            with pytest.raises(NotImplementedError) as error:
                call()
            assert str(error.value) == name
        with pytest.raises(TypeError, match="unexpected keyword argument 'nextn'"):
            base.build(1, 2, nextn=3)


def test_behaviours_are_the_bodies_and_the_signature_stays():
    behaviours = {
        f"{NAME}:build": lambda *a: a,
        f"{NAME}:Piece.__init__": lambda *_, **__: None,
        f"{NAME}:Piece.run": lambda _, first, second, *rest, last, **others: (
            *(first, second, rest, last),
            others,
        ),
        f"{NAME}:Piece.plain": lambda a, b: a + b,
        f"{NAME}:Piece.make": lambda cls, a: (cls, a),
    }
    with fake_tree(made_up(), behaviours=behaviours):
        (base,) = modules("base")
        assert base.build(1, model_config=2) == (1, 2, base.Mode.ONE)

        class Whole(base.Piece):
            width = 3

        whole = Whole("config")
        assert whole.run(1, second=2, other=4) == (1, 2, (), base.Mode.TWO, {"other": 4})
        assert base.Piece.plain(1) == 3
        assert Whole.make(1) == (Whole, 1)
        assert str(inspect.signature(base.Piece.plain)) == "(a, b=2)"


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

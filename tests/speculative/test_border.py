"""Optional host attributes are read only in some files, and every required one is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mtp_plugin

PACKAGE = Path(mtp_plugin.__file__).parent
PLUGIN = PACKAGE / "speculative"
BORDER = ("host/", "plugin/", "drafting/attention_loop.py", "drafting/trace_check.py")
"""Files that read objects of a host engine or of a plugin, or that change or compare metadata."""
BY_NAME = {"getattr", "hasattr"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def by_name(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read an attribute by its name, except of ``self``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "self":
            continue
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)
        if name in BY_NAME:
            yield node


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            yield node.annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.returns


def annotated(tree: ast.AST) -> set[str]:
    """Names in annotations, in quotes too."""
    names = set()
    for annotation in annotations(tree):
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= annotated_text(node.value)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
    return names


def annotated_text(text: str) -> set[str]:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def protocols(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split("[")[0] for base in node.bases]
            if any(base.rpartition(".")[2] == "Protocol" for base in bases):
                yield node.name


def bases(tree: ast.AST) -> set[str]:
    """Names that classes are made of."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    parts = [part for node in classes for base in node.bases for part in ast.walk(base)]
    return {part.id for part in parts if isinstance(part, ast.Name)}


FILES = sorted(PACKAGE.rglob("*.py"))
PROTOCOLS = [(path, name) for path in FILES for name in protocols(parsed(path))]


@pytest.mark.parametrize("path", sorted(PLUGIN.rglob("*.py")), ids=lambda p: str(p.name))
def test_only_the_border_reads_attributes_by_name(path: Path) -> None:
    if path.relative_to(PLUGIN).as_posix().startswith(BORDER):
        return
    assert [ast.unparse(call) for call in by_name(parsed(path))] == []


def test_the_border_does() -> None:
    """Else the names above are those of files that are no more."""
    for part in BORDER:
        files = [PLUGIN / part] if part.endswith(".py") else sorted((PLUGIN / part).glob("*.py"))
        assert any(True for file in files for _ in by_name(parsed(file))), part


@pytest.mark.parametrize(
    ("path", "name"), PROTOCOLS, ids=lambda value: getattr(value, "stem", value)
)
def test_a_protocol_is_an_annotation_or_a_base_class(path: Path, name: str) -> None:
    """In an annotation or as a base; one with a leading underscore in its own file."""
    files = [path] if name.startswith("_") else FILES
    assert any(name in annotated(parsed(file)) | bases(parsed(file)) for file in files)


@pytest.mark.parametrize("path", sorted((PLUGIN / "host").glob("*.py")), ids=lambda p: p.stem)
def test_host_protocols_are_used_in_annotations(path: Path) -> None:
    every = set().union(*map(annotated, map(parsed, FILES)))
    assert set(protocols(parsed(path))) <= every


def test_what_counts_as_reading_by_name() -> None:
    reads = "getattr(a, 'b', 0), hasattr(a, 'b'), builtins.getattr(a, 'b')"
    others = "a.b, setattr(a, 'b', 1), vars(a)['b'], 'getattr'"
    assert len(list(by_name(ast.parse(reads)))) == 3
    assert list(by_name(ast.parse(others))) == []


def test_what_counts_as_an_annotation() -> None:
    code = "class P(Protocol): ...\nclass Q(typing.Protocol[T]): ...\nclass R(P): ...\n"
    assert list(protocols(ast.parse(code))) == ["P", "Q"]
    code = "x: A | None\ndef f(a: 'B', *b: list[C]) -> d.D: ...\ny = E(F)"
    assert annotated(ast.parse(code)) >= {"A", "B", "C", "D"}
    assert not annotated(ast.parse(code)) & {"E", "F"}
    assert bases(ast.parse("class A(B, C[D], e.F): ...")) == {"B", "C", "D", "e"}

"""Every op has a torch reference and a Triton implementation with one signature."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from mtp_plugin.ops.backend import Backend

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
REFERENCES = [
    (".".join(path.relative_to(ROOT).with_suffix("").parts), node.name)
    for path in sorted((ROOT / "mtp_plugin").rglob("*.py"))
    if "_reference(" in path.read_text(encoding="utf-8")
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and node.name.endswith("_reference")
    and not node.name.startswith("_")
]


@pytest.mark.parametrize(("module", "name"), REFERENCES)
def test_reference_and_triton_have_the_same_signature(module: str, name: str) -> None:
    reference = getattr(importlib.import_module(module), name)
    triton = Backend.TRITON.dispatch(reference)
    assert Backend.TORCH.dispatch(reference) is reference
    assert inspect.signature(triton) == inspect.signature(reference)


def public_ops() -> list[tuple[Path, ast.FunctionDef]]:
    """Public functions that choose between the implementations."""
    return [
        (path, node)
        for path in sorted((ROOT / "mtp_plugin").rglob("*.py"))
        if "backend.dispatch(" in path.read_text(encoding="utf-8")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if "backend.dispatch(" in ast.unparse(node)
    ]


def test_public_ops_take_a_backend_and_are_tested_with_strided_arguments() -> None:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    strided = "\n".join(text for text in tests if re.search(r"check_(strided_)?arguments\(", text))
    ops = public_ops()
    assert len(ops) > 30
    for path, op in ops:
        assert [argument.arg for argument in op.args.kwonlyargs][-1:] == ["backend"], path
        assert op.name in strided, f"{path}: {op.name}"


def test_kernels_have_unique_names() -> None:
    kernels = [
        node.name
        for path in (ROOT / "mtp_plugin").rglob("*.py")
        if "_kernel(" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert len(kernels) > 20
    assert len(set(kernels)) == len(kernels), sorted({k for k in kernels if kernels.count(k) > 1})

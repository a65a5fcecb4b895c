"""Kernels are documented for their readers: phases, and the shape of every pointer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mtp_plugin
from mtp_plugin.ops.row_sums import ChunkLayout

PACKAGE = Path(mtp_plugin.__file__).parent
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^import triton$(.|\n)*^def \w+_kernel\(", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_kernel_module_has_numbered_phases_and_shapes(path: Path) -> None:
    source = path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    assert re.search(r"^1\. ", ast.get_docstring(tree) or "", re.MULTILINE)
    pointers = [
        argument
        for kernel in tree.body
        if isinstance(kernel, ast.FunctionDef) and kernel.name.endswith("_kernel")
        for argument in kernel.args.args
        if argument.arg.endswith("_ptr")
    ]
    assert pointers
    assert [p.arg for p in pointers if not re.search(r"# .*\[", lines[p.lineno - 1])] == []


def test_kernels_read_fields_of_a_layout_alone() -> None:
    """Triton 3.8 gives kernels the fields of a constant tuple, not its properties."""
    read = {
        name
        for path in PACKAGE.rglob("*_triton.py")
        for name in re.findall(r"\b(?:LAYOUT|BOUNDS)\.(\w+)", path.read_text())
    }
    assert "wraps" in read
    assert read <= set(ChunkLayout._fields)

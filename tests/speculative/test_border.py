"""Optional attributes of host objects are read only in some files."""

from __future__ import annotations

import ast
from pathlib import Path

import mtp_plugin

PLUGIN = Path(mtp_plugin.__file__).parent / "speculative"
BORDER = ("host/", "plugin/", "drafting/attention_loop.py", "drafting/trace_check.py")
"""Files that read objects of a host engine or of a plugin, or that change or compare metadata."""


def reads_by_name(source: str) -> list[str]:
    """Calls of getattr and hasattr, except of ``self``."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("getattr", "hasattr")
        and ast.unparse(node.args[0]) != "self"
    ]


def test_only_the_border_reads_attributes_by_name() -> None:
    found = {
        path.relative_to(PLUGIN).as_posix(): reads_by_name(path.read_text(encoding="utf-8"))
        for path in PLUGIN.rglob("*.py")
    }
    assert {p: calls for p, calls in found.items() if calls and not p.startswith(BORDER)} == {}
    for part in BORDER:
        assert any(calls for path, calls in found.items() if path.startswith(part)), part
    assert len(reads_by_name("getattr(a, 'b', 0), builtins.hasattr(a, 'b'), a.b, vars(a)")) == 2

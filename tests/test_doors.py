"""Every op has a door, and every door is swept with strided arguments."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOORS = sorted((ROOT / "mtp_plugin").rglob("door.py"))


def public_functions(path: Path) -> list[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    named = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [name for name in named if not name.startswith("_")]


def test_every_op_folder_has_a_door() -> None:
    """A folder with a torch side and a Triton side hides both."""
    folders = {path.parent for path in (ROOT / "mtp_plugin").rglob("launch.py")}
    folders = {folder for folder in folders if (folder / "reference.py").is_file()}
    assert len(folders) > 10
    assert folders == {door.parent for door in DOORS}


def test_every_door_takes_a_backend_and_is_swept() -> None:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    sweeps = [text for text in tests if "check_strided_arguments(" in text]
    for door in DOORS:
        for name in public_functions(door):
            assert any(name in text for text in sweeps), f"{door.parent.name}: {name}"
            tree = ast.parse(door.read_text(encoding="utf-8"))
            (function,) = [
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == name
            ]
            asked = [argument.arg for argument in function.args.kwonlyargs]
            assert asked[-1:] == ["backend"], f"{door.parent.name}: {name}"

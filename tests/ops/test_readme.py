"""The page of the library: examples print what it shows, and it names every public operation."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtp_plugin import ops
from tests.fresh import run_code

PAGE = (Path(ops.__file__).parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
FUNCTIONS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]


@pytest.mark.parametrize("backend", ops.Backend)
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_print_what_the_page_shows(
    number: int, backend: ops.Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    if backend is ops.Backend.TRITON and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("examples run on the CPU, where kernels need TRITON_INTERPRET=1")
    code, printed = EXAMPLES[number]
    exec(code.replace("Backend.TORCH", f"Backend.{backend.name}"), {})
    assert capsys.readouterr().out == printed


def test_examples_are_short_and_all_of_them_run() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") > 10
    for number, (code, _) in enumerate(EXAMPLES):
        lines = [line for line in code.splitlines() if line]
        assert len(lines) <= (15 if number else 30), code
        assert max(map(len, lines)) <= 100, code


def test_public_operations_are_listed_with_their_parameters() -> None:
    listed = dict(re.findall(r"^- `(\w+)\((.*)\)`", PAGE, re.MULTILINE))
    assert sorted(listed) == sorted(FUNCTIONS)
    for name, arguments in listed.items():
        parameters = inspect.signature(getattr(ops, name)).parameters
        named = [argument for argument in arguments.split(", ") if argument != "*"]
        assert named == list(parameters), name


def test_public_names_are_on_the_page_and_documented() -> None:
    assert [name for name in ops.__all__ if not re.search(rf"\b{name}\b", PAGE)] == []
    assert set(ops.__all__) <= set(dir(ops))
    everything: dict[str, object] = {}
    exec("from mtp_plugin.ops import *", everything)
    assert set(ops.__all__) <= set(everything)
    for name in FUNCTIONS:
        document = inspect.getdoc(getattr(ops, name)) or ""
        assert "Args:" in document, name
        assert "Raises:" in document, name


def test_no_public_name_is_that_of_a_module() -> None:
    """The import of a module would replace the name."""
    assert [name for name in ops.__all__ if find_spec(f"mtp_plugin.ops.{name}")] == []


def test_kernel_files_on_the_page_exist() -> None:
    folder = Path(ops.__file__).parent
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 10
    paths = (folder, folder / "sampling", folder.parent)
    assert [name for name in named if not any((path / name).exists() for path in paths)] == []
    launched = {path.name for path in folder.rglob("*_triton.py")}
    internal = {"draft", "rows", "sampler_store", "synthetic_acceptance"}
    missing = launched - {Path(name).name for name in named}
    assert missing == {f"{name}_triton.py" for name in internal}


def test_import_loads_nothing_and_needs_neither_triton_nor_transformers() -> None:
    code = "import sys, mtp_plugin.ops as ops; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"
    code = "import mtp_plugin.ops as ops; print(len([getattr(ops, name) for name in ops.__all__]))"
    ended = run_code(code, hidden=("triton", "transformers"))
    assert ended.stdout == f"{len(ops.__all__)}\n", ended.stderr
    with pytest.raises(AttributeError, match=r"module 'mtp_plugin\.ops' has no attribute 'sampel'"):
        ops.sampel  # noqa: B018

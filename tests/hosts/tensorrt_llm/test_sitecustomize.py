"""The sitecustomize folder: the plugin is there once the host is imported, and not before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts import tensorrt_llm
from tests.hosts.tensorrt_llm.tiny_host import run_python, write_host

FOLDER = Path(tensorrt_llm.__file__).parent / "sitecustomize"

_COUNTED = """
import sitecustomize, sys
print("kept:", sitecustomize.kept)
loaded = [name for name in sys.modules if name.split(".")[0] in ("mtp_plugin", "torch")]
print("before:", loaded)
from mtp_plugin.hosts import tensorrt_llm as plugin
plugin.install = lambda: print("installed")
plugin.is_installed = lambda: False
"""
_IMPORT = """
import importlib, tensorrt_llm
import tensorrt_llm.llmapi
print("host:", tensorrt_llm.__spec__.loader is tensorrt_llm.__loader__)
from mtp_plugin.hosts.tensorrt_llm import ranks
print("way:", ranks.loaded_by())
print("finders:", [type(each).__name__ for each in sys.meta_path if "Host" in type(each).__name__])
"""


@pytest.fixture
def host_folder(tmp_path: Path) -> Path:
    return write_host(tmp_path / "host")


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    """A folder with another sitecustomize, further on in the path."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('other', __name__)\nkept = 5\n")
    return other


def test_installs_once_the_host_is_imported(host_folder: Path, other_folder: Path) -> None:
    code = _COUNTED + _IMPORT
    done = run_python(code, FOLDER, other_folder, host_folder, TRTLLM_MTP_PLUGIN="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "other sitecustomize",
        "kept: 5",
        "before: []",
        "installed",
        "host: True",
        "way: sitecustomize",
        "finders: []",
    ]


def test_another_sitecustomize_runs_too_where_nothing_is_installed(
    host_folder: Path, other_folder: Path
) -> None:
    code = "import sitecustomize, tensorrt_llm; print(sitecustomize.kept)"
    done = run_python(code, FOLDER, other_folder, host_folder, TRTLLM_MTP_PLUGIN="0")
    assert (done.stdout.splitlines(), done.stderr) == (["other sitecustomize", "5"], "")


@pytest.mark.parametrize("variables", [{}, {"TRTLLM_MTP_PLUGIN": "0"}, {"TRTLLM_MTP_PLUGIN": ""}])
def test_does_nothing_unless_requested(host_folder: Path, variables: dict[str, str]) -> None:
    code = "import sys, tensorrt_llm; print([n for n in sys.modules if n == 'mtp_plugin'])"
    done = run_python(code, FOLDER, host_folder, **variables)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_another_value_fails_by_name(
    host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host("1.3b")
    monkeypatch.setenv("TRTLLM_MTP_PLUGIN", "yes")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # the next one on the path takes its place
    monkeypatch.setitem(sys.modules, "sitecustomize", sys)
    spec = importlib.util.spec_from_file_location("sitecustomize", FOLDER / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    message = r"^TRTLLM_MTP_PLUGIN: expected 1 \(install the plugin\) or 0, got 'yes'$"
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            importlib.import_module("tensorrt_llm")


def test_a_missing_host_stays_missing() -> None:
    code = """
try:
    import tensorrt_llm
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = run_python(
        "import sys; sys.modules.pop('x', None)" + code, FOLDER, TRTLLM_MTP_PLUGIN="1"
    )
    if done.returncode == 0 and not done.stdout:
        pytest.skip("a real tensorrt_llm is installed")
    assert done.stdout == "tensorrt_llm\n", done.stderr

"""The sitecustomize folder: the plugin is there once the host is imported, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_plugin.hosts import tensorrt_llm
from tests.hosts.tensorrt_llm.tiny_host import run_python, write_host

FOLDER = Path(tensorrt_llm.__file__).parent / "sitecustomize"

_COUNTED = """
import sys
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


def test_installs_once_the_host_is_imported(host_folder: Path) -> None:
    done = run_python(_COUNTED + _IMPORT, FOLDER, host_folder, TRTLLM_MTP_PLUGIN="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before: []",
        "installed",
        "host: True",
        "way: sitecustomize",
        "finders: []",
    ]


@pytest.mark.parametrize("variables", [{}, {"TRTLLM_MTP_PLUGIN": "0"}, {"TRTLLM_MTP_PLUGIN": ""}])
def test_does_nothing_unless_requested(host_folder: Path, variables: dict[str, str]) -> None:
    code = "import sys, tensorrt_llm; print([n for n in sys.modules if n == 'mtp_plugin'])"
    done = run_python(code, FOLDER, host_folder, **variables)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_another_value_fails_by_name(host_folder: Path) -> None:
    code = """
for attempt in range(2):
    try:
        import tensorrt_llm
    except ValueError as error:
        print(type(error).__name__, error)
"""
    done = run_python(code, FOLDER, host_folder, TRTLLM_MTP_PLUGIN="yes")
    message = "ConfigError TRTLLM_MTP_PLUGIN: expected 1 (install the plugin) or 0, got 'yes'"
    assert done.stdout.splitlines() == [message, message], done.stderr


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


@pytest.mark.thinned
@pytest.mark.parametrize("value", ["0", "1"])
def test_another_sitecustomize_further_on_runs_too(
    host_folder: Path, tmp_path: Path, value: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("print('other', __name__)\nkept = 5\n")
    code = "import sitecustomize; print(sitecustomize.kept)\n" + _COUNTED + "import tensorrt_llm"
    done = run_python(code, FOLDER, other, host_folder, TRTLLM_MTP_PLUGIN=value)
    assert done.returncode == 0, done.stderr
    lines = ["other sitecustomize", "5", "before: []"] + ["installed"] * (value == "1")
    assert done.stdout.splitlines() == lines

"""The side file: the plugin's options; every mistake has the variable and the path as given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.tensorrt_llm.side_file import VARIABLE, options_of, read_side_file

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plugin.yaml"
    path.write_text("verification: block\n")
    return path


def message(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_side_file(environ)
    return str(caught.value)


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}])
def test_without_a_file_the_defaults(environ: dict[str, str]) -> None:
    assert read_side_file(environ) == MTPPluginOptions()


def test_options_are_read(file: Path) -> None:
    assert read_side_file({VARIABLE: str(file)}) == MTPPluginOptions(verification="block")


@pytest.mark.usefixtures("file")
def test_the_process_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_MTP_PLUGIN_CONFIG", "plugin.yaml")
    assert read_side_file().verification == "block"


def test_paths_in_it_are_from_its_folder(file: Path) -> None:
    (file.parent / "folder").mkdir()
    inner = file.parent / "folder" / "plugin.yaml"
    inner.write_text("draft_vocab: ids.json\n")
    options = read_side_file({VARIABLE: "folder/plugin.yaml"})
    assert options.draft_vocab == str(file.parent / "folder" / "ids.json")


def test_home(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    assert read_side_file({VARIABLE: "~/plugin.yaml"}).verification == "block"
    assert message({VARIABLE: "~/none.yaml"}).startswith("TRTLLM_MTP_PLUGIN_CONFIG=~/none.yaml: ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~nosuchuser/x", "expected the home of a user, got '~nosuchuser'"),
        ("/dev/zero", "cannot be read: expected a regular file, got a pipe or a device"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        ("/dev/null", "cannot be read: expected a regular file, got a pipe or a device"),
    ],
)
def test_what_is_no_file(given: str, expected: str) -> None:
    assert message({VARIABLE: given}) == f"TRTLLM_MTP_PLUGIN_CONFIG={given}: {expected}"


def test_the_shipped_file() -> None:
    options = read_side_file({VARIABLE: str(ROOT / "configs" / "trtllm" / "mtp_plugin.yaml")})
    assert options.begin_thinking_phase == "<think>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file; expected a YAML file"),
        ("", "the file is empty; expected a mapping of the plugin's options"),
        ("- block\n", "expected a mapping of keys to values, got a list"),
        ("block\n", "expected a mapping of keys to values, got 'block'"),
        ("verifcation: block\n", "verifcation: unknown key; did you mean verification?"),
        ("max_draft_len: 3\n", "max_draft_len: unknown key; it belongs under speculative_config"),
        ("keep_warm: 1\n", "keep_warm: should be a valid boolean, got 1"),
        ("mtp: {}\n", "mtp: unknown key; write the options themselves, without mtp around them"),
        ("seed: 1\nseed: 2\n", "line 2, column 1: key 'seed' was already given on line 1"),
    ],
)
def test_mistakes(file: Path, text: str | None, expected: str) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert message({VARIABLE: "plugin.yaml"}) == f"TRTLLM_MTP_PLUGIN_CONFIG=plugin.yaml: {expected}"


def test_a_folder(file: Path) -> None:
    expected = message({VARIABLE: str(file.parent)})
    assert expected == f"TRTLLM_MTP_PLUGIN_CONFIG={file.parent}: cannot be read: Is a directory"


@pytest.mark.usefixtures("file")
class TestOptionsOf:
    """A config's own options, the file's, or both."""

    def test_a_host_config_has_those_of_the_file(self) -> None:
        environ = {VARIABLE: "plugin.yaml"}
        assert options_of(SimpleNamespace(), environ).verification == "block"
        assert options_of(SimpleNamespace(mtp=MTPPluginOptions()), environ).verification == "block"

    def test_its_own(self) -> None:
        own = MTPPluginOptions(seed=3)
        assert options_of(SimpleNamespace(mtp=own), {}) is own

    def test_the_same_in_both(self) -> None:
        own = MTPPluginOptions(verification="block")
        assert options_of(SimpleNamespace(mtp=own), {VARIABLE: "plugin.yaml"}) == own

    def test_not_the_same(self) -> None:
        own = MTPPluginOptions(seed=3)
        with pytest.raises(ConfigError) as caught:
            options_of(SimpleNamespace(mtp=own), {VARIABLE: "plugin.yaml"})
        assert str(caught.value) == (
            "TRTLLM_MTP_PLUGIN_CONFIG=plugin.yaml: expected either it or the config's own mtp, or "
            "the same in both; they differ in verification, seed"
        )

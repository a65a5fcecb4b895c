"""The names of the package itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import mtp_plugin
from tests.fresh import run_code

PIECES = {
    "MTPHiddenStatesManager",
    "MTPWorker",
    "MTPEagleWorker",
    "MTPSampler",
    "SampleStateMTP",
    "SampleStateTensorsMTP",
}


@pytest.mark.parametrize("name", mtp_plugin.__all__)
def test_a_public_name_is_that_of_its_module(name: str) -> None:
    value = getattr(mtp_plugin, name)
    assert value.__module__.startswith("mtp_plugin.")
    assert getattr(import_module(value.__module__), name) is value
    assert name in dir(mtp_plugin)


def test_the_pieces_are_there() -> None:
    assert set(mtp_plugin.__all__) == set(mtp_plugin._MODULES)
    assert set(mtp_plugin.__all__) >= PIECES
    everything: dict[str, object] = {}
    exec("from mtp_plugin import *", everything)
    assert set(mtp_plugin.__all__) <= set(everything)


def test_version_is_that_of_the_installed_package() -> None:
    assert version("mtp-plugin") == mtp_plugin.__version__


def test_what_calls_give_is_there() -> None:
    assert set(mtp_plugin.__all__) >= {"RequestOutput", "StepEvent", "FinishReason"}


def test_reasons_are_read_as_text() -> None:
    reason = mtp_plugin.FinishReason.LENGTH
    assert reason == "length"
    assert (str(reason), f"{reason}", f"{reason:>8}") == ("length", "length", "  length")
    assert json.dumps({reason: [reason]}) == '{"length": ["length"]}'
    assert {"length": 1}[reason] == 1
    assert mtp_plugin.FinishReason("length") is reason
    assert {"stop", "stop_words", "length", "cancelled", "error"} == set(mtp_plugin.FinishReason)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'mtp_plugin' has no attribute 'MTPWalker'"):
        mtp_plugin.MTPWalker  # noqa: B018


def test_names_of_other_engines_name_what_to_type() -> None:
    assert not hasattr(mtp_plugin, "EngineArgs")
    with pytest.raises(AttributeError, match=r"'TokensPrompt'; use a list of token ids"):
        mtp_plugin.TokensPrompt  # noqa: B018
    with pytest.raises(ImportError, match=r"'EngineArgs'; use keyword arguments of `LLM"):
        from mtp_plugin import EngineArgs  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'MTPWalker'"):
        from mtp_plugin import MTPWalker  # noqa: F401


def test_the_package_alone_loads_nothing() -> None:
    loaded = (
        "import mtp_plugin, sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in {}))"
    )
    names = {"mtp_plugin", "torch", "transformers", "triton", "pydantic", "yaml"}
    command = [sys.executable, "-c", loaded.format(names)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "mtp_plugin mtp_plugin.version\n"


def test_pieces_need_neither_triton_nor_transformers() -> None:
    code = (
        "import sys; sys.modules.update(triton=None, transformers=None)\n"
        f"import mtp_plugin; print(*[getattr(mtp_plugin, n).__name__ for n in {sorted(PIECES)}])"
    )
    ended = run_code(code)
    assert ended.stdout.split() == sorted(PIECES), ended.stderr

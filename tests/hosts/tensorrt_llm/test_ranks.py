"""What reaches a process: logged once, installed once; models registered under their own names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mtp_plugin.errors import PluginError
from mtp_plugin.hosts import tensorrt_llm
from mtp_plugin.hosts.tensorrt_llm import ranks

CUSTOM_MODULE = Path(tensorrt_llm.__file__).parent / "custom_modules" / "mtp_plugin_models"


def test_the_first_way_is_logged_and_installs(
    installs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert ranks.loaded_by() is None
    with caplog.at_level(logging.INFO, "mtp_plugin"):
        ranks.install_once("config")
        ranks.install_once("sitecustomize")
    assert installs == ["install"]
    assert ranks.loaded_by() == "config"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "TensorRT-LLM: this process has the plugin, loaded by: config")
    ]


def test_what_was_installed_by_hand_is_not_installed_again(installs: list[str]) -> None:
    tensorrt_llm.install()
    ranks.install_once("config")
    assert installs == ["install"]


@pytest.mark.usefixtures("installs")
def test_a_failed_install_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PluginError("no such line")

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_llm, "install", fail)
        with pytest.raises(PluginError, match="no such line"):
            ranks.install_once("config")
    assert ranks.loaded_by() is None
    ranks.install_once("custom module")
    assert ranks.loaded_by() == "custom module"


@pytest.fixture
def custom_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Import the folder as --custom_module_dirs does: its parent on the path, then by its name."""
    names = (CUSTOM_MODULE.name, "mtp_plugin.hosts.tensorrt_llm.models")

    def load() -> ModuleType:
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(CUSTOM_MODULE.parent))
        module = import_module(CUSTOM_MODULE.name)
        for name in names:
            monkeypatch.delitem(sys.modules, name)
        return module

    return load


@pytest.mark.parametrize("line", ["1.2", "1.3b"])
def test_custom_module(
    line: str,
    host: Callable[..., None],
    custom_module: Callable[[], ModuleType],
    installs: list[str],
) -> None:
    host(line)
    registered = custom_module().REGISTERED
    assert installs == ["install"]
    assert ranks.loaded_by() == "custom module"
    assert set(registered) == {"Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"}
    registry = import_module("tensorrt_llm._torch.models.modeling_utils").MODEL_CLASS_MAPPING
    zoo = import_module("tensorrt_llm._torch.models.zoo")
    for name, model in registered.items():
        assert registry[name] is model
        assert model.__name__ == name
        assert model.__module__ == "mtp_plugin.hosts.tensorrt_llm.models"  # what ranks import
        assert model.__bases__ == (getattr(zoo, name),)
    assert registered["Glm4MoeForCausalLM"]("config").model_config == "config"


@pytest.mark.usefixtures("installs")
def test_custom_module_in_a_host_without_such_models(
    host: Callable[..., None], custom_module: Callable[[], ModuleType]
) -> None:
    host("1.3b", models=False)
    with pytest.raises(PluginError) as caught:
        custom_module()
    assert str(caught.value).startswith(
        "tensorrt_llm._torch.models.modeling_utils: expected one of DeepseekV3ForCausalLM, "
    )
    assert str(caught.value).endswith(" among the registered models, found none")


def test_folders_that_the_readme_names() -> None:
    assert (tensorrt_llm.CUSTOM_MODULES / "mtp_plugin_models" / "__init__.py").is_file()
    assert (tensorrt_llm.SITECUSTOMIZE / "sitecustomize.py").is_file()

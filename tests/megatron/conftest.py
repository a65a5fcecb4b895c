"""Megatron-Core needs Python 3.12 and an environment of its own: `make test-megatron`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from mtp_plugin.hosts import megatron
from tests.megatron import engine

# the substitutes for CUDA change torch for the whole process, hence only when requested
IS_REQUESTED = os.environ.get("MTP_PLUGIN_TEST_MEGATRON") == "1"
collect_ignore_glob = [] if IS_REQUESTED and find_spec("megatron") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "megatron" and item.path.parent.parent.name == "tests":
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def model_and_config() -> tuple[Any, Any]:
    """The model of `engine.make_model`, after Megatron was imported."""
    engine.initialize()
    return engine.make_model()


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """Uninstall the plugin after the test."""
    yield
    if megatron.status().installed:
        megatron.uninstall()

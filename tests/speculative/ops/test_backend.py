"""Which implementation of the ops a plugin runs on."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.ops.backend import REFERENCE_OPS, select_ops

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_the_references_on_request() -> None:
    assert select_ops("reference") is REFERENCE_OPS
    assert select_ops("reference", torch.device("cuda")) is REFERENCE_OPS


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "reference"),
        (torch.device("cuda", 1), "triton" if HAS_TRITON else "reference"),
        (None, "triton" if HAS_TRITON and torch.cuda.is_available() else "reference"),
    ],
    ids=["cpu", "cuda", "unsaid"],
)
def test_auto_follows_the_device(device: torch.device | str | None, name: str) -> None:
    assert select_ops("auto", device).name == name


@pytest.mark.usefixtures("without_triton")
def test_auto_goes_without_triton() -> None:
    assert select_ops("auto", "cuda") is REFERENCE_OPS


@pytest.mark.usefixtures("without_triton")
def test_triton_on_request_must_be_there() -> None:
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        select_ops("triton")


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected auto, triton or reference, got 'cuda'"):
        select_ops("cuda")


def test_triton_is_refused_on_a_cpu_without_the_interpreter(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"'triton' needs a CUDA device"):
        select_ops("triton", "cpu")
    assert select_ops("auto", "cpu").name == "reference"

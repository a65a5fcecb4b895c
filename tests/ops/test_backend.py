"""Which side of the ops the pieces of an engine run on."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.ops.backend import Backend

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def test_torch_on_request() -> None:
    assert Backend.of("reference") is Backend.TORCH
    assert Backend.of("reference", torch.device("cuda")) is Backend.TORCH


@pytest.mark.parametrize(
    ("device", "is_triton"),
    [
        ("cpu", False),
        (torch.device("cuda", 1), HAS_TRITON),
        (None, HAS_TRITON and torch.cuda.is_available()),
    ],
    ids=["cpu", "cuda", "unsaid"],
)
def test_auto_follows_the_device(device: torch.device | str | None, is_triton: bool) -> None:
    assert Backend.of("auto", device) is (Backend.TRITON if is_triton else Backend.TORCH)


@pytest.mark.usefixtures("without_triton")
def test_auto_goes_without_triton() -> None:
    assert Backend.of("auto", "cuda") is Backend.TORCH


@pytest.mark.usefixtures("without_triton")
def test_triton_on_request_must_be_there() -> None:
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        Backend.of("triton")


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected auto, triton or reference, got 'cuda'"):
        Backend.of("cuda")


def test_triton_is_refused_on_a_cpu_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"'triton' needs a CUDA device .*got cpu"):
        Backend.of("triton", "cpu")
    assert Backend.of("auto", "cpu") is Backend.TORCH

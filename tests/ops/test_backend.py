"""Which side of the ops the pieces of an engine run on."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mtp_plugin import ops
from mtp_plugin.errors import ConfigError
from mtp_plugin.ops import backend as backend_module
from mtp_plugin.ops.backend import Backend

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_is_triton_installed", lambda: False)


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


def test_ops_take_names_and_choose_by_device() -> None:
    rows, slots = ops.LogitRows.flat(torch.zeros(1).int()), ops.build_slot_rows([{}], device="cpu")
    logits = torch.tensor([[1.0, 2.0]])
    assert ops.sample_tokens(logits, rows, slots).tolist() == [1]
    for name in ("auto", "torch", "reference", *(["triton"] if HAS_TRITON else [])):
        assert ops.sample_tokens(logits, rows, slots, backend=name).tolist() == [1]
    with pytest.raises(ConfigError, match=r"^backend: expected auto, torch, triton or .* 'cuda'"):
        ops.sample_tokens(logits, rows, slots, backend="cuda")


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected auto, torch, triton or reference, got 'cuda'"):
        Backend.of("cuda")


def test_triton_is_refused_on_a_cpu_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"'triton' needs a CUDA device .*got cpu"):
        Backend.of("triton", "cpu")
    assert Backend.of("auto", "cpu") is Backend.TORCH

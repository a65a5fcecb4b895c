"""The mode in which a host sync fails, with a replacement for torch's own."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.ops.on_device import PROTOTYPE, read_back_forbidden


class SyncMode:
    """Changes the mode, and warns then, as torch does once per process."""

    def __init__(self, *more: str) -> None:
        self.mode = 0
        self.warnings = [f"{PROTOTYPE} and does not yet detect all of them", *more]

    def get(self) -> int:
        return self.mode

    def set(self, mode: int | str) -> None:
        names = {"default": 0, "warn": 1, "error": 2}
        self.mode = names[mode] if isinstance(mode, str) else mode
        while self.warnings:
            warnings.warn(self.warnings.pop(0), UserWarning, stacklevel=2)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", self.get)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_mode_is_restored_after_the_context(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    sync = SyncMode()
    sync.install(monkeypatch)
    sync.mode = before
    with read_back_forbidden():
        assert sync.mode == 2
    assert sync.mode == before


def test_mode_is_restored_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = SyncMode()
    sync.install(monkeypatch)
    with pytest.raises(RuntimeError, match="synchronizing"), read_back_forbidden():
        raise RuntimeError("called a synchronizing operation")
    assert sync.mode == 0


def test_no_other_warning_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors: neither that of the switch nor one of the body passes."""
    sync = SyncMode("something else")
    sync.install(monkeypatch)
    with pytest.raises(UserWarning, match="something else"), read_back_forbidden():
        pass
    assert sync.mode == 0
    with pytest.raises(UserWarning, match=PROTOTYPE), read_back_forbidden():
        warnings.warn(PROTOTYPE, UserWarning, stacklevel=1)


@pytest.mark.gpu
def test_a_sync_fails_in_a_process_of_any_age() -> None:
    ones = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with read_back_forbidden(), pytest.raises(RuntimeError, match="synchroniz"):
        ones.item()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert ones.item() == 1.0

"""The mode in which waiting for the device fails, over a stand-in for torch's own."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.speculative.ops.on_device import PROTOTYPE, read_back_forbidden


class SyncMode:
    """Changes the mode, and warns then, as torch does; there every first time of a process."""

    def __init__(self, *more: str) -> None:
        self.mode = 0
        self.told = [f"{PROTOTYPE} and does not yet detect all of them", *more]

    def get(self) -> int:
        return self.mode

    def set(self, mode: int | str) -> None:
        names = {"default": 0, "warn": 1, "error": 2}
        self.mode = names[mode] if isinstance(mode, str) else mode
        while self.told:
            warnings.warn(self.told.pop(0), UserWarning, stacklevel=2)

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", self.get)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_mode_is_on_within_and_what_it_was_behind(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    sync = SyncMode()
    sync.stand_in(monkeypatch)
    sync.mode = before
    with read_back_forbidden():
        assert sync.mode == 2
    assert sync.mode == before


def test_a_body_that_raises_leaves_no_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = SyncMode()
    sync.stand_in(monkeypatch)
    with pytest.raises(RuntimeError, match="synchronizing"), read_back_forbidden():
        raise RuntimeError("called a synchronizing operation")
    assert sync.mode == 0


def test_no_other_warning_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors: neither that of the switch nor one of the body passes."""
    sync = SyncMode("something else")
    sync.stand_in(monkeypatch)
    with pytest.raises(UserWarning, match="something else"), read_back_forbidden():
        pass
    assert sync.mode == 0
    with pytest.raises(UserWarning, match=PROTOTYPE), read_back_forbidden():
        warnings.warn(PROTOTYPE, UserWarning, stacklevel=1)


@pytest.mark.gpu
def test_the_device_says_so_in_a_process_of_any_age() -> None:
    ones = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with read_back_forbidden(), pytest.raises(RuntimeError, match="synchroniz"):
        ones.item()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert ones.item() == 1.0

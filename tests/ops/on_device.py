"""Shared by the tests of kernels: the device they run on, poisoned outputs, and graph replays.

Without a GPU the kernels run in Triton's interpreter, which `tests/conftest.py` switches on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

POISON = -777
INDEX_DTYPES = (torch.int32, torch.int64)
PROTOTYPE = "Synchronization debug mode is a prototype feature"


def vector(values: Iterable, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor in which elements that are not written are noticed."""
    value = True if dtype == torch.bool else POISON
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def forbid_launches(monkeypatch: pytest.MonkeyPatch, launch: object) -> None:
    """Make every launch of a kernel of the module `launch` fail."""
    for name in [n for n in vars(launch) if n.endswith("_kernel") or n == "_launches"]:
        monkeypatch.setattr(launch, name, None)


@contextmanager
def read_back_forbidden() -> Iterator[None]:
    """On a GPU, make every host sync fail inside the context."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # warned once per process, after the change: as an error it would leave the mode on
            warnings.filterwarnings("ignore", PROTOTYPE, UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def replay_in_graph(step: Callable[[], object], change: Callable[[], object]) -> None:
    """Capture `step`, call `change`, replay; the step may neither allocate nor read back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
        stream.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with read_back_forbidden():
            step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    change()
    graph.replay()
    torch.cuda.synchronize()

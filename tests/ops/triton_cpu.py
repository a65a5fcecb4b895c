"""Where kernels run in the tests: on a GPU, or in Triton's interpreter where there is none.

Triton reads TRITON_INTERPRET when it decorates a kernel. The `__init__` of a test package imports
this module, which is before any module of that package can import a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

POISON = -777
INDEX_DTYPES = (torch.int32, torch.int64)


def needs_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(
        pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")(test),
    )


def vector(values: Iterable, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor in which every element that nobody writes is seen."""
    value = True if dtype == torch.bool else POISON
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def forbid_launches(monkeypatch: pytest.MonkeyPatch, launch: object) -> None:
    """Let every launch of a kernel in the module `launch` fail."""
    for name in [name for name in vars(launch) if name.endswith("_kernel")]:
        monkeypatch.setattr(launch, name, None)


def replay_in_graph(step: Callable[[], object], change: Callable[[], object]) -> None:
    """Capture `step`, call `change`, replay; the step may neither allocate nor read back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            step()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    change()
    graph.replay()
    torch.cuda.synchronize()

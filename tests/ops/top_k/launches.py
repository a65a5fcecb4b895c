"""Helpers for launches: outputs that start poisoned, and captures in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from tests.ops.on_device import POISON, read_back_forbidden

Outputs = TypeVar("Outputs")


class _PoisoningTorch:
    """`torch`, except that fresh tensors hold what no result may hold."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, **options: Any) -> torch.Tensor:
        return poison(torch.empty(*shape, **options))

    def empty_like(self, like: torch.Tensor, **options: Any) -> torch.Tensor:
        return poison(torch.empty_like(like, **options))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with a value that every reader notices."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(-77 if tensor.dtype == torch.int8 else POISON)


@contextmanager
def poisoned_outputs(*launches: ModuleType) -> Iterator[None]:
    """Tensors that these modules allocate start poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        for launch in launches:
            patch.setattr(launch, "torch", _PoisoningTorch())
        yield


def captured(step: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Capture `step` without a host sync; return the graph and the outputs of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with read_back_forbidden(), torch.cuda.graph(graph, stream=stream):
        outputs = step()
    return graph, outputs

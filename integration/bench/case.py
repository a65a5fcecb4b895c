"""Cases of the benchmark of ops: sizes, random inputs, and one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from mtp_plugin.errors import MTPPluginError
from mtp_plugin.ops.backend import Backend


class BenchmarkError(MTPPluginError, RuntimeError):
    """A benchmark cannot run here, or no case is selected."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one step; hidden states are bfloat16."""

    batch: int
    hidden: int = 7168
    vocab: int = 129280
    k: int = 3
    dtype: str = "float32"  # of the logits

    @property
    def rows(self) -> int:
        """Rows of the target's logits: K+1 per generation."""
        return self.batch * (self.k + 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of logits."""
        return self.vocab * (4 if self.dtype == "float32" else 2)

    @property
    def state_bytes(self) -> int:
        """Bytes of one hidden state."""
        return self.hidden * 2

    @property
    def label(self) -> str:
        """Batch size and the sizes that differ from the reference, part of the case's label."""
        named = {
            "hidden": f"h{self.hidden}",
            "vocab": f"v{self.vocab}",
            "k": f"k{self.k}",
            "dtype": self.dtype,
        }
        other = [text for name, text in named.items() if getattr(self, name) != _default(name)]
        return "-".join([f"b{self.batch}", *other])


REFERENCE = Shape(batch=1)
TINY = Shape(batch=1, hidden=48, vocab=211, k=2)


def _default(name: str) -> object:
    return getattr(REFERENCE, name)


def variations(shape: Shape) -> list[Shape]:
    """Return variants of ``shape`` with one other value each."""
    return [replace(shape, dtype="bfloat16"), replace(shape, k=1), replace(shape, k=7)]


@dataclass(frozen=True)
class Trial:
    """One input set and the call on it."""

    run: Callable[[Backend], dict[str, torch.Tensor]]  # new tensors by name
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # changed in place
    approximate: frozenset[str] = frozenset()  # compared with a tolerance, the others exactly


@dataclass(frozen=True)
class Case:
    """One op or step at one shape."""

    name: str
    shape: Shape
    bytes_moved: int  # lower bound of the call
    prepare: Callable[[int], Trial]  # seed -> trial

    @property
    def label(self) -> str:
        """Name of the case, which ``--filter`` matches."""
        return f"{self.name}/{self.shape.label}"


class RandomInputs:
    """Random tensors on a device, determined by a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """Return integers in [low, high)."""
        return torch.randint(
            low, high, shape, generator=self._generator, device=self.device, dtype=dtype
        )

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return normal numbers, since some devices process zeros faster."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype)

    def permutation(self, size: int) -> torch.Tensor:
        """Return a permutation of 0..size-1."""
        return torch.randperm(size, generator=self._generator, device=self.device)

    def states(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape, dtype=torch.bfloat16)

    def logits(self, rows: int, shape: Shape) -> torch.Tensor:
        return self.normal(rows, shape.vocab, dtype=getattr(torch, shape.dtype))

    def drafts(self, logits: torch.Tensor, shape: Shape, best_of: int = 1) -> torch.Tensor:
        """Return draft ids [B*K], mostly among the top ``best_of`` of the target's ``logits``."""
        rows = logits.view(shape.batch, shape.k + 1, shape.vocab)[:, : shape.k]
        places = self.integers(0, best_of, shape.batch, shape.k, 1, dtype=torch.int64)
        best = rows.topk(best_of, dim=-1).indices.gather(-1, places).squeeze(-1)
        other = self.integers(0, shape.vocab, *best.shape, dtype=torch.int64)
        is_likely = torch.rand(best.shape, generator=self._generator, device=self.device) < 0.8
        return torch.where(is_likely, best, other).reshape(-1).to(torch.int32)

"""Random inputs of ops and steps."""

from __future__ import annotations

import torch

from integration.bench.shapes import Shape


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

    def chance(self, likely: float, *shape: int) -> torch.Tensor:
        """Return True with probability ``likely``."""
        return torch.rand(shape, generator=self._generator, device=self.device) < likely

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
        chosen = torch.where(self.chance(0.8, *best.shape), best, other)
        return chosen.reshape(-1).to(torch.int32)

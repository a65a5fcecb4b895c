"""Tolerances of the tests of fused layers, by dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.ops.on_device import DEVICE


class Kind(NamedTuple):
    """A dtype, and the tolerances of its results."""

    dtype: torch.dtype
    rtol: float
    atol: float

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=self.rtol, atol=self.atol)


FLOAT = Kind(torch.float32, rtol=2e-5, atol=2e-5)
# the interpreter multiplies bf16 as integers; fp16 takes the same way through the kernels
HALF = (
    Kind(torch.bfloat16, rtol=2e-2, atol=2e-2)
    if DEVICE.type == "cuda"
    else Kind(torch.float16, rtol=2e-3, atol=2e-3)
)
KINDS = [FLOAT, HALF]


def rolled(*shape: int, kind: Kind, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=rng)).to(DEVICE, kind.dtype)


def strided(rows: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """The same rows with NaN between them."""
    wide = torch.full(
        (rows.shape[0], rows.shape[1] + gap), torch.nan, dtype=rows.dtype, device=rows.device
    )
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]

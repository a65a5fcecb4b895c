"""Rows of logits with everything that a reduction over the vocabulary can trip over."""

from __future__ import annotations

import torch

from mtp_plugin.ops.top1 import TILE, split
from tests.ops.on_device import DEVICE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (1, 2, 7, 127, 1023, 1025, 2049, 3001, 4999)
"""None divisible by a tile; the last ones are cut into blocks whatever the number of rows."""
PAST_END = 3e4
"""Stored after the vocabulary: a kernel that reads too far returns it."""


def seams(rows: int, vocab: int) -> list[int]:
    """Ids at both ends of the vocabulary, and on both sides of every tile and block."""
    cuts = set(range(TILE, vocab, TILE))
    for heavy in (False, True):
        cuts |= set(range(split(rows, vocab, heavy=heavy)[0], vocab, TILE))
    return sorted({0, vocab - 1} | cuts | {cut - 1 for cut in cuts})


def bounds_of(rows: int, vocab: int, heavy: bool) -> list[slice]:
    """The blocks that the vocabulary is cut into."""
    length, count, _ = split(rows, vocab, heavy=heavy)
    return [slice(part * length, min((part + 1) * length, vocab)) for part in range(count)]


def odd_rows(
    rng: torch.Generator, rows: int, vocab: int, dtype: torch.dtype, *, smooth: bool = False
) -> torch.Tensor:
    """[rows, V] on the CPU: ties on seams, NaN, infinities, rows without any value.

    smooth: values of many levels, else of few, so that nearly every row has ties.
    """
    values = torch.randn(rows, vocab, generator=rng)
    values = values * 2 if smooth else (values * 2).round() / 2
    values = values.to(dtype).to(torch.float32)
    ends = torch.tensor(seams(rows, vocab))

    def some(size: int, share: float) -> torch.Tensor:
        return torch.rand(size, generator=rng) < share

    for row in range(rows):
        kind = int(torch.randint(0, 10, (1,), generator=rng))
        if kind == 0:  # nothing usable
            values[row] = torch.where(some(vocab, 0.5), torch.nan, -torch.inf)
            continue
        if kind <= 3:  # the maximum on several seams
            values[row, ends[some(len(ends), 0.6)]] = values[row].max()
        if kind in (2, 4):
            values[row, some(vocab, 0.3)] = -torch.inf
        if kind in (3, 5):
            values[row, some(vocab, 0.3)] = torch.nan
        if kind == 6:
            places = torch.randint(0, vocab, (2,), generator=rng)
            values[row, places] = torch.inf
        if kind == 7:  # one token is left
            only = values[row, ends[-1]].clone()
            values[row] = -torch.inf
            values[row, ends[-1]] = only
    return values.to(dtype)


def strided(values: torch.Tensor, spare: int) -> torch.Tensor:
    """`values` on the device, in rows that are `spare` columns wider."""
    wide = torch.full((values.shape[0], values.shape[1] + spare), PAST_END, dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide.to(DEVICE)[:, : values.shape[1]]


def without_nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.isnan(logits), -torch.inf)


def best_ids(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of the highest value per row, without argmax's own idea of ties."""
    usable = without_nan(logits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = usable.amax(dim=1, keepdim=True)
    return torch.where(usable == top, ids, logits.shape[1]).amin(dim=1)

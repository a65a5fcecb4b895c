"""Requests of the story as the tensors of a host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.hosts.megatron.ops.kv_rewind.story import Request
from tests.speculative.ops.on_device import POISON, poisoned, vector

SPARE = 2
"""Rows behind the batch, which nobody may touch."""


@dataclass
class Tables:
    """The bookkeeping of a batch, spare rows behind it."""

    offset: torch.Tensor
    length: torch.Tensor
    count: torch.Tensor
    last: torch.Tensor
    ids: torch.Tensor  # [N + SPARE, width], a view of wider rows

    @staticmethod
    def of(requests: list[Request], width: int, dtype: torch.dtype) -> Tables:
        def column(values: list[int]) -> torch.Tensor:
            return vector([*values, *[POISON] * SPARE], dtype)

        ids = poisoned(len(requests) + SPARE, width + 1, dtype=dtype)[:, :width]
        for row, request in enumerate(requests):
            padded = request.blocks + [-1] * (width - len(request.blocks))
            ids[row] = vector(padded, dtype)
        return Tables(
            offset=column([request.offset for request in requests]),
            length=column([request.length for request in requests]),
            count=column([len(request.blocks) for request in requests]),
            last=column([request.blocks[-1] for request in requests]),
            ids=ids,
        )

    def clone(self) -> Tables:
        return Tables(*(tensor.clone() for tensor in self.tensors()))

    def tensors(self) -> list[torch.Tensor]:
        return [self.offset, self.length, self.count, self.last, self.ids]

    def assert_equal(self, other: Tables) -> None:
        for name in ("offset", "length", "count", "last", "ids"):
            assert torch.equal(getattr(self, name), getattr(other, name)), name

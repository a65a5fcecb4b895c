"""The buffers that a draft loop writes, and logits of real sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch

from mtp_plugin.ops.step import DraftOutput
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, poisoned


@dataclass
class Loop:
    """The buffers of a draft loop with spare elements around each, which show stray writes."""

    drafts: torch.Tensor  # [R + 1, K + 1]
    following: torch.Tensor  # [R + 1, K + 3], the column is one further on
    shifted: torch.Tensor
    last_rows: torch.Tensor
    positions: torch.Tensor  # [R + 1]
    kv_lens: torch.Tensor  # [R + 1]

    @classmethod
    def of(cls, seed: int, requests: int, k: int) -> Loop:
        r = random.Random(seed)
        lens = [r.randint(1, 4) for _ in range(requests)]
        numbers = [r.randint(0, 60) for _ in range(requests + 1)]
        return cls(
            poisoned(requests + 1, k + 1, dtype=torch.int32),
            poisoned(requests + 1, k + 3, dtype=torch.int32),
            poisoned(sum(lens) + k, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int64).cumsum(0).sub(1).to(DEVICE),
            torch.tensor(numbers, device=DEVICE),
            torch.tensor(numbers, dtype=torch.int32, device=DEVICE) + 9,
        )

    def column(
        self,
        column: int,
        shift: bool = False,
        advance: bool = False,
        kv: bool = False,
        max_position: int | None = None,
    ) -> DraftOutput:
        requests = self.last_rows.shape[0]
        return DraftOutput(
            self.drafts[:requests, :-1],
            self.following[:requests, 1:-1],
            column,
            self.shifted if shift else None,
            self.last_rows if shift else None,
            self.positions[:requests] if advance else None,
            self.kv_lens[:requests] if advance and kv else None,
            max_position,
        )

    def assert_same(self, other: Loop) -> None:
        for field in fields(self):
            assert same_bits(getattr(self, field.name), getattr(other, field.name)), field.name


def real_logits(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=rng).to(DEVICE, dtype)
    logits[3::17] = torch.nan
    logits[5::7, ::2] = -torch.inf
    logits[6::7, 11::5003] = torch.inf
    return logits

"""Random batches, as lists and as the tensors of a host engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tests.hosts.megatron.example import Decode, Request
from tests.ops.on_device import POISON, poisoned, vector


def random_decodes(rng: random.Random, count: int, num_drafts: int) -> list[Decode]:
    """Few different tokens, so that drafts repeat and often match; some drafts are missing (-1)."""

    def decode() -> Decode:
        outputs = [rng.randrange(3) for _ in range(num_drafts + 1)]
        read = [rng.randrange(3)]
        for token in outputs[:-1]:
            read.append(rng.choice([token, token, token, rng.randrange(3), -1]))
        return Decode(read, outputs)

    return [decode() for _ in range(count)]


def flat_tokens(
    decodes: list[Decode],
    prefills: list[int],
    padding: list[int],
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [T] and the outputs after them, which are one more than each prefill token."""
    read = [token for request in decodes for token in request.read]
    outputs = [token for request in decodes for token in request.outputs]
    return (
        vector(read + prefills + padding, dtype),
        vector(outputs + [token + 1 for token in prefills], dtype),
    )


def random_requests(
    rng: random.Random, kinds: list[bool], num_drafts: int, block_size: int
) -> list[Request]:
    """Requests (True: decode) whose drafts all have KV; often the last block is nearly empty."""

    def request(is_decode: bool) -> Request:
        in_last = rng.choice([1, 1, 2, rng.randint(1, block_size), block_size])
        blocks = -(-(num_drafts + 1) // block_size) + rng.randint(1, 3)
        ids = rng.sample(range(1, 1000), blocks)
        accepted = rng.choice([0, rng.randint(0, num_drafts), num_drafts])
        offset = min(in_last, block_size) - 1
        return Request(is_decode, ids, offset, rng.randint(100, 10_000), accepted)

    return [request(is_decode) for is_decode in kinds]


SPARE = 2
"""Rows after the batch, which must not change."""


@dataclass
class Tables:
    """The KV bookkeeping of a batch, followed by spare rows."""

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

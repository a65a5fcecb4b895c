"""A request gives KV tokens back one at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Request:
    """The blocks of one request; the last token stands at `offset` of the last block."""

    is_decode: bool
    blocks: list[int]
    offset: int
    length: int
    accepted: int  # of the drafts of this step

    def give_back(self, num_tokens: int, block_size: int) -> list[int]:
        """The blocks that are left without a token, the newest first."""
        released = []
        for _ in range(num_tokens):
            self.length -= 1
            if self.offset == 0:
                released.append(self.blocks.pop())
                self.offset = block_size
            self.offset -= 1
        return released


def random_requests(
    dice: random.Random, kinds: list[bool], num_drafts: int, block_size: int
) -> list[Request]:
    """Requests (True: decode) whose drafts all have KV; often the last block is nearly empty."""

    def request(is_decode: bool) -> Request:
        in_last = dice.choice([1, 1, 2, dice.randint(1, block_size), block_size])
        blocks = -(-(num_drafts + 1) // block_size) + dice.randint(1, 3)
        ids = dice.sample(range(1, 1000), blocks)
        accepted = dice.choice([0, dice.randint(0, num_drafts), num_drafts])
        offset = min(in_last, block_size) - 1
        return Request(is_decode, ids, offset, dice.randint(100, 10_000), accepted)

    return [request(is_decode) for is_decode in kinds]


def rewind(
    requests: list[Request], num_drafts: int, block_size: int, num_active: int
) -> tuple[list[list[int]], list[list[bool]]]:
    """Move the active decode requests back; what each row releases, and whether it does."""
    columns = max(-(-num_drafts // block_size), 1)
    blocks, marks = [], []
    for row, request in enumerate(requests):
        if row >= num_active:
            blocks.append([0] * columns)
            marks.append([False] * columns)
            continue
        last = request.blocks[-1]
        rejected = num_drafts - request.accepted if request.is_decode else 0
        released = request.give_back(rejected, block_size)
        blocks.append([*(released or [last]), *[0] * columns][:columns])
        marks.append([column < len(released) for column in range(columns)])
    return blocks, marks

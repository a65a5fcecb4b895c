"""Megatron's functions in plain Python, over lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtp_plugin.ops.step import PAD_TOKEN


class Decode(NamedTuple):
    """A base token and drafts, and the target's token after each of them."""

    read: list[int]
    outputs: list[int]

    def num_accepted(self) -> int:
        """The base token, and the leading drafts that are the outputs before them."""
        accepted = 1
        while accepted < len(self.read) and self.read[accepted] == self.outputs[accepted - 1]:
            accepted += 1
        return accepted


def verify(
    decodes: list[Decode], num_prefills: int, num_padding: int = 0
) -> tuple[list[int], list[bool]]:
    """The flat index of every request's last accepted token, and which flat tokens are accepted."""
    last: list[int] = []
    mask: list[bool] = []
    for request in decodes:
        accepted = request.num_accepted()
        last.append(len(mask) + accepted - 1)
        mask += [True] * accepted + [False] * (len(request.read) - accepted)
    for _ in range(num_prefills):
        last.append(len(mask))
        mask.append(True)
    return last, mask + [False] * num_padding


def rows_with_logits(requests: list[tuple[bool, int]], num_entries: int | None = None) -> list[int]:
    """All rows of a decode request (True, rows), the last of a prefill request (False, rows)."""
    rows: list[int] = []
    start = 0
    for is_decode, length in requests:
        of_request = list(range(start, start + length))
        rows += of_request if is_decode else [max(start + length - 1, 0)]
        start += length
    return rows if num_entries is None else (rows + [0] * num_entries)[:num_entries]


class NextInputs(NamedTuple):
    """Inputs of the next forward pass of a request; drafts only of decode requests."""

    sampled: int
    row: int
    drafts: list[int] | None
    count: int | None


def next_inputs(
    decodes: list[Decode], prefill_outputs: list[int], rows: list[int]
) -> list[NextInputs]:
    """`rows`: for every flat token its row in the packed sequence."""
    inputs = []
    start = 0
    for request in decodes:
        accepted = request.num_accepted()
        num_drafts = len(request.read) - 1
        drafts = request.read[1:accepted]
        padded = drafts + [PAD_TOKEN] * (num_drafts - len(drafts))
        last = accepted - 1
        inputs.append(NextInputs(request.outputs[last], rows[start + last], padded, len(drafts)))
        start += num_drafts + 1
    for output in prefill_outputs:
        inputs.append(NextInputs(output, rows[start], None, None))
        start += 1
    return inputs


@dataclass
class Request:
    """The KV blocks of one request; the last token is at `offset` of the last block."""

    is_decode: bool
    blocks: list[int]
    offset: int
    length: int
    accepted: int  # of the drafts of this step

    def remove(self, num_tokens: int, block_size: int) -> list[int]:
        """The blocks that are left without a token, the newest first."""
        released = []
        for _ in range(num_tokens):
            self.length -= 1
            if self.offset == 0:
                released.append(self.blocks.pop())
                self.offset = block_size
            self.offset -= 1
        return released


def rewind(
    requests: list[Request], num_drafts: int, block_size: int, num_active: int
) -> tuple[list[list[int]], list[list[bool]]]:
    """Rewind the active decode requests; the blocks of each row, and whether it releases them."""
    columns = max(-(-num_drafts // block_size), 1)
    blocks, marks = [], []
    for row, request in enumerate(requests):
        if row >= num_active:
            blocks.append([0] * columns)
            marks.append([False] * columns)
            continue
        last = request.blocks[-1]
        rejected = num_drafts - request.accepted if request.is_decode else 0
        released = request.remove(rejected, block_size)
        blocks.append([*(released or [last]), *[0] * columns][:columns])
        marks.append([column < len(released) for column in range(columns)])
    return blocks, marks

"""What a step leaves to the next forward, told over lists."""

from __future__ import annotations

from typing import NamedTuple

from mtp_plugin.speculative.step import PAD_TOKEN
from tests.hosts.megatron.ops.token_verify.story import Decode


class Left(NamedTuple):
    """What one request leaves; drafts are those of decode requests."""

    sampled: int
    row: int
    drafts: list[int] | None
    count: int | None


def after_step(decodes: list[Decode], prefill_outputs: list[int], rows: list[int]) -> list[Left]:
    """`rows` says for every flat token where it stood in the packed sequence."""
    left = []
    start = 0
    for request in decodes:
        standing = request.num_standing()
        num_drafts = len(request.read) - 1
        drafts = request.read[1:standing]
        padded = drafts + [PAD_TOKEN] * (num_drafts - len(drafts))
        last = standing - 1
        left.append(Left(request.emitted[last], rows[start + last], padded, len(drafts)))
        start += num_drafts + 1
    for output in prefill_outputs:
        left.append(Left(output, rows[start], None, None))
        start += 1
    return left

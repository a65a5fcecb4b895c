"""The verification of drafts, told over lists."""

from __future__ import annotations

from typing import NamedTuple


class Decode(NamedTuple):
    """A base token and drafts were read; behind each of them the target emitted a token."""

    read: list[int]
    emitted: list[int]

    def num_standing(self) -> int:
        """The base token stands, and each draft that the target emitted before it was read."""
        standing = 1
        while standing < len(self.read) and self.read[standing] == self.emitted[standing - 1]:
            standing += 1
        return standing


def verify(
    decodes: list[Decode], num_prefills: int, num_padding: int = 0
) -> tuple[list[int], list[bool]]:
    """The flat index of everyone's last accepted token, and which flat tokens stand."""
    last: list[int] = []
    stands: list[bool] = []
    for request in decodes:
        standing = request.num_standing()
        last.append(len(stands) + standing - 1)
        stands += [True] * standing + [False] * (len(request.read) - standing)
    for _ in range(num_prefills):
        last.append(len(stands))
        stands.append(True)
    return last, stands + [False] * num_padding


def rows_with_logits(requests: list[tuple[bool, int]], num_entries: int | None = None) -> list[int]:
    """All rows of a decode request (True, rows), the last of a prefill request (False, rows)."""
    rows: list[int] = []
    start = 0
    for is_decode, length in requests:
        of_request = list(range(start, start + length))
        rows += of_request if is_decode else [max(start + length - 1, 0)]
        start += length
    return rows if num_entries is None else (rows + [0] * num_entries)[:num_entries]

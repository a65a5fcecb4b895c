"""The maximum draft length by batch size."""

from __future__ import annotations

from collections.abc import Iterable

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ExecutorError, expect


class DraftLengthSchedule:
    """Maximum draft lengths by ``draft_len_schedule`` and ``max_concurrency`` of a config.

    Args:
        config: with K resolved. max_batch_size: maximum number of requests of a batch.
    """

    def __init__(self, config: MTPDecodingConfig, max_batch_size: int) -> None:
        self._by_size = [config.draft_len_for(size) for size in range(1, max_batch_size + 1)]

    def length(self, batch_size: int) -> int:
        """Return the maximum draft length of a batch.

        Raises:
            ExecutorError: a size out of range.
        """
        expect(
            1 <= batch_size <= len(self._by_size),
            ExecutorError,
            f"draft length: expected a batch of 1 to {len(self._by_size)} requests, got "
            f"{batch_size}",
        )
        return self._by_size[batch_size - 1]

    def lengths(self, batch_sizes: Iterable[int] | None = None) -> set[int]:
        """Return the maximum draft lengths of these batch sizes; None: of all.

        Raises:
            ExecutorError: a size out of range.
        """
        if batch_sizes is None:
            return set(self._by_size)
        return {self.length(size) for size in batch_sizes}

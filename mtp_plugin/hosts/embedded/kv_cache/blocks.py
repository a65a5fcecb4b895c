"""Allocates KV blocks to requests, on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from mtp_plugin.errors import ConfigError, NoFreeBlocksError, expect


class BlockManager:
    """Allocates KV blocks; the block after the last one is the sentinel for padding writes.

    The target and all draft layers share one block table. As a resource manager it only frees: the
    scheduler reserves blocks, because its decisions depend on the number of free blocks.

    Args:
        num_blocks: number of usable blocks.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            expect(value >= 1, ConfigError, f"KV cache: {name} must be >= 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sentinel_block = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def blocks_for(self, num_rows: int) -> int:
        """Return the number of blocks for ``num_rows`` KV rows."""
        return -(-num_rows // self.block_size)

    def table(self, request_id: int) -> list[int]:
        """Return the request's blocks in order; empty for an unknown id."""
        return self._tables.get(request_id, [])

    def reserved_rows(self, request_id: int) -> int:
        """Return the number of KV rows in the request's blocks."""
        return len(self.table(request_id)) * self.block_size

    def missing_blocks(self, request_id: int, num_rows: int) -> int:
        """Return the number of additional blocks that the request needs for ``num_rows`` rows."""
        return max(0, self.blocks_for(num_rows) - len(self.table(request_id)))

    def try_reserve(self, request_id: int, num_rows: int) -> bool:
        """Grow the request's table to ``num_rows`` rows; False without a change if blocks lack."""
        missing = self.missing_blocks(request_id, num_rows)
        if missing == 0:
            return True  # as in most steps
        if missing > len(self._free):
            return False
        table = self._tables.setdefault(request_id, [])
        # one operation: a signal handler that raises between two would leak a block
        table.extend(islice(iter(self._free.popleft, None), missing))
        return True

    def reserve(self, request_id: int, num_rows: int) -> None:
        """Grow the request's table to ``num_rows`` rows.

        Raises:
            NoFreeBlocksError: fewer blocks are free than needed.
        """
        if not self.try_reserve(request_id, num_rows):
            raise NoFreeBlocksError(
                f"request {request_id} needs {self.missing_blocks(request_id, num_rows)} more KV "
                f"blocks for {num_rows} rows, {self.num_free_blocks} of {self.num_blocks} are free"
            )

    # ---- resource manager -------------------------------------------------------------------

    def get_max_resource_count(self) -> int:
        """Number of usable blocks."""
        return self.num_blocks

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Return the number of blocks of the request at its maximum length."""
        return self.blocks_for(request.max_length)

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Do nothing: dummy requests use the sentinel block."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Do nothing: the scheduler has reserved the blocks."""

    def update_resources(self, scheduled_batch: Any) -> None:
        """Do nothing: rows of rejected drafts stay reserved for the next step."""

    def free_resources(self, request: Any) -> None:
        """Free the request's blocks; an unknown id changes nothing."""
        taken = map(self._tables.pop, (request.request_id,), ([],))
        self._free.extend(chain.from_iterable(taken))  # one operation, as above

    def shutdown(self) -> None:
        """Free every block."""
        self._tables.clear()
        self._free = deque(range(self.num_blocks))

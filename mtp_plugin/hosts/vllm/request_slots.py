"""The slot table of an engine: one row per request state index of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mtp_plugin.requests.columns import REQUEST_COLUMNS, Number, TableColumns
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.speculative.step import SlotRows, to_device

_SEED_MASK = 2**64 - 1


class RequestSlots:
    """Request options on the device, at a fixed address, as captured graphs need it.

    Row ``max_num_reqs`` belongs to the rows that pad a batch: a greedy request.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.columns = TableColumns(REQUEST_COLUMNS)
        self._padding = max_num_reqs
        empty = to_device([self.columns.row({})], torch.int32, device)
        self.table = empty.repeat(max_num_reqs + 1, 1)
        """[max_num_reqs + 1, W] int32"""
        self._staged: dict[int, list[int]] = {}
        self._num_requests = 0

    def stage(
        self, index: int, options: Mapping[str, Number | Sequence[Number]], seed: int
    ) -> None:
        """Overwrite the whole row of a request at the next `apply`.

        Args:
            seed: of 64 bits, signed or not.
        """
        number = self._num_requests & 0x7FFFFFFF
        self._num_requests += 1
        words = seed_words(seed & _SEED_MASK, number)
        self._staged[index] = self.columns.row({**options, "seed": words, "number": number})

    def apply(self) -> None:
        """Write the staged rows; no synchronization."""
        if not self._staged:
            return
        device = self.table.device
        rows = to_device(list(self._staged.values()), torch.int32, device)
        self.table.index_copy_(0, to_device(list(self._staged), torch.int64, device), rows)
        self._staged.clear()

    def of(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of request state indices [N], all valid."""
        return SlotRows(self.table, indices, self.columns)

    def of_padded(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of request state indices [N] of which some are -1 (padding)."""
        return self.of(torch.where(indices < 0, self._padding, indices))

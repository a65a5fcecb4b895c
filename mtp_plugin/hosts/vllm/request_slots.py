"""The slot table of an engine: one row per request state index of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mtp_plugin.ops.sampling import DRAFT_COLUMNS, STEP_COLUMN, VerifiedBy
from mtp_plugin.ops.step import SlotRows, to_device
from mtp_plugin.requests.columns import (
    INT32_MAX,
    REQUEST_COLUMNS,
    Number,
    SlotColumn,
    TableColumns,
)
from mtp_plugin.requests.seeds import seed_words

DRAFT_LIMIT = "draft_limit"
"""Column: most drafts of a step that may be accepted."""
COLUMNS = (
    *REQUEST_COLUMNS,
    *DRAFT_COLUMNS,
    STEP_COLUMN,
    SlotColumn("thinking", int),
    SlotColumn("relaxed_topk", int, 1),
    SlotColumn("relaxed_limit", float),
    SlotColumn(DRAFT_LIMIT, int, INT32_MAX),
)
_SEED_MASK = 2**64 - 1


class RequestSlots:
    """Request options on the device, at a fixed address, as captured graphs need it.

    Row ``max_num_reqs`` belongs to the rows that pad a batch: a greedy request.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.columns = TableColumns(COLUMNS)
        self._padding = max_num_reqs
        empty = to_device([self.columns.row({})], torch.int32, device)
        self.table = empty.repeat(max_num_reqs + 1, 1)
        """[S, W] int32, S = max_num_reqs + 1"""
        self.delta_in_force = torch.zeros(max_num_reqs + 1, dtype=torch.float32, device=device)
        """[S]: the delta of relaxed acceptance that applies, 0 outside the thinking phase."""
        self.verified_by = np.zeros(max_num_reqs, dtype=np.int32)
        """[max_num_reqs] on the host: code of each request's verification method."""
        self.has_draft_limit = np.zeros(max_num_reqs, dtype=bool)
        self._staged: dict[int, list[int]] = {}
        self._staged_deltas: dict[int, float] = {}
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
        delta = options.get("relaxed_limit", 0.0) if options.get("thinking") else 0.0
        self._staged_deltas[index] = delta if isinstance(delta, float) else 0.0
        self.verified_by[index] = options.get("verification", VerifiedBy.COUPLED)
        self.has_draft_limit[index] = DRAFT_LIMIT in options

    def apply(self) -> None:
        """Write the staged rows; no synchronization."""
        if not self._staged:
            return
        device = self.table.device
        rows = to_device(list(self._staged.values()), torch.int32, device)
        indices = to_device(list(self._staged), torch.int64, device)
        self.table.index_copy_(0, indices, rows)
        deltas = to_device(list(self._staged_deltas.values()), torch.float32, device)
        self.delta_in_force.index_copy_(0, indices, deltas)
        self._staged.clear()
        self._staged_deltas.clear()

    def of(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of request state indices [N], all valid."""
        return SlotRows(self.table, indices, self.columns)

    def of_padded(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of request state indices [N] of which some are -1 (padding)."""
        return self.of(torch.where(indices < 0, self._padding, indices))

"""Penalties and minimum lengths of requests, applied to an engine's logits in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logits_processor_state import MOST_COUNTED, WORD_BITS, LogitsProcessorState
from mtp_plugin.ops.penalties import penalize_logits
from mtp_plugin.ops.step import Accepted, SlotRows, to_device
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.speculative.rows.request_slots import RequestSlots


class Penalties:
    """Counts of the output tokens of requests, and the launches that read and update them.

    A request with a penalty has a row in pools that double when all rows are taken; a row takes
    2.125 bytes x V. ``apply``, ``penalize`` and ``count`` run on the stream of the steps.

    Args:
        vocab: V.
    """

    def __init__(self, slots: RequestSlots, vocab: int, backend: Backend) -> None:
        self._slots, self._backend = slots, backend
        self._pools = LogitsProcessorState.empty(1, vocab, slots.table.device)
        self._rows: dict[int, int] = {}
        """Slot -> row."""
        self._free: list[int] = []
        self._unwritten: dict[int, Sequence[int]] = {}
        """Row -> output of its request."""

    def stage(self, index: int, output: Sequence[int], unused: Iterable[int]) -> int:
        """Return the row of the request in a slot, written at the next `apply`.

        Args:
            output: ids of its output so far. unused: slots without a request, whose rows are free.
        """
        row = self._rows.get(index)
        if row is None:
            if not self._free:
                self._free = [self._rows.pop(slot) for slot in unused if slot in self._rows]
            row = self._free.pop() if self._free else len(self._rows)
            self._rows[index] = row
        self._unwritten[row] = output
        return row

    def apply(self) -> None:
        """Write the staged rows; no synchronization."""
        if not self._unwritten:
            return
        while max(self._unwritten) >= len(self._pools.counts):
            self._grow()
        pools, device = self._pools, self._pools.counts.device
        rows = to_device(list(self._unwritten), torch.int64, device)
        pools.counts.index_fill_(0, rows, 0)
        pools.seen.index_fill_(0, rows, 0)
        written = [_counted(row, output) for row, output in self._unwritten.items() if len(output)]
        self._unwritten = {}
        if written:
            counts, seen = (np.concatenate(parts, axis=1) for parts in zip(*written, strict=True))
            for pool, values in ((pools.counts, counts), (pools.seen, seen)):
                row, column, value = to_device(torch.from_numpy(values), torch.int64, device)
                pool.index_put_((row, column), value.to(pool.dtype))

    def _grow(self) -> None:
        pools = self._pools
        counts, seen = (torch.cat([p, torch.zeros_like(p)]) for p in (pools.counts, pools.seen))
        for pool in (pools.counts, pools.seen):
            if pool.is_cuda:  # it may have been made on another stream
                pool.record_stream(torch.cuda.current_stream())
        self._pools = replace(pools, counts=counts, seen=seen)

    def penalize(self, logits: torch.Tensor, rows: LogitRows, indices: torch.Tensor) -> None:
        """Penalize the logits [N, V] float32 of rows in place; see `penalize_logits`.

        Args:
            indices: [R] slots of the requests.
        """
        penalize_logits(logits, rows, self._of(indices), backend=self._backend)

    def count(self, tokens: torch.Tensor, counts: torch.Tensor, indices: torch.Tensor) -> None:
        """Count the first ``counts`` [R] of each request's ``tokens`` [R, K+1] int32 as output.

        Args:
            indices: [R] slots of the requests.
        """
        accepted = Accepted(tokens, counts, counts)
        update_token_history(accepted, self._of(indices), backend=self._backend)

    def _of(self, indices: torch.Tensor) -> SlotRows:
        return replace(self._slots.of(indices), pools=self._pools)


def _counted(row: int, output: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return row, column and value [3, M] of the counts, and of the words of seen ids."""
    ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    words, first = np.unique(ids // WORD_BITS, return_index=True)
    bits = np.bitwise_or.reduceat(np.int64(1) << ids % WORD_BITS, first)
    return (
        np.stack([np.full_like(ids, row), ids, counts.clip(max=MOST_COUNTED)]),
        np.stack([np.full_like(words, row), words, bits]),
    )

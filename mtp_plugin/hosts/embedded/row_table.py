"""The host's inputs of a step: one row per request, all rows in one copy to the device.

A captured step reads the same addresses in every replay, so the rows are kept in one device tensor.
They are copied from two pinned buffers alternately: while the copy from one may still be running,
the next step is written into the other. The other buffer's copy has usually finished, because the
results of its step have been read; after a failed step the table waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID


@dataclass
class Row:
    """One request of a step, or a padding row."""

    tokens: list[int]  # K+1 inputs of a generation: newest token, then drafts
    length: int  # committed tokens before the inputs; of a context: its end
    draft_limit: int = 0  # drafts that may be verified
    capacity: int = 0  # KV rows that the request may use
    is_pending: bool = False  # its last result is only on the device
    seq_slot: int = 0  # its index in the sampler's store
    state_slot: int = 0  # of a generation: its row in slot table and pools of the plugin's manager
    blocks: Sequence[int] = field(default=())
    request_id: int = CUDA_GRAPH_DUMMY_REQUEST_ID


_FIXED = (
    "length",
    "draft_limit",
    "capacity",
    "is_pending",
    "seq_slot",
    "state_slot",
)
_fixed_of: Callable[[Row], tuple[int, ...]] = attrgetter(*_FIXED)


@dataclass(frozen=True)
class UploadedRows:
    """The rows of a step, on the device [N, ...] int32, and on the host."""

    tokens: torch.Tensor  # [N, K+1]
    length: torch.Tensor  # [N]
    draft_limit: torch.Tensor  # [N]
    capacity: torch.Tensor  # [N]
    is_pending: torch.Tensor  # [N] 0 or 1
    seq_slot: torch.Tensor  # [N]
    state_slot: torch.Tensor  # [N]
    block_table: torch.Tensor  # [N, B], padded with the sentinel block
    host: Sequence[Row]  # [N], the same on the host

    def generations(self, num_contexts: int) -> UploadedRows:
        """Return the rows after those of the contexts."""
        return UploadedRows(**{name: value[num_contexts:] for name, value in vars(self).items()})


@dataclass(frozen=True)
class StepShape:
    """The host's decisions about a step: the key of a captured step."""

    chunk_lens: tuple[int, ...]
    """Rows per context; of a captured step their sum is that of every replay, and the lengths of a
    replay are read on the device."""
    num_generations: int  # padding rows included
    draft_len: int  # drafts that are verified and made
    sampling_kind: SamplingKind = SamplingKind.GREEDY  # what the requests need at most

    @property
    def num_contexts(self) -> int:
        """C."""
        return len(self.chunk_lens)

    @property
    def num_ctx_tokens(self) -> int:
        """Rows of all contexts."""
        return sum(self.chunk_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_ctx_tokens + self.num_generations * (self.draft_len + 1)


def copy_event(device: torch.device) -> Any:
    """Record an event after everything queued so far; None where copies are synchronous."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class RowTable:
    """Host and device buffers for the rows of up to ``max_rows`` requests.

    Args:
        max_rows: maximum of N.
        step_rows: K+1.
        table_width: B.
        sentinel_block: fills unused entries of the block table.
        device: device of the steps.
    """

    def __init__(
        self,
        max_rows: int,
        *,
        step_rows: int,
        table_width: int,
        sentinel_block: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.table_width = table_width
        self._step_rows = step_rows
        self._sentinel = sentinel_block
        self._first_block = step_rows + len(_FIXED)
        shape = (max_rows, self._first_block + table_width)
        self._device_rows = torch.zeros(shape, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host_rows = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        for rows in (self._device_rows, *self._host_rows):
            rows[:, self._first_block :] = sentinel_block
        self._host_arrays = [rows.numpy() for rows in self._host_rows]
        self._written_blocks: list[list[Sequence[int]]] = [[()] * max_rows for _ in range(2)]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def upload(self, rows: Sequence[Row]) -> UploadedRows:
        """Start the copy of a step's rows to the device.

        Waits only if the copy of the step before the last one has not finished.

        Raises:
            ExecutorError: more rows or blocks than the table holds.
        """
        self._check(rows)
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        array, block = self._host_arrays[self._turn], self._first_block
        count = len(rows)
        if rows:
            array[:count, :block] = [[*row.tokens, *_fixed_of(row)] for row in rows]
        # unchanged in most steps
        _rewrite(
            array[:, block:],
            self._written_blocks[self._turn],
            [row.blocks for row in rows],
            self._sentinel,
        )
        self._device_rows[:count].copy_(self._host_rows[self._turn][:count], non_blocking=True)
        self._copied[self._turn] = copy_event(self._device_rows.device)
        return self._view(rows)

    def _check(self, rows: Sequence[Row]) -> None:
        if len(rows) > self.max_rows:
            raise ExecutorError(f"step rows: {len(rows)} rows, the table holds {self.max_rows}")
        blocks = max((len(row.blocks) for row in rows), default=0)
        if blocks > self.table_width:
            raise ExecutorError(
                f"step rows: a request of {blocks} blocks, the table holds {self.table_width}"
            )

    def _view(self, rows: Sequence[Row]) -> UploadedRows:
        table = self._device_rows[: len(rows)]
        step, block = self._step_rows, self._first_block
        fixed = {name: table[:, step + i] for i, name in enumerate(_FIXED)}
        return UploadedRows(
            tokens=table[:, :step], block_table=table[:, block:], host=rows, **fixed
        )


def _rewrite(
    columns: Any, written: list[Sequence[int]], rows: Sequence[Sequence[int]], filler: int
) -> None:
    """Overwrite only the block ids that differ from those written last."""
    for index, ids in enumerate(rows):
        before = written[index]
        if before == ids:
            continue
        columns[index, : len(ids)] = ids
        columns[index, len(ids) : len(before)] = filler
        written[index] = ids[:]

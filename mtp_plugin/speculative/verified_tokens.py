"""Output tokens of a step, copied to the host while the step still drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.ops.step import Accepted
from mtp_plugin.speculative.result_store import host_copy, recorded_event


@dataclass(frozen=True)
class HostTokens:
    """Output tokens of a step in pinned memory, valid after ``event``."""

    rows: torch.Tensor  # [R, k+3] int32, as those of `VerifiedTokens`
    log_probs: torch.Tensor | None  # [R, k+1, ENTRY_WIDTH] int32; None: not requested
    event: Any

    def at(self, indices: Sequence[int]) -> list[tuple[list[int], list[int], int]]:
        """Return output tokens, no drafts, and status of these requests of the batch."""
        width = self.rows.shape[1] - 2
        index = torch.tensor(indices, dtype=torch.int64)
        rows: list[list[int]] = self.rows.index_select(0, index).tolist()
        return [(row[: max(min(row[-2], width), 0)], [], row[-1]) for row in rows]


@dataclass(frozen=True)
class VerifiedTokens:
    """Output tokens of a step on the device, and an event recorded before the step drafts.

    The event is external: recorded during a capture, it becomes a node of the graph, and every
    replay records it again.
    """

    rows: torch.Tensor  # [>= R, k+3] int32: tokens, their number, status
    logprob_entries: torch.Tensor | None  # [>= R, k+1, ENTRY_WIDTH] int32; None: not computed
    event: Any

    @classmethod
    def record(
        cls,
        accepted: Accepted,
        logprob_entries: torch.Tensor | None,
        order: torch.Tensor | None = None,
    ) -> Self:
        """Collect the tokens of a step and record the event.

        Args:
            order: [R] int64, rows of the step in the order of the batch; None: they are in order.
        """
        counts, status = accepted.num_accepted.unsqueeze(1), accepted.status.unsqueeze(1)
        rows = torch.cat([accepted.tokens, counts, status], dim=1)
        if order is not None:
            rows = rows[order]
            logprob_entries = None if logprob_entries is None else logprob_entries[order]
        return cls(rows, logprob_entries, recorded_event(rows.device, external=True))

    def to_host(self, stream: Any, num_requests: int, *, with_logprobs: bool) -> HostTokens:
        """Start the copy of the first requests to the host on ``stream``, after the event.

        The current stream waits for the copy, so that the tensors may be freed or written again.

        Args:
            stream: a stream other than the current one; None on the CPU.
        """
        if stream is None:
            return self._copied(num_requests, with_logprobs)
        stream.wait_event(self.event)
        with torch.cuda.stream(stream):
            copied = self._copied(num_requests, with_logprobs)
        torch.cuda.current_stream(self.rows.device).wait_event(copied.event)
        return copied

    def _copied(self, num_requests: int, with_logprobs: bool) -> HostTokens:
        entries = self.logprob_entries if with_logprobs else None
        return HostTokens(
            host_copy(self.rows[:num_requests]),
            None if entries is None else host_copy(entries[:num_requests]),
            recorded_event(self.rows.device),
        )

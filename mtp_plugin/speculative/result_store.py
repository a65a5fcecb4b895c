"""Storage for the results of a step: a row per sequence slot, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from mtp_plugin.errors import ExecutorError
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_OK


@dataclass
class SampleStateTensorsMTP:
    """One step's tensors, indexed by sequence slot.

    ``new_tokens`` [K+1, S, 1] int32 are the next inputs on the device and the output tokens on the
    host.
    """

    new_tokens: torch.Tensor
    new_tokens_lens: torch.Tensor | None = None  # [S] int32
    next_draft_tokens: torch.Tensor | None = None  # [S, K] int32
    status: torch.Tensor | None = None  # [S] int32
    log_probs: torch.Tensor | None = None
    """[R, k+1, ENTRY_WIDTH] int32 on the host, see `requests.logprobs`: a row per request of the
    batch; None: no request wants log-probabilities."""
    logits: torch.Tensor | None = None
    """TensorRT-LLM's name; always None."""

    def values(self) -> ValuesView[torch.Tensor | None]:
        """Return every field; older executors iterate over them."""
        return vars(self).values()


class ResultStore:
    """Views of one tensor with a row per sequence slot, so that one copy moves all of them.

    Args:
        rows: [S, 3K+4] int32.
        draft_len: K.
    """

    def __init__(self, rows: torch.Tensor, draft_len: int) -> None:
        self.rows = rows
        emitted, following, drafts, lens, status = rows.split(
            [draft_len + 1, draft_len + 1, draft_len, 1, 1], dim=1
        )
        self.new_tokens = emitted.T.unsqueeze(-1)  # [K+1, S, 1], output tokens
        self.next_new_tokens = following.T.unsqueeze(-1)  # [K+1, S, 1], next inputs
        self.next_draft_tokens = drafts  # [S, K]
        self.new_tokens_lens = lens.squeeze(1)  # [S]
        self.status = status.squeeze(1)  # [S]

    @classmethod
    def zeros(cls, num_slots: int, draft_len: int, device: torch.device) -> ResultStore:
        """Allocate a store of zeros."""
        shape = (num_slots, 3 * draft_len + 4)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device), draft_len)

    @classmethod
    def gathered(cls, host: SampleStateTensorsMTP) -> ResultStore:
        """Build a store from the tensors of a host engine's own state; K is that of its drafts.

        Raises:
            ExecutorError: a tensor is missing.
            TensorContractError: a tensor that is not integer or has another shape.
        """
        lens, drafts = host.new_tokens_lens, host.next_draft_tokens
        if lens is None or drafts is None:
            raise ExecutorError("update_requests: the sample state holds no lengths or no drafts")
        for name, value, shape in (
            ("new_tokens", host.new_tokens, ("k+1", "S", 1)),
            ("new_tokens_lens", lens, ("S",)),
            ("next_draft_tokens", drafts, ("S", "K")),
            ("status", lens if host.status is None else host.status, ("S",)),
        ):
            expect_tensor(f"sample state, {name}", value, dtype=INTEGERS, shape=shape)
        draft_len = int(drafts.shape[1])
        emitted = host.new_tokens.squeeze(-1).T  # a step with fewer drafts has fewer columns
        emitted = pad(emitted, (0, draft_len + 1 - emitted.shape[1]), value=PAD_TOKEN)
        status = torch.full_like(lens, STATUS_OK) if host.status is None else host.status
        columns = [emitted, emitted, drafts, lens.unsqueeze(1), status.unsqueeze(1)]
        return cls(torch.cat(columns, dim=1), draft_len)

    @property
    def draft_len(self) -> int:
        """K."""
        return int(self.next_draft_tokens.shape[1])

    def emitted(self) -> SampleStateTensorsMTP:
        """Return the views that hosts read after a step."""
        return SampleStateTensorsMTP(
            self.new_tokens, self.new_tokens_lens, self.next_draft_tokens, self.status
        )

    def following(self) -> SampleStateTensorsMTP:
        """Return the views that the next step reads."""
        return SampleStateTensorsMTP(
            self.next_new_tokens, self.new_tokens_lens, self.next_draft_tokens, self.status
        )

    def is_shown_by(self, host: SampleStateTensorsMTP) -> bool:
        """Whether ``host`` holds the tensors of :meth:`emitted`, none of them replaced."""
        return (
            host.new_tokens is self.new_tokens
            and host.new_tokens_lens is self.new_tokens_lens
            and host.next_draft_tokens is self.next_draft_tokens
            and host.status is self.status
        )

    def to_host(self) -> ResultStore:
        """Start a copy to the host; wait for it with `recorded_event`."""
        return ResultStore(host_copy(self.rows), self.draft_len)

    def at(self, slots: Sequence[int], draft_len: int) -> list[tuple[list[int], list[int], int]]:
        """Return output tokens, next drafts and status of each slot, read on the host.

        Args:
            draft_len: number of drafts of the step, at most K.
        """
        width = self.draft_len + 1
        first, last = 2 * width, 2 * width + min(draft_len, width - 1)
        index = torch.tensor(slots, dtype=torch.int64)
        rows: list[list[int]] = self.rows.index_select(0, index).tolist()
        return [(row[: max(min(row[-2], width), 0)], row[first:last], row[-1]) for row in rows]


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy of ``tensor`` to the host; wait for it with `recorded_event`."""
    if tensor.device.type != "cuda":
        return tensor.clone()  # the next step may overwrite the tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


class _HostEvent:
    """Replaces a device event where the results are on the host already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def recorded_event(device: torch.device, *, external: bool = False) -> Any:
    """Record an event on the current stream of ``device``; the caller synchronizes with it.

    Args:
        external: in a graph, the event is a node that streams outside the graph can wait for.
    """
    if device.type != "cuda":
        return _HostEvent()
    event = torch.cuda.Event(external=external)
    event.record()
    return event

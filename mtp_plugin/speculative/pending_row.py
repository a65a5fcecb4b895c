"""A request of a step whose result has not arrived yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import Self

from mtp_plugin.errors import ExecutorError
from mtp_plugin.requests.states import RequestState
from mtp_plugin.speculative.host import (
    RequestFacts,
    SpecRequest,
    ends_prompt,
    epoch_of,
    facts_of,
    num_drafted_of,
    phase_of,
    slot_of,
)

BEAM = 0
"""Index of the only beam: speculation has no beam search."""


class PendingRow(NamedTuple):
    """State of a request when its step was launched; later changes make the result late."""

    request: SpecRequest
    facts: RequestFacts
    epoch: int
    seq_slot: int | None  # None: freed, the result is late
    is_context: bool
    num_drafted: int
    emits: bool | None  # False: a chunk that does not end the prompt; None: decided at update
    refused: str | None = None  # reason for which the request gets none of the step's tokens

    @classmethod
    def of(cls, request: SpecRequest, *, is_context: bool, max_seq_len: int) -> Self:
        """Capture the current state of a request.

        Args:
            max_seq_len: maximum number of tokens of any request.
        """
        return cls(
            request,
            facts_of(request, max_seq_len, reads_prompt=is_context),
            epoch_of(request),
            slot_of(request),
            is_context,
            num_drafted=0 if is_context else num_drafted_of(request),
            emits=ends_prompt(request) if is_context else True,
        )

    @property
    def is_late(self) -> bool:
        """The request has finished, was cancelled or preempted, or the row ended no prompt."""
        request = self.request
        if epoch_of(request) != self.epoch:
            return True
        if not self.is_context and request.state is RequestState.GENERATION_IN_PROGRESS:
            return False  # the common case; phase_of is slower
        phase = phase_of(request)
        if phase == RequestState.GENERATION_COMPLETE.name:
            return True
        if self.is_context:
            # paused since: the prompt is computed again
            return self.emits is False or request.context_remaining_length != 0
        return phase == RequestState.CONTEXT_INIT.name


def slots_of(rows: Sequence[PendingRow]) -> list[int]:
    """Return the sequence slots of these rows.

    Raises:
        ExecutorError: a row without a slot.
    """
    slots = [row.seq_slot for row in rows if row.seq_slot is not None]
    if len(slots) < len(rows):
        missing = [row.request.request_id for row in rows if row.seq_slot is None]
        raise ExecutorError(f"no sequence slot: requests {', '.join(map(str, missing))}")
    return slots

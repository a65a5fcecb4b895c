"""The door of what follows from emitted tokens for the steps behind.

R requests of a step, K drafts each.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.emitted import reference
from mtp_plugin.speculative.step import Accepted, SlotRows, check_slots


def note_emitted(accepted: Accepted, slots: SlotRows, *, backend: Backend) -> None:
    """Move on, in place, what is kept of each request's text by what it emitted.

    ``recent``: its last tokens; of a request with a ``count_row`` the tokens that it has seen, and
    how often, up to 65535. What was rejected leaves no trace.

    Args:
        accepted: [R, K+1] tokens. slots: of the requests, of which no two that count share a row.

    Raises:
        TensorContractError: a table or slots of another shape, type or device.
    """
    requests = int(accepted.num_accepted.shape[0])
    check_slots(slots, requests, accepted.tokens.device)
    if requests and slots.pools is not None:
        _side(backend).note_emitted(accepted, slots)


class _Side(Protocol):
    def note_emitted(self, accepted: Accepted, slots: SlotRows) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.emitted import launch

    return launch

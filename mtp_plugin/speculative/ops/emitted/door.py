"""The door of what follows from emitted tokens for the steps behind.

R requests of a step, K drafts each.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.emitted import reference
from mtp_plugin.speculative.step import Accepted, SlotRows, check_slots


def note_emitted(
    accepted: Accepted,
    slots: SlotRows,
    positions: torch.Tensor | None = None,
    *,
    backend: Backend,
) -> None:
    """Move on, in place, what is kept of each request's text by what it emitted.

    ``recent``: its last tokens; of a request with a ``count_row`` the tokens that it has seen, and
    how often, up to 65535. What was rejected leaves no trace.

    With ``positions`` drafts follow: where slots have ``bans``, ids that must not come behind the
    emitted tokens are taken out of those that the first draft may be.

    Where slots have no pools, nobody asks, and nothing is written.

    Args:
        accepted: tokens [R, K+1] in rows without gaps, and how many of each row count.
        slots: of the requests, of which no two that count share a row.
        positions: [R] integer, any stride: of the token in front of each run.

    Raises:
        TensorContractError: tokens, a table, slots or pools of another shape, type or device.
    """
    tokens, num_accepted = accepted.tokens, accepted.num_accepted
    if not (
        tokens.dim() == 2
        and tokens.dtype == torch.int32
        and (tokens.shape[1] == 1 or tokens.stride(1) == 1)
    ):
        raise TensorContractError(
            "accepted tokens: expected torch.int32 [R, K+1] with rows without gaps, got "
            f"{tokens.dtype} {list(tokens.shape)} with strides {list(tokens.stride())}"
        )
    requests = int(tokens.shape[0])
    expect_integers("num_accepted", num_accepted, requests, tokens.device)
    check_slots(slots, requests, tokens.device)
    if slots.pools is None:
        return
    slots.pools.check(tokens.device)
    rows = None
    if positions is not None and slots.bans is not None:
        slots.bans.check(slots.pools)
        rows = DrawnRows(0, 1, positions, num_accepted)
        rows.check(tokens.device)
    if requests:
        _side(backend).note_emitted(accepted, slots, rows)


class _Side(Protocol):
    def note_emitted(self, accepted: Accepted, slots: SlotRows, rows: DrawnRows | None) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.emitted import launch

    return launch

"""The door of what happens to target logits before acceptance.

N rows of logits, V words; R requests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.step import SlotRows, check_slots


def banned_masked(
    logits: torch.Tensor, rows: DrawnRows, slots: SlotRows, *, backend: Backend
) -> AbstractContextManager[torch.Tensor]:
    """The logits without the ids that must not come next, for as long as it is open.

    A request of 3 prompt tokens and at least 2 more may not draw a stop id as token 3 or 4, so its
    stop ids are -inf in the rows that draw those. One with the bad word ``a b c`` may not draw
    ``c`` behind ``a b``, wherever these stand: in prompt, output or drafts in front of the row. Of
    a request with allowed ids the stop ids stay where nothing else is left.

    Args:
        logits: [N, V] floating, any strides. Inside, nobody else may use them: they may be masked
            in place. Outside they hold what they held, also when the body raises.
        slots: of the requests; read are ``prompt_len``, ``min_tokens``, ``stop_ids``,
            ``words_row``, ``allowed_row`` and ``recent``.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    if logits.dim() != 2 or logits.shape[0] != rows.num_rows or not logits.is_floating_point():
        raise TensorContractError(
            f"logits: expected floating [{rows.num_rows}, V], {rows.num_contexts} context rows and "
            f"{rows.width} rows for each of {rows.num_requests - rows.num_contexts} generations, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    rows.check(logits.device)
    if rows.ahead is not None or rows.column:
        raise TensorContractError("drawn rows: expected those of the target, got drafts'")
    check_slots(slots, rows.num_requests, logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1])
    if logits.shape[0] == 0:
        return nullcontext(logits)
    return _side(backend).banned_masked(logits, rows, slots)


class _Side(Protocol):
    def banned_masked(
        self, logits: torch.Tensor, rows: DrawnRows, slots: SlotRows
    ) -> AbstractContextManager[torch.Tensor]: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.logits import launch

    return launch

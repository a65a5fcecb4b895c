"""The door of what happens to target logits before acceptance.

R requests of a step, C contexts first, then G generations of K+1 rows; V words.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.step import SlotRows, StepLayout, check_slots


def early_stops_masked(
    layout: StepLayout,
    logits: torch.Tensor,
    slots: SlotRows,
    *,
    backend: Backend,
) -> AbstractContextManager[torch.Tensor]:
    """The logits without the stop ids that would come too early, for as long as it is open.

    A request of 3 prompt tokens and at least 2 more may not draw a stop id as token 3 or 4, so its
    stop ids are -inf in the rows that draw those.

    Args:
        layout: with positions.
        logits: [C + G*(K+1), V] floating, any strides. Inside, nobody else may use them: they may
            be masked in place. Outside they hold what they held, also when the body raises.
        slots: of the requests; read are ``prompt_len``, ``min_tokens`` and ``stop_ids``.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device, or a layout without
            positions.
    """
    if (
        logits.dim() != 2
        or logits.shape[0] != layout.num_logit_rows
        or not logits.is_floating_point()
    ):
        raise TensorContractError(
            f"logits: expected floating [{layout.num_logit_rows}, V], {layout.num_contexts} "
            f"context rows and K+1 = {layout.step_rows} rows for each of "
            f"{layout.num_generations} generations, got {logits.dtype} {list(logits.shape)}"
        )
    check_slots(slots, layout.num_requests, logits.device)
    positions = layout.expect_positions("min_tokens")
    for name, tensor in (("positions", positions), ("context_lens", layout.context_lens)):
        if tensor.device != logits.device:
            raise TensorContractError(
                f"step, {name}: expected a tensor on {logits.device}, got one on {tensor.device}"
            )
    if logits.shape[0] == 0:
        return nullcontext(logits)
    return _side(backend).early_stops_masked(layout, logits, slots)


class _Side(Protocol):
    def early_stops_masked(
        self,
        layout: StepLayout,
        logits: torch.Tensor,
        slots: SlotRows,
    ) -> AbstractContextManager[torch.Tensor]: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.logits import launch

    return launch

"""The door of what happens to target logits before acceptance.

R requests of a step, C contexts first, then G generations of K+1 rows; V words, P stop ids each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import is_integral
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.step import RowParameters, StepLayout


def early_stops_masked(
    layout: StepLayout,
    logits: torch.Tensor,
    parameters: RowParameters,
    *,
    backend: Backend,
) -> AbstractContextManager[torch.Tensor]:
    """The logits without the stop ids that would come too early, for as long as it is open.

    A request of 3 prompt tokens and at least 2 more may not draw a stop id as token 3 or 4, so its
    stop ids are -inf in the rows that draw those.

    Args:
        layout: with positions, where the parameters have a ``min_tokens_end``.
        logits: [C + G*(K+1), V] floating, any strides. Inside, nobody else may use them: they may
            be masked in place. Outside they hold what they held, also when the body raises.
        parameters: stop ids [>= R, P] and the first index at which one may stand [>= R], integers
            of any strides.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device, or a layout without the
            positions that ``min_tokens_end`` needs.
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
    stop_ids, min_tokens_end = parameters.stop_ids, parameters.min_tokens_end
    _check_rows("stop_ids", stop_ids, 2, layout, logits.device)
    if min_tokens_end is None:
        return nullcontext(logits)
    _check_rows("min_tokens_end", min_tokens_end, 1, layout, logits.device)
    positions = layout.expect_positions("min_tokens_end")
    for name, tensor in (("positions", positions), ("context_lens", layout.context_lens)):
        if tensor.device != logits.device:
            raise TensorContractError(
                f"step, {name}: expected a tensor on {logits.device}, got one on {tensor.device}"
            )
    if logits.shape[0] == 0 or stop_ids.shape[1] == 0:
        return nullcontext(logits)
    return _side(backend).early_stops_masked(layout, logits, stop_ids, min_tokens_end, positions)


class _Side(Protocol):
    def early_stops_masked(
        self,
        layout: StepLayout,
        logits: torch.Tensor,
        stop_ids: torch.Tensor,
        min_tokens_end: torch.Tensor,
        positions: torch.Tensor,
    ) -> AbstractContextManager[torch.Tensor]: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.logits import launch

    return launch


def _check_rows(
    name: str, tensor: torch.Tensor, dims: int, layout: StepLayout, device: torch.device
) -> None:
    """Check integers for each request."""
    requests = layout.num_requests
    if not (
        tensor.dim() == dims
        and tensor.shape[0] >= requests
        and is_integral(tensor)
        and tensor.device == device
    ):
        raise TensorContractError(
            f"{name}: expected integers of at least {requests} rows and {dims} dimensions on "
            f"{device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )

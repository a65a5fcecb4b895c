"""The door of the result store.

S sequence slots, R requests of a step, K drafts that the store holds, k of this step.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.speculative.ops.sampler_store import reference


def store_results(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
    *,
    backend: Backend,
) -> None:
    """Write the results of a step's requests into their rows of the store; no other row changes.

    A row holds the K+1 emitted tokens, the K+1 next inputs, the K next drafts, how many tokens were
    emitted, and the status. What a step with fewer drafts left out is padding, of next inputs a
    valid id; drafts beyond K are dropped, so that no later step verifies, and emits, more than a
    row holds.

    Args:
        store: [S, 3K+4] int32, written.
        slots: [R] int64, all different, 0..S-1: the row of each request.
        new_tokens, next_new_tokens: [>= R, k+1] integers, any strides; further rows are padding
            and are left alone, here and below.
        next_draft_tokens: [>= R, k].
        new_tokens_lens: [>= R].
        status: [>= R]; None: every request is well.

    Raises:
        TensorContractError: tensors of other shapes, dtypes or devices.
    """
    results = (new_tokens, next_new_tokens, next_draft_tokens, new_tokens_lens, status)
    max_draft_len = _check(store, slots, *results)
    if slots.shape[0] > 0:
        _side(backend).store_results(store, slots, *results, max_draft_len=max_draft_len)


class _Side(Protocol):
    def store_results(
        self,
        store: torch.Tensor,
        slots: torch.Tensor,
        new_tokens: torch.Tensor,
        next_new_tokens: torch.Tensor,
        next_draft_tokens: torch.Tensor,
        new_tokens_lens: torch.Tensor,
        status: torch.Tensor | None,
        *,
        max_draft_len: int,
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.sampler_store import launch

    return launch


def _check(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
) -> int:
    """Check one call and return K."""
    columns = store.shape[1] if store.dim() == 2 else 0
    draft_len, rest = divmod(columns - 4, 3)
    if columns < 4 or rest or store.dtype != torch.int32 or store.stride(1) != 1:
        raise TensorContractError(
            f"store: expected int32 [S, 3K+4] with contiguous rows, got {store.dtype} "
            f"{list(store.shape)} with strides {list(store.stride())}"
        )
    device = store.device
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != device:
        raise TensorContractError(
            f"slots: expected int64 [R] on {device}, got {slots.dtype} {list(slots.shape)} on "
            f"{slots.device}"
        )
    count = slots.shape[0]
    width = next_draft_tokens.shape[1] if next_draft_tokens.dim() == 2 else -1
    _check_rows("next_draft_tokens", next_draft_tokens, count, width, device)
    _check_rows("new_tokens", new_tokens, count, width + 1, device)
    _check_rows("next_new_tokens", next_new_tokens, count, width + 1, device)
    expect_integers("new_tokens_lens", new_tokens_lens, count, device, at_least=True)
    if status is not None:
        expect_integers("status", status, count, device, at_least=True)
    return draft_len


def _check_rows(
    name: str, tensor: torch.Tensor, count: int, width: int, device: torch.device
) -> None:
    shape = tensor.shape
    if not (
        len(shape) == 2
        and shape[0] >= count
        and shape[1] == width
        and is_integral(tensor)
        and tensor.device == device
    ):
        raise TensorContractError(
            f"{name}: expected integers [>= {count}, {max(width, 0)}] on {device}, got "
            f"{tensor.dtype} {list(shape)} on {tensor.device}"
        )

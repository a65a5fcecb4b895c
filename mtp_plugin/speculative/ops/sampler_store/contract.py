"""The checks at the door of the result store.

S sequence slots, R requests of a step, K drafts that the store holds, k of this step.
"""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect


def check_results(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
) -> tuple[int, int]:
    """Check one call and return (K, drafts of the step that find room).

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    columns = store.shape[1] if store.dim() == 2 else 0
    draft_len, rest = divmod(columns - 4, 3)
    expect(
        columns >= 4 and rest == 0 and store.dtype == torch.int32 and store.stride(1) == 1,
        TensorContractError,
        f"store: expected int32 [S, 3K+4] with contiguous rows, got {store.dtype} "
        f"{list(store.shape)} with strides {list(store.stride())}",
    )
    expect(
        slots.dim() == 1 and slots.dtype == torch.int64 and slots.device == store.device,
        TensorContractError,
        f"slots: expected int64 [R] on {store.device}, got {slots.dtype} {list(slots.shape)} on "
        f"{slots.device}",
    )
    count = slots.shape[0]
    width = next_draft_tokens.shape[1] if next_draft_tokens.dim() == 2 else -1
    for name, tensor, wide in (
        ("next_draft_tokens", next_draft_tokens, width),
        ("new_tokens", new_tokens, width + 1),
        ("next_new_tokens", next_new_tokens, width + 1),
        ("new_tokens_lens", new_tokens_lens, None),
        ("status", status, None),
    ):
        if tensor is None:
            continue
        told = "[>= R]" if wide is None else f"[>= R, {wide}]"
        fits = tuple(tensor.shape[1:]) == (() if wide is None else (wide,)) and tensor.dim() > 0
        integral = not tensor.is_floating_point() and tensor.dtype != torch.bool
        expect(
            width >= 0
            and fits
            and tensor.shape[0] >= count
            and integral
            and tensor.device == store.device,
            TensorContractError,
            f"{name}: expected integers {told} on {store.device} with R = {count}, got "
            f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
        )
    return draft_len, min(width, draft_len)

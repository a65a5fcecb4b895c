"""Write a step's results into the sampler's store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.step import NO_INPUT, PAD_TOKEN, STATUS_OK


@dataclass(frozen=True)
class ResultTensors:
    """Results of R requests, all integer of any strides; further rows are padding and not read."""

    new_tokens: torch.Tensor  # [>= R, k+1]
    next_new_tokens: torch.Tensor  # [>= R, k+1]
    next_draft_tokens: torch.Tensor  # [>= R, k]
    new_tokens_lens: torch.Tensor  # [>= R]
    status: torch.Tensor | None  # [>= R]; None: STATUS_OK for all


def store_results(
    store: torch.Tensor, slots: torch.Tensor, results: ResultTensors, *, backend: Backend
) -> None:
    """Write the results of a step's requests into their rows of the store, in place.

    A row holds the K+1 output tokens, the K+1 next inputs, the K next drafts, the number of output
    tokens, and the status. If the step drafted fewer tokens than K, the rest is filled: next inputs
    with a valid token id, the others with padding. Drafts beyond K are dropped, so that a later
    step cannot verify, and return, more tokens than a row holds.

    Args:
        store: [S, 3K+4] int32 with contiguous rows, S sequence slots.
        slots: [R] int64, all different, 0..S-1: the row of each request.
        results: of at least R requests.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    max_draft_len = _check(store, slots, results)
    if slots.shape[0] > 0:
        backend.dispatch(store_results_reference)(store, slots, results, max_draft_len)


def store_results_reference(
    store: torch.Tensor, slots: torch.Tensor, results: ResultTensors, max_draft_len: int
) -> None:
    status = results.status
    if status is None:
        status = torch.full_like(results.new_tokens_lens, STATUS_OK)
    columns = (
        _resized(results.new_tokens, max_draft_len + 1, PAD_TOKEN),
        _resized(results.next_new_tokens, max_draft_len + 1, NO_INPUT),
        _resized(results.next_draft_tokens, max_draft_len, PAD_TOKEN),
        results.new_tokens_lens.unsqueeze(1),
        status.unsqueeze(1),
    )
    count = slots.shape[0]
    rows = torch.cat([column[:count].to(torch.int32) for column in columns], dim=1)
    store.index_copy_(0, slots, rows)


def _resized(rows: torch.Tensor, width: int, filling: int) -> torch.Tensor:
    return functional.pad(rows, (0, width - rows.shape[1]), value=filling)


def _check(store: torch.Tensor, slots: torch.Tensor, results: ResultTensors) -> int:
    """Return K."""
    expect_tensor("store", store, dtype=torch.int32, shape=("S", "3K+4"), contiguous="rows")
    max_draft_len, rest = divmod(store.shape[1] - 4, 3)
    if max_draft_len < 0 or rest:
        raise TensorContractError(f"store: expected [S, 3K+4], got {list(store.shape)}")
    device = store.device
    expect_tensor("slots", slots, dtype=torch.int64, shape=("R",), device=device)
    count = AtLeast(slots.shape[0])
    drafts = expect_tensor(
        "next_draft_tokens",
        results.next_draft_tokens,
        dtype=INTEGERS,
        shape=(count, "k"),
        device=device,
    )
    for name, shape in (
        ("new_tokens", (count, drafts.shape[1] + 1)),
        ("next_new_tokens", (count, drafts.shape[1] + 1)),
        ("new_tokens_lens", (count,)),
        ("status", (count,)),
    ):
        value = vars(results)[name]
        if name != "status" or value is not None:
            expect_tensor(name, value, dtype=INTEGERS, shape=shape, device=device)
    return max_draft_len

"""The door of the inputs of generations.

G generations of a step, K drafts of each, S sequence slots of the sampler's store.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.row_table import StepRows
from mtp_plugin.executor.step_inputs import reference
from mtp_plugin.executor.step_inputs.contract import GenerationInputs, LastResults
from mtp_plugin.kernels.backend import Backend


def generation_inputs(
    rows: StepRows,
    previous: LastResults | None,
    *,
    draft_len: int,
    max_seq_len: int,
    backend: Backend,
) -> GenerationInputs:
    """From the host where it is up to date, else from the step before.

    A request whose last result is only in the store emitted ``n`` tokens that the host has not
    seen: it is ``n`` tokens longer, and its inputs are those that the store holds. Drafts that find
    no room in the request's KV rows are absent.

    Args:
        rows: of the generations; columns of one table.
        previous: the sampler's store; None: the host knows everything.
        draft_len: K.
        max_seq_len: tokens that a sequence may hold.

    Raises:
        TensorContractError: rows that are not columns of one table, or rows or a store too narrow.
    """
    _check(rows, previous, draft_len)
    return _side(backend).generation_inputs(
        rows, previous, draft_len=draft_len, max_seq_len=max_seq_len
    )


class _Side(Protocol):
    def generation_inputs(
        self, rows: StepRows, previous: LastResults | None, *, draft_len: int, max_seq_len: int
    ) -> GenerationInputs: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.executor.step_inputs import launch

    return launch


def _check(rows: StepRows, previous: LastResults | None, draft_len: int) -> None:
    width = draft_len + 1
    stride, between = rows.tokens.stride()
    columns = (
        rows.length,
        rows.draft_limit,
        rows.capacity,
        rows.is_pending,
        rows.seq_slot,
        rows.state_slot,
    )
    if (
        rows.tokens.shape[1] < width
        or between != 1
        or any(column.stride(0) != stride for column in columns)
    ):
        raise TensorContractError(
            f"step rows: expected columns of one table with at least {width} tokens, got "
            f"{list(rows.tokens.shape)} tokens with strides {[stride, between]} and columns with "
            f"strides {[column.stride(0) for column in columns]}"
        )
    for name, column in (("tokens", rows.tokens), ("length", rows.length)):
        if column.dtype != torch.int32:
            raise TensorContractError(
                f"step rows, {name}: expected torch.int32, got {column.dtype}"
            )
    if previous is None:
        return
    for name, tensor in (
        ("new_tokens", previous.new_tokens),
        ("new_tokens_lens", previous.new_tokens_lens),
    ):
        if tensor.dtype != torch.int32 or tensor.device != rows.tokens.device:
            raise TensorContractError(
                f"{name}: expected torch.int32 on {rows.tokens.device}, got {tensor.dtype} on "
                f"{tensor.device}"
            )
    shape = previous.new_tokens.shape
    if len(shape) != 3 or shape[0] < width or shape[2] != 1:
        raise TensorContractError(f"new_tokens: expected [>= {width}, S, 1], got {list(shape)}")
    if previous.new_tokens_lens.shape != shape[1:2]:
        raise TensorContractError(
            f"new_tokens_lens: expected [{shape[1]}], got {list(previous.new_tokens_lens.shape)}"
        )

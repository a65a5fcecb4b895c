"""Mask the tokens of target logits that must not come next."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, expect_tensor
from mtp_plugin.ops.logit_rows import LogitRows, disallowed_tokens
from mtp_plugin.ops.step import SlotRows, check_slots


def mask_disallowed_tokens(
    logits: torch.Tensor, rows: LogitRows, slots: SlotRows, *, backend: Backend | str = "auto"
) -> AbstractContextManager[torch.Tensor]:
    """Context manager: the logits with -inf for every token that must not come next.

    Masked are the stop ids in rows that sample a token before index ``prompt_len + min_tokens``,
    and the last token of each bad word whose other tokens precede the row, in the prompt, the
    output or the row's earlier drafts. If that masks all allowed ids of a request, its stop ids
    are not masked.

    Args:
        logits: [N, V] floating, any strides. They may be masked in place and must not be used
            otherwise inside the context; on exit, exceptions included, they have their old values.
        rows: of the target, whose draft tokens precede later rows.
        slots: of the requests; reads ``prompt_len``, ``min_tokens``, ``stop_ids``, ``words_row``,
            ``allowed_row`` and ``recent``.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device, or rows of drafts.
    """
    rows.check(expect_tensor("logits", logits, dtype=FLOATS).device)
    expect_tensor("logits", logits, shape=(rows.num_rows, "V"))
    if rows.ahead is not None or rows.column:
        raise TensorContractError("rows: expected those of the target, got rows of drafts")
    check_slots(slots, rows.num_requests, logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1])
    if logits.shape[0] == 0:
        return nullcontext(logits)
    backend = Backend.of(backend, logits.device, "backend")
    return backend.dispatch(mask_disallowed_tokens_reference)(logits, rows, slots)


def mask_disallowed_tokens_reference(
    logits: torch.Tensor, rows: LogitRows, slots: SlotRows
) -> AbstractContextManager[torch.Tensor]:
    ids = torch.cat(disallowed_tokens(rows, slots), dim=1)
    vocab = logits.shape[1]
    is_there = (ids >= 0) & (ids < vocab)
    ceiling = torch.where(is_there, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum does not change entries of padded ids, whatever id they were clamped to
    return nullcontext(
        logits.scatter_reduce(1, ids.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True)
    )

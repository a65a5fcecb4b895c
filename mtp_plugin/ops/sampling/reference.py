"""Processing of target logits before acceptance, in plain torch."""

from __future__ import annotations

import torch

from mtp_plugin.batch import RowParameters
from mtp_plugin.errors import TensorContractError, expect


def mask_early_stops(
    logits: torch.Tensor,
    parameters: RowParameters,
    row_requests: torch.Tensor,
    token_index: torch.Tensor,
) -> torch.Tensor:
    """Give stop ids -inf in every row that draws a token too early for its request.

    Args:
        logits: [rows, V] floating; left unchanged.
        parameters: per-request stop ids and the first index at which one may stand.
        row_requests: [rows] int64, the request (batch row) of each logits row.
        token_index: [rows] integer, absolute index of the token that the row draws.

    Returns:
        A copy of ``logits`` with the masked entries.

    Raises:
        TensorContractError: rows of different length.
    """
    rows, vocab = logits.shape
    for name, tensor in (("row_requests", row_requests), ("token_index", token_index)):
        expect(
            tuple(tensor.shape) == (rows,),
            TensorContractError,
            f"{name}: expected shape [{rows}], got {list(tensor.shape)}",
        )
    if parameters.min_stop_index is None:
        return logits
    early = token_index.to(torch.int64) < parameters.min_stop_index.to(torch.int64)[row_requests]
    stop_ids = parameters.stop_ids.to(torch.int64)[row_requests]  # [rows, P]
    masked = early.unsqueeze(1) & (stop_ids >= 0) & (stop_ids < vocab)
    ceiling = torch.where(masked, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum leaves entries of padded ids alone, whatever id they were clamped to
    return logits.scatter_reduce(
        1, stop_ids.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True
    )

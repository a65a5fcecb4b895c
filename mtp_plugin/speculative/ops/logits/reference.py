"""Processing of target logits before acceptance, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.speculative.ops.logits.contract import LogitRows, check_step
from mtp_plugin.speculative.step import RowParameters


@contextmanager
def early_stops_masked(
    logits: torch.Tensor, parameters: RowParameters, step: LogitRows
) -> Iterator[torch.Tensor]:
    """The logits without the stop ids that would come too early, for as long as it is open.

    A request of 3 prompt tokens and at least 2 more may not draw a stop id as token 3 or 4, so its
    stop ids are -inf in the rows that draw those.

    Args:
        logits: [C + G*(K+1), V] floating, any row stride. Inside, nobody else may use them: they
            may be masked in place. Outside they hold what they held, also when the body raises.
        parameters: stop ids [>= R, P] and the first index at which one may stand [>= R].
        step: the layout of the rows.

    Raises:
        TensorContractError: a shape that does not fit.
    """
    check_step(logits, parameters, step)
    if parameters.min_tokens_end is None:
        yield logits
        return
    yield mask_early_stops(logits, parameters, *drawn_tokens(logits.shape[0], step))


def drawn_tokens(rows: int, step: LogitRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The request that each row of logits belongs to and the absolute index of the token that it
    draws, both [rows] int64."""
    positions, contexts, width = step.positions.to(torch.int64), step.num_contexts, step.width
    generations = (rows - contexts) // width
    last_rows = step.context_lens.to(torch.int64).cumsum(0) - 1
    offsets = torch.arange(width, device=positions.device)
    first = positions[step.num_ctx_tokens :: width][:generations]
    generation_index = first.unsqueeze(1) + 1 + offsets
    token_index = torch.cat([positions[last_rows] + 1, generation_index.reshape(-1)])
    requests = torch.arange(contexts + generations, device=positions.device)
    owners = [requests[:contexts], requests[contexts:].repeat_interleave(width)]
    return torch.cat(owners), token_index


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
    if parameters.min_tokens_end is None:
        return logits
    early = token_index.to(torch.int64) < parameters.min_tokens_end.to(torch.int64)[row_requests]
    stop_ids = parameters.stop_ids.to(torch.int64)[row_requests]  # [rows, P]
    masked = early.unsqueeze(1) & (stop_ids >= 0) & (stop_ids < vocab)
    ceiling = torch.where(masked, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum leaves entries of padded ids alone, whatever id they were clamped to
    return logits.scatter_reduce(
        1, stop_ids.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True
    )

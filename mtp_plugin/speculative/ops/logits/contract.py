"""Where a step's logits stand in its texts, and the checks at the door of their processing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.speculative.step import RowParameters


@dataclass(frozen=True)
class LogitRows:
    """The layout of a step: one row of logits per context, then K+1 per generation."""

    positions: torch.Tensor  # [T]: a generation's first is its true one, later ones may be clamped
    context_lens: torch.Tensor  # [C]
    num_contexts: int
    num_ctx_tokens: int
    max_draft_len: int

    @property
    def width(self) -> int:
        """Rows of a generation: K+1."""
        return self.max_draft_len + 1


def check_step(logits: torch.Tensor, parameters: RowParameters, step: LogitRows) -> None:
    """Check that logits, parameters and layout speak of the same batch.

    Raises:
        TensorContractError: naming the tensor, the expected shape and the one that came.
    """
    expect(
        logits.dim() == 2 and logits.is_floating_point(),
        TensorContractError,
        f"logits: expected a floating [rows, V] tensor, got {logits.dtype} {list(logits.shape)}",
    )
    generation_rows = logits.shape[0] - step.num_contexts
    expect(
        generation_rows >= 0 and generation_rows % step.width == 0,
        TensorContractError,
        f"logits: expected {step.num_contexts} context rows and K+1 = {step.width} rows per "
        f"generation, got {logits.shape[0]} rows",
    )
    for name, vector, size in (
        ("positions", step.positions, step.num_ctx_tokens + generation_rows),
        ("context_lens", step.context_lens, step.num_contexts),
    ):
        expect(
            tuple(vector.shape) == (size,),
            TensorContractError,
            f"{name}: expected shape [{size}], got {list(vector.shape)}",
        )
    requests = step.num_contexts + generation_rows // step.width
    first = parameters.min_tokens_end
    for name, tensor, dims in (("stop_ids", parameters.stop_ids, 2), ("min_tokens_end", first, 1)):
        expect(
            tensor is None or (tensor.dim() == dims and tensor.shape[0] >= requests),
            TensorContractError,
            f"{name}: expected at least {requests} rows of {dims} dimensions, got "
            f"{None if tensor is None else list(tensor.shape)}",
        )

"""What acceptance takes and gives, and the checks at its door."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.kernels.checks import expect_output
from mtp_plugin.speculative.step import Accepted


@dataclass(frozen=True)
class RelaxedRule:
    """Per-request state and parameters of relaxed acceptance, one row per request of the batch."""

    thinking: torch.Tensor  # [R] bool: in the thinking phase before this step
    topk: torch.Tensor  # [R] int32, >= 1
    delta: torch.Tensor  # [R] float32, >= 0: allowed distance to the highest probability
    stop_ids: torch.Tensor | None  # [R, P] int32, padded with -1: accepted only as top-1
    begin_token: int  # -1 where the vocabulary has none
    end_token: int


@dataclass(frozen=True)
class RelaxedAccepted:
    """What relaxed acceptance gives besides the emitted tokens."""

    accepted: Accepted
    thinking: torch.Tensor  # [R] bool: the phase after this step's emitted tokens
    margin: (
        torch.Tensor
    )  # [G, K] float32: |p(draft) - (p_max - delta)|, inf where no threshold decided

    @classmethod
    def unwritten(
        cls,
        num_contexts: int,
        num_generations: int,
        max_draft_len: int,
        device: torch.device | str,
    ) -> RelaxedAccepted:
        """Tensors to write to, for a batch of C + G requests and K = ``max_draft_len``."""
        requests = num_contexts + num_generations
        return cls(
            accepted=Accepted.unwritten(requests, max_draft_len, device),
            thinking=torch.empty(requests, dtype=torch.bool, device=device),
            margin=torch.empty(num_generations, max_draft_len, dtype=torch.float32, device=device),
        )

    def check(
        self, num_contexts: int, num_generations: int, max_draft_len: int, device: torch.device
    ) -> None:
        """Check that these tensors take the result of such a batch.

        Raises:
            TensorContractError: naming the tensor, what was expected and what came.
        """
        requests = num_contexts + num_generations
        self.accepted.check(requests, max_draft_len, device)
        expect_output("accepted, thinking", self.thinking, (requests,), torch.bool, device)
        shape = (num_generations, max_draft_len)
        expect_output("accepted, margin", self.margin, shape, torch.float32, device)

    def fill(self, result: RelaxedAccepted) -> RelaxedAccepted:
        """Copy ``result`` into these tensors, and give them."""
        self.accepted.fill(result.accepted)
        self.thinking.copy_(result.thinking)
        self.margin.copy_(result.margin)
        return self


def check_rows(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_contexts: int,
    max_draft_len: int,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    forced_matches: torch.Tensor | None = None,
) -> int:
    """Check the shapes of one acceptance call and return G.

    Raises:
        TensorContractError: naming the tensor, the expected shape and the one that came.
    """
    expect(
        logits.dim() == 2 and logits.is_floating_point(),
        TensorContractError,
        f"logits: expected a floating [rows, V] tensor, got {logits.dtype} {list(logits.shape)}",
    )
    rows = logits.shape[0]
    generation_rows = rows - num_contexts
    expect(
        num_contexts >= 0 and generation_rows >= 0 and generation_rows % (max_draft_len + 1) == 0,
        TensorContractError,
        f"logits: expected {num_contexts} context rows and K+1 = {max_draft_len + 1} rows per "
        f"generation, got {rows} rows",
    )
    num_generations = generation_rows // (max_draft_len + 1)
    expect(
        draft_tokens.numel() == num_generations * max_draft_len,
        TensorContractError,
        f"draft_tokens: expected G*K = {num_generations * max_draft_len} ids, got "
        f"{draft_tokens.numel()}",
    )
    for name, tensor, size in (
        ("draft_lens", draft_lens, num_generations),
        ("final_context", final_context, num_contexts),
        ("forced_matches", forced_matches, num_generations),
    ):
        expect(
            tensor is None or tuple(tensor.shape) == (size,),
            TensorContractError,
            f"{name}: expected shape [{size}], got "
            f"{None if tensor is None else list(tensor.shape)}",
        )
    return num_generations

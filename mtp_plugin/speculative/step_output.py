"""Results of a step: of a worker on the device, and of a request on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtp_plugin.requests.logprobs import VALUE_INDEX, Logprobs
from mtp_plugin.requests.states import FinishReason


@dataclass(frozen=True)
class StepOutput:
    """A worker's result; ``as_dict`` gives the mapping that TensorRT-LLM's executor expects."""

    logits: torch.Tensor  # as given to the worker: the target's raw logits
    new_tokens: torch.Tensor  # [R, K+1] int32
    new_tokens_lens: torch.Tensor  # [R] int32
    next_draft_tokens: torch.Tensor  # [R, K] int32
    next_new_tokens: torch.Tensor  # [R, K+1] int32: last accepted token, then the drafts
    status: torch.Tensor  # [R] int32
    logprob_entries: torch.Tensor | None = None
    """[R, K+1, ENTRY_WIDTH] int32, see `requests.logprobs`; None: not computed in this step."""

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Return the result under TensorRT-LLM's keys and ``status``; if log-probabilities were
        computed, also ``log_probs`` [R, K+1] float32 and ``logprob_entries``."""
        logprobs: dict[str, torch.Tensor] = {}
        if self.logprob_entries is not None:
            values = self.logprob_entries[..., VALUE_INDEX].view(torch.float32)
            logprobs = {"log_probs": values, "logprob_entries": self.logprob_entries}
        return logprobs | {
            "logits": self.logits,
            "new_tokens": self.new_tokens,
            "new_tokens_lens": self.new_tokens_lens,
            "next_draft_tokens": self.next_draft_tokens,
            "next_new_tokens": self.next_new_tokens,
            "status": self.status,
        }


class StepResult(NamedTuple):
    """Result of one step for one request, returned to the host."""

    request_id: int
    token_ids: list[int]  # output tokens, without those after a stop
    num_drafted: int  # verified drafts that leave room for a token after them
    num_accepted: int  # accepted tokens, including those after a stop
    finish_reason: FinishReason | None  # None: the request continues
    logprobs: Logprobs | None = None  # of the tokens, if requested

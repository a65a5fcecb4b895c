"""Drafters from outside the package: their interface, and the worker that calls one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import PluginError, TensorContractError
from mtp_plugin.ops.checks import SIGNED
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_OK, Accepted
from mtp_plugin.speculative.drafting.forward_inputs import ForwardInputs
from mtp_plugin.speculative.drafting.worker import SpecWorker
from mtp_plugin.speculative.verification import call_custom, record_failure
from mtp_plugin.verifications import next_code

_logger = logging.getLogger(__name__)


class CustomDrafter(ABC):
    """A drafter from outside the package, which reads the tokens of requests alone."""

    @abstractmethod
    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        """Return K drafts for each request.

        Called once per step with all requests, also those whose drafts are not verified: prompts
        that go on in a later step, padding, requests without speculation. It may be captured in a
        CUDA graph: torch ops and kernels only, no host synchronization, no Python branch on a
        device value. It must not change its arguments.

        Whatever it returns, the output of requests is that of decoding without drafts. If it
        raises, or returns something else than described, the requests of the step end with an
        error.

        Args:
            tokens: [R, W] int32, prompt and output of each request; what follows its length is
                undefined, but an id of the vocabulary.
            lengths: [R] int64, in 1..W.
            k: K of this step, at least 1.

        Returns:
            [R, K] signed integer, the tokens that may follow. -1, or any other id outside of the
            vocabulary, is no draft; those after it in the row are ignored.
        """


def propose_drafts(
    name: str,
    drafter: CustomDrafter,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    vocab_size: int,
) -> torch.Tensor:
    """Call ``propose`` of a drafter and check its result; return it as [R, K] int32.

    Absent drafts are -1, and so are those outside of the vocabulary. The arguments are those of
    `CustomDrafter.propose`.

    Raises:
        PluginError, TensorContractError: as `call_custom`.
    """
    drafts = call_custom(
        f"drafter {name!r}",
        "propose",
        drafter.propose,
        (tokens, lengths, k),
        dtype=SIGNED,
        shape=(tokens.shape[0], k),
    )
    is_token = (drafts >= 0) & (drafts < vocab_size)
    return torch.where(is_token, drafts, PAD_TOKEN).to(torch.int32)


class CustomDraftWorker(SpecWorker):
    """Verifies drafts, appends the new tokens to the manager's ``tokens``, and calls a drafter.

    Args:
        name: of the drafter, for messages.
    """

    def __init__(self, name: str, drafter: CustomDrafter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name, self.drafter = name, drafter
        self._code = next_code()  # status of requests that end with the drafter's error
        self._has_failed = False

    @override
    def _draft(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        manager, slots = step.host.expect_manager()
        lengths = _append(step, accepted, manager.tokens, slots)
        if step.layout.draft_len == 0:
            return
        tokens = manager.tokens[:, :-1][slots]
        k, vocab_size = step.layout.draft_len, step.logits.shape[1]
        try:
            drafts.copy_(propose_drafts(self.name, self.drafter, tokens, lengths, k, vocab_size))
        except (PluginError, TensorContractError) as error:
            if drafts.is_cuda and torch.cuda.is_current_stream_capturing():
                raise  # the capture itself may have failed
            if not self._has_failed:
                _logger.exception("drafter %r failed; its requests end with an error", self.name)
            self._has_failed = True
            record_failure(self._code, str(error))
            accepted.status.masked_fill_(accepted.status == STATUS_OK, self._code)
            drafts.fill_(PAD_TOKEN)
        next_tokens[:, 1:] = drafts


def _append(
    step: ForwardInputs, accepted: Accepted, tokens: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Write prompt and accepted tokens at their positions; return the lengths [R] int64.

    Args:
        tokens: [S, W + 1] int32; the last column takes the writes of absent tokens.
    """
    layout, positions, input_ids = step.layout, step.positions.long(), step.rows.input_ids
    num_contexts, num_rows, last = layout.num_contexts, layout.num_ctx_tokens, tokens.shape[1] - 1
    chunk_lens = layout.context_lens.long()
    owners = torch.repeat_interleave(slots[:num_contexts], chunk_lens, output_size=num_rows)
    tokens[owners, positions[:num_rows]] = input_ids[:num_rows].to(torch.int32)
    # the position after a prompt chunk, and after the first input token of a generation
    ends = positions[chunk_lens.cumsum(0) - 1] + 1
    first = torch.cat([ends, positions[num_rows :: layout.step_rows] + 1])
    columns = torch.arange(layout.step_rows, device=first.device)
    index = (first.unsqueeze(1) + columns).clamp_max(last)
    index = index.masked_fill(accepted.tokens < 0, last)
    tokens[slots.unsqueeze(1), index] = accepted.tokens.clamp_min(0)
    return (first + accepted.num_accepted).clamp_max(last)

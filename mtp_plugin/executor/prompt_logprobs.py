"""Log-probabilities of prompts: states of their chunks through the head, a tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import Self

from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.logprobs import LogprobEntries, PromptLogprobs
from mtp_plugin.speculative.ops.logprobs import logprobs
from mtp_plugin.speculative.result_store import host_copy, recorded_event
from mtp_plugin.speculative.step import StepLayout, to_device

TILE_ROWS = 256
"""Rows whose logits exist at a time."""


class _Share(NamedTuple):
    """What a request gets of the scored rows."""

    told: PromptLogprobs
    num_top: int
    num_rows: int


@dataclass(frozen=True)
class ScoredPrompts:
    """The prompt tokens that a step scores, each under the row before it.

    A chunk's last row scores the first token of the next one. What was told before a preemption is
    not told again, and tokens that were emitted are no prompt's.
    """

    shares: Sequence[_Share]
    rows: torch.Tensor  # [N] int64, of the step's flat rows
    tokens: torch.Tensor  # [N] int32

    @classmethod
    def of(cls, contexts: Sequence[LlmRequest], device: torch.device) -> Self | None:
        """Those of the scheduled chunks; None: nobody asks."""
        shares: list[_Share] = []
        rows: list[int] = []
        tokens: list[int] = []
        first_row = 0
        for request in contexts:
            told, num_top = request.prompt_logprobs, request.params.prompt_logprobs
            start = request.context_current_position
            end = start + request.context_chunk_size
            if told is not None and num_top is not None:
                scored = request.get_tokens()[len(told) : min(end + 1, request.py_orig_prompt_len)]
                if scored:
                    place = first_row + len(told) - 1 - start
                    rows += range(place, place + len(scored))
                    tokens += scored
                    shares.append(_Share(told, num_top, len(scored)))
            first_row += end - start
        if not shares:
            return None
        both = to_device([rows, tokens], torch.int32, device)
        return cls(shares, both[0].to(torch.int64), both[1])

    def tell(
        self,
        hidden_states: torch.Tensor,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        *,
        backend: Backend,
    ) -> None:
        """Score the tokens, and append what is told to their requests; nobody waits for it.

        Args:
            hidden_states: [T, H] of the step. lm_head: [N, H] -> logits [N, V].
        """
        most = max(share.num_top for share in self.shares)
        tiles = zip(self.rows.split(TILE_ROWS), self.tokens.split(TILE_ROWS), strict=True)
        entries = [
            _entries(lm_head(hidden_states[rows]), tokens, most, backend) for rows, tokens in tiles
        ]
        parts = torch.cat(entries).split([share.num_rows for share in self.shares])
        # each request's own, which it keeps for as long as it likes
        copies = [host_copy(part) for part in parts]
        ready = recorded_event(self.rows.device)
        for share, copy in zip(self.shares, copies, strict=True):
            share.told.append(LogprobEntries(copy, share.num_top, ready))


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, backend: Backend
) -> torch.Tensor:
    """[N, ENTRY_WIDTH] int32 of rows that have a token each."""
    count = tokens.shape[0]
    ones = torch.ones(count, dtype=torch.int32, device=tokens.device)
    layout = StepLayout((), count, 0, ones[:0])
    told = logprobs(layout, logits, tokens.unsqueeze(1), ones, num_top, backend=backend)
    return told.entries.squeeze(1)

"""Computes log-probabilities of prompt tokens from hidden states, in tiles of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Self

from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logprobs import compute_logprobs
from mtp_plugin.ops.step import StepLayout, to_device
from mtp_plugin.requests.logprobs import HostLogprobs, PromptLogprobs
from mtp_plugin.speculative.result_store import host_copy, recorded_event

TILE_ROWS = 256
"""Maximum number of rows whose logits exist at a time."""


@dataclass(frozen=True)
class ScoredPrompts:
    """The prompt tokens that a step scores, each with the logits of the row before it.

    A chunk's last row scores the first token of the next one. Tokens that were scored before a
    preemption are not scored again, and generated tokens are not part of the prompt.
    """

    targets: Sequence[tuple[PromptLogprobs, int, int]]  # per request: result, top-k, rows
    rows: torch.Tensor  # [N] int64, of the step's flat rows
    tokens: torch.Tensor  # [N] int32

    @classmethod
    def of(cls, contexts: Sequence[LlmRequest], device: torch.device) -> Self | None:
        """Return the tokens of the scheduled chunks; None: no request needs log-probabilities."""
        targets: list[tuple[PromptLogprobs, int, int]] = []
        rows: list[int] = []
        tokens: list[int] = []
        first_row = 0
        for request in contexts:
            known, num_top = request.prompt_logprobs, request.params.prompt_logprobs
            start = request.context_current_position
            end = start + request.context_chunk_size
            if known is not None and num_top is not None:
                scored = request.get_tokens()[len(known) : min(end + 1, request.py_orig_prompt_len)]
                if scored:
                    scored_by = first_row + len(known) - 1 - start
                    rows += range(scored_by, scored_by + len(scored))
                    tokens += scored
                    targets.append((known, num_top, len(scored)))
            first_row += end - start
        if not targets:
            return None
        both = to_device([rows, tokens], torch.int32, device)
        return cls(targets, both[0].to(torch.int64), both[1])

    def score(
        self,
        hidden_states: torch.Tensor,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        *,
        backend: Backend,
    ) -> None:
        """Score the tokens and append the results to their requests, without waiting for them.

        Args:
            hidden_states: [T, H] of the step.
            lm_head: [N, H] -> logits [N, V].
        """
        most = max(num_top for _, num_top, _ in self.targets)
        tiles = zip(self.rows.split(TILE_ROWS), self.tokens.split(TILE_ROWS), strict=True)
        entries = [
            _entries(lm_head(hidden_states[rows]), tokens, most, backend) for rows, tokens in tiles
        ]
        parts = torch.cat(entries).split([num_rows for _, _, num_rows in self.targets])
        # a separate copy per request, which may keep it
        copies = [host_copy(part) for part in parts]
        ready = recorded_event(self.rows.device)
        for (known, num_top, _), copy in zip(self.targets, copies, strict=True):
            known.append(HostLogprobs(copy, num_top, ready))


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, backend: Backend
) -> torch.Tensor:
    """[N, ENTRY_WIDTH] int32, one token per row."""
    count = tokens.shape[0]
    ones = torch.ones(count, dtype=torch.int32, device=tokens.device)
    layout = StepLayout((), count, 0, ones[:0])
    scored = compute_logprobs(layout, logits, tokens.unsqueeze(1), ones, num_top, backend=backend)
    return scored.entries.squeeze(1)

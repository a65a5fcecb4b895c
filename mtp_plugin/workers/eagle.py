"""MTP-Eagle: one draft layer, reused for every draft."""

from __future__ import annotations

from typing import Any

import torch

from mtp_plugin.batch import Accepted, DraftInputs
from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.metadata import draft_loop
from mtp_plugin.ops.draft_inputs import concatenate
from mtp_plugin.workers.base import SpecWorker, Step


class MTPEagleWorker(SpecWorker):
    """Drafts with one layer K times, each pass reading its own last state and draft.

    Story, K = 3: the target read ``t u v w`` and emitted ``u v x`` (n = 3). Pass 1 reads tokens
    ``u v x x`` with the target's states of ``t u v w``; its row of ``x`` proposes ``y``. Pass 2
    reads ``y`` with pass 1's state at that row, one position on, and proposes ``z``; pass 3 reads
    ``z``. Rows written from guessed states are rewritten by the next step's first pass.
    """

    def _draft(self, step: Step, accepted: Accepted) -> torch.Tensor:
        layers = step.mtp_layers
        expect(
            layers is not None and len(layers) >= 1,
            ConfigError,
            "eagle MTP drafts with one layer, got none",
        )
        num_contexts, num_seqs = step.num_contexts, step.num_seqs
        context_ends = step.context_lens.to(torch.int64).cumsum(0) - 1
        inputs = self._first_inputs(step, accepted)
        last_rows = self._last_rows(step, accepted, context_ends)
        drafts: list[torch.Tensor] = []
        with draft_loop(step.attn_metadata) as loop:
            outputs = self._run_layer(
                layers[0], step, inputs.input_ids, inputs.position_ids, inputs.hidden_states
            )
            states = outputs[last_rows]
            positions = inputs.position_ids[last_rows]
            for draft_pass in range(self.max_draft_len):
                if draft_pass == 1:
                    loop.feed_single_rows(
                        accepted.num_accepted,
                        self.max_draft_len,
                        self._real_contexts(step, num_contexts),
                    )
                elif draft_pass > 1:
                    loop.advance()
                if draft_pass > 0:
                    positions = self._clamp(positions + 1, step)
                    states = self._run_layer(
                        layers[0], step, drafts[-1], positions, states, single_rows=True
                    )
                logits = layers[0].shared_head(states, step.lm_head, step.attn_metadata, True)
                drafts.append(self.draft_sampler(logits))
        return torch.stack(drafts, dim=1)[:num_seqs]

    def prepare_drafter_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        last_tokens_idx: torch.Tensor,
        hidden_states: torch.Tensor,
        accepted_tokens: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,  # noqa: ARG002 - TensorRT-LLM's signature
    ) -> dict[str, Any]:
        """TensorRT-LLM's inputs of pass 1: shifted prompts, all accepted columns of generations.

        Args:
            last_tokens_idx: [R] last flat row of each sequence (read for contexts).
            accepted_tokens: [R, K+1], negative behind the run.
        """
        num_contexts = attn_metadata.num_contexts
        ends = last_tokens_idx[:num_contexts].to(torch.int64)
        lens = torch.diff(ends, prepend=ends.new_full((1,), -1)) if num_contexts else ends
        inputs = self._rows(
            input_ids.reshape(-1),
            position_ids.reshape(-1),
            hidden_states,
            lens,
            accepted_tokens[:num_contexts, 0],
            accepted_tokens[num_contexts:],
            attn_metadata.num_ctx_tokens,
        )
        # positions come back as they came, [T] or [1, T]
        like = (*position_ids.shape[:-1], -1)
        return {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids.to(position_ids.dtype).view(like),
            "hidden_states": inputs.hidden_states,
            "attn_metadata": attn_metadata,
        }

    def _first_inputs(self, step: Step, accepted: Accepted) -> DraftInputs:
        return self._rows(
            step.input_ids,
            step.positions,
            step.hidden_states,
            step.context_lens,
            self._context_successors(step, accepted),
            accepted.tokens[step.num_contexts :],
            step.num_ctx_tokens,
        )

    def _rows(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        context_lens: torch.Tensor,
        context_successors: torch.Tensor,
        accepted_tokens: torch.Tensor,
        num_ctx_tokens: int,
    ) -> DraftInputs:
        parts: list[DraftInputs] = []
        if num_ctx_tokens > 0:
            contexts = slice(0, num_ctx_tokens)
            parts.append(
                self.ops.context_rows(
                    input_ids[contexts],
                    positions[contexts],
                    hidden_states[contexts],
                    context_lens,
                    context_successors,
                )
            )
        if accepted_tokens.shape[0] > 0:
            generations = slice(num_ctx_tokens, None)
            parts.append(
                self.ops.accepted_rows(
                    accepted_tokens, positions[generations], hidden_states[generations]
                )
            )
        return parts[0] if len(parts) == 1 else concatenate(*parts)

    def _last_rows(
        self, step: Step, accepted: Accepted, context_ends: torch.Tensor
    ) -> torch.Tensor:
        """The flat row of each request's last accepted token [R] int64."""
        num_contexts, width = step.num_contexts, self.max_draft_len + 1
        counts = accepted.num_accepted[num_contexts:].to(torch.int64).clamp_min(1)
        generation = torch.arange(step.num_seqs - num_contexts, device=counts.device)
        return torch.cat([context_ends, step.num_ctx_tokens + generation * width + counts - 1])

    @staticmethod
    def _real_contexts(step: Step, num_contexts: int) -> torch.Tensor | None:
        next_prompt = getattr(step.spec_metadata, "next_prompt_tokens", None)
        return None if next_prompt is None else next_prompt[:num_contexts] < 0

    @staticmethod
    def _clamp(positions: torch.Tensor, step: Step) -> torch.Tensor:
        highest = getattr(step.spec_metadata, "max_position", None)
        return positions if highest is None else positions.clamp_max(highest)

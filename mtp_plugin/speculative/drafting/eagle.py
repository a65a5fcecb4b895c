"""MTP-Eagle: one draft layer, reused for every draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.speculative.drafting.attention_loop import draft_loop, kv_floor
from mtp_plugin.speculative.drafting.worker import SpecWorker, Step
from mtp_plugin.speculative.ops.draft_inputs import concatenate
from mtp_plugin.speculative.step import Accepted, DraftColumn, DraftInputs, FirstPass


class MTPEagleWorker(SpecWorker):
    """Drafts with one layer K times, each pass reading its own last state and draft.

    Story, K = 3: the target read ``t u v w`` and emitted ``u v x`` (n = 3). Pass 1 reads tokens
    ``u v x x`` with the target's states of ``t u v w``; its row of ``x`` proposes ``y``. Pass 2
    reads ``y`` with pass 1's state at that row, one position on, and proposes ``z``; pass 3 reads
    ``z``. Rows written from guessed states are rewritten by the next step's first pass.
    """

    def _draft(
        self, step: Step, accepted: Accepted, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        layers = step.mtp_layers
        expect(
            layers is not None and len(layers) >= 1,
            ConfigError,
            "eagle MTP drafts with one layer, got none",
        )
        layer = layers[0]
        max_position = getattr(step.spec_metadata, "max_position", None)
        first: FirstPass = self.ops.eagle_first_pass(
            step.input_ids,
            step.positions,
            step.hidden_states,
            accepted.tokens,
            accepted.num_accepted,
            self._context_successors(step, next_tokens[:, 0]),
            step.context_lens,
            num_contexts=step.num_contexts,
            num_ctx_tokens=step.num_ctx_tokens,
            max_position=max_position,
            kv_lens=getattr(step.attn_metadata, "kv_lens_cuda", None),
            kv_floor=kv_floor(step.attn_metadata, 1),
        )
        positions = first.next_positions
        if positions is None:
            raise MetadataError("eagle: the first pass gave no positions for the second")
        with draft_loop(step.attn_metadata) as loop:
            # a step without drafts reads no state, and still brings the layer's KV up to date
            proposing = first.last_rows if self.max_draft_len else first.last_rows[:0]
            states = self._run_layer(
                layer, step, first.ids, first.positions, first.states, output_rows=proposing
            )
            for column in range(self.max_draft_len):
                if column == 1:
                    loop.feed_single_rows(
                        accepted.num_accepted,
                        self.max_draft_len,
                        self._real_contexts(step),
                        first.kv_lens,
                    )
                elif column > 1:
                    loop.advance(moved=True)
                if column > 0:
                    states = self._run_layer(
                        layer, step, drafts[:, column - 1], positions, states, single_rows=True
                    )
                logits = layer.shared_head(states, step.lm_head, step.attn_metadata, True)
                place = DraftColumn(drafts, next_tokens, column)
                if 0 < column < self.max_draft_len - 1:
                    # the next pass is one row further
                    place = replace(
                        place,
                        positions=positions,
                        kv_lens=loop.kv_lens,
                        max_position=max_position,
                    )
                self._propose(logits, place)

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
            accepted_tokens[:num_contexts, 0].clamp_min(0),  # a run without a token has none
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

    @staticmethod
    def _real_contexts(step: Step) -> torch.Tensor | None:
        """[C] bool: contexts whose prompt ends; None where all do."""
        next_prompt = getattr(step.spec_metadata, "next_prompt_tokens", None)
        if next_prompt is None or step.num_contexts == 0:
            return None
        real: torch.Tensor = next_prompt[: step.num_contexts] < 0
        return real

"""Vanilla MTP: one draft layer per depth."""

from __future__ import annotations

from typing import Any

import torch

from mtp_plugin.batch import Accepted, DraftInputs
from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.metadata import draft_loop
from mtp_plugin.ops.draft_inputs import concatenate
from mtp_plugin.workers.base import SpecWorker, Step


class MTPWorker(SpecWorker):
    """Drafts with K layers, the d-th proposing the token d+1 places on.

    Story, K = 3 and ``chain: output``: prompt ``p q r s``, emitted ``t``. Depth 1 reads tokens
    ``q r s t`` with the target's states of ``p q r s`` and proposes ``u``; depth 2 reads ``r s t
    u`` with depth 1's four outputs and proposes ``v``; depth 3 reads ``s t u v`` and proposes
    ``w``. The target then reads ``t u v w``. A generation feeds the K+1 pairs that end at its last
    accepted position, so every draft-KV row is rewritten from verified inputs before it counts.
    """

    def _draft(self, step: Step, accepted: Accepted) -> torch.Tensor:
        layers = step.mtp_layers
        expect(
            layers is not None and len(layers) >= self.max_draft_len,
            ConfigError,
            f"vanilla MTP drafts K = {self.max_draft_len} tokens with one layer each, got "
            f"{0 if layers is None else len(layers)} layers",
        )
        inputs, history_lens = self._first_inputs(step, accepted)
        # the window above was read from the history before this step advances it
        self.update_mtp_hidden_states(
            step.input_ids,
            step.hidden_states,
            accepted.num_accepted,
            step.spec_metadata,
            step.attn_metadata,
        )
        with draft_loop(step.attn_metadata) as loop:
            loop.feed_window(
                accepted.num_accepted, self.max_draft_len + 1, self._window, history_lens
            )
            return self._run_depths(step, inputs)

    def prepare_drafter_inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        accepted_tokens: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        spec_metadata: Any,
        attn_metadata: Any,
    ) -> dict[str, Any]:
        """TensorRT-LLM's inputs of depth 1: shifted prompts, K rows per generation from the pools.

        Call it after ``update_mtp_hidden_states``: the pools then end before the bonus token.
        """
        manager = self._manager(spec_metadata)
        k = self.max_draft_len
        num_contexts, num_seqs = attn_metadata.num_contexts, attn_metadata.num_seqs
        num_ctx_tokens = attn_metadata.num_ctx_tokens
        positions = position_ids.reshape(-1)
        num_accepted = num_accepted_tokens.to(torch.int64)
        last = accepted_tokens.gather(1, (num_accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        parts: list[DraftInputs] = []
        if num_contexts > 0:
            parts.append(
                self.ops.context_rows(
                    input_ids.reshape(-1)[:num_ctx_tokens],
                    positions[:num_ctx_tokens],
                    hidden_states[:num_ctx_tokens],
                    attn_metadata.seq_lens_cuda[:num_contexts],
                    last[:num_contexts],
                )
            )
        if num_seqs > num_contexts:
            slots = spec_metadata.slot_ids[num_contexts:num_seqs]
            first_position = positions[num_ctx_tokens :: k + 1] + num_accepted[num_contexts:] - k
            parts.append(
                self.ops.generation_window(
                    manager.mtp_past_tokens_pool[slots],
                    manager.mtp_past_hidden_states_pool[slots],
                    torch.zeros_like(slots),
                    last[num_contexts:],
                    first_position,
                    k,
                )
            )
        inputs = parts[0] if len(parts) == 1 else concatenate(*parts)
        # positions come back as they came, [T] or [1, T]
        like = (*position_ids.shape[:-1], -1)
        return {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids.to(position_ids.dtype).view(like),
            "hidden_states": inputs.hidden_states,
            "attn_metadata": attn_metadata,
        }

    @property
    def _window(self) -> int:
        return self.max_draft_len + (1 if self.draft_window == "exact" else 0)

    def _first_inputs(self, step: Step, accepted: Accepted) -> tuple[DraftInputs, list[int] | None]:
        """The rows of depth 1, and how many history rows stand before each context's chunk."""
        parts: list[DraftInputs] = []
        history_lens = None
        if step.num_contexts > 0:
            rows, history_lens = self._context_inputs(step, accepted)
            parts.append(rows)
        if step.num_seqs > step.num_contexts:
            parts.append(self._generation_inputs(step, accepted))
        return (parts[0] if len(parts) == 1 else concatenate(*parts)), history_lens

    def _context_inputs(
        self, step: Step, accepted: Accepted
    ) -> tuple[DraftInputs, list[int] | None]:
        num_contexts, num_rows = step.num_contexts, step.num_ctx_tokens
        rows: DraftInputs = self.ops.context_rows(
            step.input_ids[:num_rows],
            step.positions[:num_rows],
            step.hidden_states[:num_rows],
            step.context_lens,
            self._context_successors(step, accepted),
        )
        history_lens = self._history_lens(step)
        if history_lens is None or not any(history_lens):
            return rows, None
        manager = self._manager(step.spec_metadata)
        slots = step.spec_metadata.slot_ids[:num_contexts]
        with_history: DraftInputs = self.ops.context_rows_with_history(
            rows,
            step.input_ids[:num_rows],
            manager.mtp_past_tokens_pool[slots],
            manager.mtp_past_hidden_states_pool[slots],
            step.attn_metadata._seq_lens[:num_contexts].tolist(),
            history_lens,
        )
        return with_history, history_lens

    def _history_lens(self, step: Step) -> list[int] | None:
        """History rows per context: K, cut at the prompt's start; None for hosts without
        look-ahead."""
        if getattr(step.spec_metadata, "next_prompt_tokens", None) is None:
            return None
        cached = step.attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        return [min(self.max_draft_len, count) for count in cached[: step.num_contexts]]

    def _generation_inputs(self, step: Step, accepted: Accepted) -> DraftInputs:
        manager = self._manager(step.spec_metadata)
        num_contexts, first_row = step.num_contexts, step.num_ctx_tokens
        k, window = self.max_draft_len, self._window
        num_generations = step.num_seqs - num_contexts
        slots = step.spec_metadata.slot_ids[num_contexts : step.num_seqs]
        past_tokens = manager.mtp_past_tokens_pool[slots]
        past_states = manager.mtp_past_hidden_states_pool[slots]
        step_tokens = step.input_ids[first_row:].view(num_generations, k + 1)
        step_states = step.hidden_states[first_row:].view(num_generations, k + 1, -1)
        num_accepted = accepted.num_accepted[num_contexts:].to(torch.int64)
        inputs: DraftInputs = self.ops.generation_window(
            torch.cat([past_tokens, step_tokens.to(past_tokens.dtype)], dim=1),
            torch.cat([past_states, step_states.to(past_states.dtype)], dim=1),
            (num_accepted + k - window).clamp_min(0),
            accepted.last_tokens()[num_contexts:],
            step.positions[first_row :: k + 1] + num_accepted - window,
            window,
        )
        return inputs

    def _run_depths(self, step: Step, inputs: DraftInputs) -> torch.Tensor:
        num_seqs = step.num_seqs
        last_rows = step.attn_metadata.seq_lens_cuda[:num_seqs].to(torch.int64).cumsum(0) - 1
        ids, states = inputs.input_ids, inputs.hidden_states
        drafts: list[torch.Tensor] = []
        for depth in range(self.max_draft_len):
            layer = step.mtp_layers[depth]
            outputs = self._run_layer(layer, step, ids, inputs.position_ids, states)
            logits = layer.shared_head(outputs, step.lm_head, step.attn_metadata)
            drafts.append(self.draft_sampler(logits))
            if depth + 1 == self.max_draft_len:
                break
            ids = self.ops.shift_ids(ids, last_rows, drafts[-1])
            if self.chain == "output":
                states = outputs
            elif self.chain == "target_shift":
                states = self.ops.shift_states(states, outputs, last_rows)
        return torch.stack(drafts, dim=1)

"""Vanilla MTP: one draft layer per depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.drafting.attention_loop import draft_loop, kv_floor
from mtp_plugin.speculative.drafting.worker import SpecWorker, Step, takes_output_rows
from mtp_plugin.speculative.ops.draft_inputs import concatenate
from mtp_plugin.speculative.step import Accepted, DraftColumn, DraftInputs, FirstPass


class MTPWorker(SpecWorker):
    """Drafts with K layers, the d-th proposing the token d+1 places on.

    Story, K = 3 and ``chain: output``: prompt ``p q r s``, emitted ``t``. Depth 1 reads tokens
    ``q r s t`` with the target's states of ``p q r s`` and proposes ``u``; depth 2 reads ``r s t
    u`` with depth 1's four outputs and proposes ``v``; depth 3 reads ``s t u v`` and proposes
    ``w``. The target then reads ``t u v w``. A generation feeds the K+1 pairs that end at its last
    accepted position, so every draft-KV row is rewritten from verified inputs before it counts.
    """

    @property
    def num_depths(self) -> int:
        """Layers that a step runs: all of them where requests stay warm for more drafts."""
        return self.full_draft_len if self.keeps_warm else self.max_draft_len

    def _draft(
        self, step: Step, accepted: Accepted, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        layers = step.mtp_layers
        expect(
            layers is not None and len(layers) >= self.num_depths,
            ConfigError,
            f"vanilla MTP drafts K = {self.num_depths} tokens with one layer each, got "
            f"{0 if layers is None else len(layers)} layers",
        )
        manager = self._history(step.spec_metadata)
        history_lens = self._history_lens(step)
        attention = step.attn_metadata
        kv_lens = getattr(attention, "kv_lens_cuda", None)
        first: FirstPass = self.ops.vanilla_first_pass(
            manager.mtp_past_tokens_pool,
            manager.mtp_past_hidden_states_pool,
            step.spec_metadata.slot_ids[: step.num_seqs],
            step.input_ids,
            step.positions,
            step.hidden_states,
            accepted.num_accepted,
            next_tokens[:, 0],
            self._context_successors(step, next_tokens[:, 0]),
            step.context_lens,
            chunk_lens=step.attn_metadata._seq_lens[: step.num_contexts].tolist(),
            history_lens=history_lens,
            window=self._window,
            kv_lens=kv_lens,
            kv_floor=kv_floor(attention, self._window),
            spare_rows=self.full_draft_len - 1 if self.chain == "target_shift" else 0,
            step_rows=self.max_draft_len + 1,
            out=self._in_place(step, history_lens, kv_lens),
        )
        with draft_loop(attention) as loop:
            loop.feed_window(
                accepted.num_accepted,
                self.max_draft_len + 1,
                self._window,
                history_lens,
                first.kv_lens,
            )
            self._run_depths(step, first, drafts, next_tokens)

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
        manager = self._history(spec_metadata)
        k = self.max_draft_len
        num_contexts, num_seqs = attn_metadata.num_contexts, attn_metadata.num_seqs
        num_ctx_tokens = attn_metadata.num_ctx_tokens
        positions = position_ids.reshape(-1)
        num_accepted = num_accepted_tokens.to(torch.int64)
        last = accepted_tokens.gather(1, (num_accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        last = last.clamp_min(0)  # a run without a token has none
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
                    torch.full_like(slots, self.full_draft_len - k),
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

    def _in_place(
        self, step: Step, history_lens: list[int], kv_lens: torch.Tensor | None
    ) -> FirstPass | None:
        """A first pass whose states are the step's own, where its rows lie where theirs do.

        Prompt rows then stay where they are; the windows of generations overwrite their rows, for
        which the host must have said that nobody reads them any more.
        """
        states = step.hidden_states
        rows = step.num_ctx_tokens + (step.num_seqs - step.num_contexts) * (self.max_draft_len + 1)
        if (
            step.num_contexts == 0
            or any(history_lens)
            or self._window != self.max_draft_len + 1
            or self.chain == "target_shift"
            or not states.is_contiguous()
            or (step.num_seqs > step.num_contexts and not self.may_overwrite_states)
        ):
            return None
        num_ids = rows + self.full_draft_len - 1
        return FirstPass.unwritten(num_ids, rows, step.num_seqs, states[:rows], kv_lens)

    @property
    def _window(self) -> int:
        return self.full_draft_len + (1 if self.draft_window == "exact" else 0)

    def _history_lens(self, step: Step) -> list[int]:
        """History rows per context: K, cut at the prompt's start; none for hosts without
        look-ahead."""
        if getattr(step.spec_metadata, "next_prompt_tokens", None) is None:
            return [0] * step.num_contexts
        if step.num_contexts == 0:
            return []
        cached = step.attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        return [min(self.full_draft_len, count) for count in cached[: step.num_contexts]]

    def _run_depths(
        self, step: Step, first: FirstPass, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        num_rows = first.positions.shape[0]
        states = first.states[:num_rows]
        for depth in range(self.num_depths):
            layer = step.mtp_layers[depth]
            # only ids move between depths, and only by an offset
            ids = first.ids[depth : depth + num_rows]
            is_last = depth + 1 == self.num_depths
            drafts_here = depth < self.max_draft_len
            proposing = None
            if (is_last or self.chain == "none") and takes_output_rows(layer):
                # no depth behind reads what the others become
                proposing = first.last_rows if drafts_here else first.last_rows[:0]
            outputs = self._run_layer(
                layer, step, ids, first.positions, states, output_rows=proposing
            )
            if drafts_here:
                alone = proposing is not None
                logits = layer.shared_head(outputs, step.lm_head, step.attn_metadata, alone)
                place = DraftColumn(drafts, next_tokens, depth)
                if not is_last:
                    place = replace(place, shifted_ids=first.ids, last_rows=first.last_rows)
                self._propose(logits, place)
            elif not is_last:
                # nothing was drafted; later windows rewrite what comes of it
                first.ids.index_fill_(0, first.last_rows + (depth + 1), 0)
            if is_last:
                return
            if self.chain == "output":
                states = outputs
            elif self.chain == "target_shift":
                self.ops.place_last_states(first.states, outputs, first.last_rows, depth + 1)
                states = first.states[depth + 1 : depth + 1 + num_rows]

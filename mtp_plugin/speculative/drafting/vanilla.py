"""Vanilla MTP: one draft layer per depth."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.draft import shift_state_window
from mtp_plugin.ops.draft_inputs import DraftWindows, advance_and_build_inputs
from mtp_plugin.ops.step import Accepted, DrafterInputs, DraftOutput, StepLayout
from mtp_plugin.speculative.drafting.attention_loop import draft_loop
from mtp_plugin.speculative.drafting.draft_layers import run_layer
from mtp_plugin.speculative.drafting.forward_inputs import ForwardInputs, read_history
from mtp_plugin.speculative.drafting.public_steps import VanillaPublicSteps
from mtp_plugin.speculative.drafting.worker import SpecWorker
from mtp_plugin.speculative.host import cached_tokens, takes_output_rows


class MTPWorker(VanillaPublicSteps, SpecWorker):
    """Drafts with K layers; the layer of depth d proposes the token d+1 positions later.

    Example with K = 3 and ``chain: output``: the prompt is ``p q r s`` and the output ``t``. Depth
    1 reads the tokens ``q r s t`` with the target's states of ``p q r s`` and proposes ``u``; depth
    2 reads ``r s t u`` with the four outputs of depth 1 and proposes ``v``; depth 3 reads ``s t u
    v`` and proposes ``w``. The target then reads ``t u v w``. A generation feeds the K+1 pairs that
    end at its last accepted position, so draft KV that was written from unverified drafts is
    overwritten from verified inputs.
    """

    is_thop = False
    """TensorRT-LLM's switch for its own kernels; hosts may set it, steps run the plugin's."""

    @override
    def _draft(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        layers, layout = step.mtp_layers, step.layout
        num_depths = self._num_depths(layout)
        expect(
            layers is not None and len(layers) >= num_depths,
            ConfigError,
            f"vanilla MTP drafts K = {num_depths} tokens with one layer each, got "
            f"{0 if layers is None else len(layers)} layers",
        )
        step = step.with_ranks(self.ranks, self._window - layout.step_rows)
        history_lens = self._history_lens(step)
        first = advance_and_build_inputs(
            layout,
            read_history(step.host, self.max_draft_len),
            replace(step.rows, successors=step.host.context_successors(next_tokens[:, 0])),
            accepted.num_accepted,
            next_tokens[:, 0],
            DraftWindows(
                window=self._window,
                history_lens=history_lens,
                spare_rows=self.max_draft_len - 1 if self.chain == "target_shift" else 0,
                may_overwrite_states=self.may_overwrite_states,
            ),
            kv=step.kv(self._window),
            backend=self.backend,
        )
        with draft_loop(step.attn_metadata) as loop:
            loop.feed_window(
                accepted.num_accepted,
                layout.step_rows,
                self._window,
                history_lens,
                first.kv_lens,
            )
            loop.set_rank_counts(step.host.ranks.counts)
            self._run_depths(step, accepted, first, drafts, next_tokens)

    def _num_depths(self, layout: StepLayout) -> int:
        """Return how many layers a step runs: all of them with ``keep_warm``."""
        return self.max_draft_len if self.keeps_warm else layout.draft_len

    @property
    def _window(self) -> int:
        return self.max_draft_len + (1 if self.draft_window == "exact" else 0)

    def _history_lens(self, step: ForwardInputs) -> list[int]:
        """Return the number of history rows before each context's chunk.

        K, or fewer near the start of the prompt; 0 without ``next_prompt_tokens``, and with
        attention data parallelism, where other ranks count the rows of this one without history.
        """
        contexts = step.layout.num_contexts
        if contexts == 0 or step.host.next_prompt_tokens is None or self.ranks.attention_dp:
            return [0] * contexts
        cached = cached_tokens(step.attn_metadata, contexts)
        return [min(self.max_draft_len, count) for count in cached]

    def _run_depths(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        first: DrafterInputs,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        draft_len, num_depths = step.layout.draft_len, self._num_depths(step.layout)
        num_rows = first.positions.shape[0]
        states = first.states[:num_rows]
        for depth in range(num_depths):
            layer = step.mtp_layers[depth]
            # only ids move between depths, and only by an offset
            ids = first.ids[depth : depth + num_rows]
            is_last = depth + 1 == num_depths
            drafts_here = depth < draft_len
            proposing = None
            if (is_last or self.chain == "none") and takes_output_rows(layer):
                # later depths read no other row
                proposing = first.last_rows if drafts_here else first.last_rows[:0]
            outputs = run_layer(layer, step, ids, first.positions, states, output_rows=proposing)
            if drafts_here:
                # heads without takes_output_rows may have no fourth parameter
                alone = () if proposing is None else (True,)
                logits = layer.shared_head(outputs, step.lm_head, step.attn_metadata, *alone)
                output = DraftOutput(drafts, next_tokens, depth)
                if not is_last:
                    output = replace(output, shifted_ids=first.ids, last_rows=first.last_rows)
                self._propose(step, accepted, logits, output)
            elif not is_last:
                # no draft; later steps overwrite the draft KV of this id
                first.ids.index_fill_(0, first.last_rows + (depth + 1), 0)
            if is_last:
                return
            if self.chain == "output":
                states = outputs
            elif self.chain == "target_shift":
                shift_state_window(
                    first.states, outputs, first.last_rows, depth + 1, backend=self.backend
                )
                states = first.states[depth + 1 : depth + 1 + num_rows]

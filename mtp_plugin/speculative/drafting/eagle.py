"""MTP-Eagle: one draft layer, reused for every draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.ops.draft_inputs import build_reused_inputs
from mtp_plugin.ops.step import Accepted, DraftOutput
from mtp_plugin.speculative.drafting.attention_loop import draft_loop
from mtp_plugin.speculative.drafting.draft_layers import run_layer
from mtp_plugin.speculative.drafting.forward_inputs import ForwardInputs
from mtp_plugin.speculative.drafting.public_steps import EaglePublicSteps
from mtp_plugin.speculative.drafting.vanilla import MTPWorker


class MTPEagleWorker(EaglePublicSteps, MTPWorker):  # type: ignore[misc] # as in TensorRT-LLM
    """Drafts with one layer in K passes; each reads the draft and the hidden state of the last one.

    Example with K = 3: the target read ``t u v w`` and its output is ``u v x`` (n = 3). Pass 1
    reads the tokens ``u v x x`` with the target's states of ``t u v w``; its row of ``x`` proposes
    ``y``. Pass 2 reads ``y`` with pass 1's state of that row, at the next position, and proposes
    ``z``; pass 3 reads ``z``. The first pass of the next step, which reads the target's states,
    overwrites the draft KV that passes 2 to K wrote.
    """

    def __init__(
        self,
        spec_config: Any,
        model_config: Any = None,
        use_separate_draft_kv_cache: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(spec_config, model_config, use_separate_draft_kv_cache, **others)
        self.mtp_num_modules = self.max_draft_len
        """K: passes of the layer; carried for hosts, not read."""

    @override
    def _draft(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        layers, draft_len = step.mtp_layers, step.layout.draft_len
        expect(
            layers is not None and len(layers) >= 1,
            ConfigError,
            "eagle MTP drafts with one layer, got none",
        )
        layer = layers[0]
        step = step.with_ranks(self.ranks, 0)
        max_position = step.host.max_position
        first = build_reused_inputs(
            step.layout,
            replace(step.rows, successors=step.host.context_successors(next_tokens[:, 0])),
            accepted.tokens,
            accepted.num_accepted,
            max_position=max_position,
            kv=step.kv(1),
            backend=self.backend,
        )
        positions = first.next_positions
        if positions is None:
            raise MetadataError(
                "eagle: the inputs of the first pass have no positions for the second"
            )
        with draft_loop(step.attn_metadata) as loop:
            loop.set_rank_counts(step.host.ranks.counts)
            # a step without drafts reads no state, but it still updates the draft KV
            proposing = first.last_rows if draft_len else first.last_rows[:0]
            states = run_layer(
                layer, step, first.ids, first.positions, first.states, output_rows=proposing
            )
            for column in range(draft_len):
                if column == 1:
                    loop.feed_single_rows(
                        accepted.num_accepted,
                        draft_len,
                        step.host.final_context,
                        first.kv_lens,
                    )
                    loop.set_rank_counts(step.host.ranks.later_counts)
                elif column > 1:
                    loop.advance(moved=True)
                if column > 0:
                    states = run_layer(
                        layer, step, drafts[:, column - 1], positions, states, single_rows=True
                    )
                logits = layer.shared_head(states, step.lm_head, step.attn_metadata, True)
                output = DraftOutput(drafts, next_tokens, column)
                if 0 < column < draft_len - 1:
                    # the op also increases positions and KV lengths for the next pass
                    output = replace(
                        output,
                        positions=positions,
                        kv_lens=loop.kv_lens,
                        max_position=max_position,
                    )
                self._propose(step, accepted, logits, output)

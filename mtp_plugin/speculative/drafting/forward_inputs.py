"""What a worker's ``forward`` was called with, checked, and with its layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, TensorContractError, expect
from mtp_plugin.speculative.drafting.attention_loop import kv_floor
from mtp_plugin.speculative.host import AttentionMetadata, HostStep, Ranks, part_of
from mtp_plugin.speculative.ops.draft_inputs import History, LoopKVLens, TargetRows
from mtp_plugin.speculative.step import StepLayout


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one ``forward``, with flat ids and positions."""

    host: HostStep
    rows: TargetRows  # ids [T] and the target's states [T, H]
    positions: torch.Tensor  # [T]
    logits: torch.Tensor  # [C + G*(K+1), V]
    lm_head: Any
    embed_tokens: Any
    attn_metadata: AttentionMetadata
    mtp_layers: Any
    spec_metadata: Any = None  # the host's own, for layers that read it

    @property
    def layout(self) -> StepLayout:
        """The step's shape."""
        return self.host.layout

    @classmethod
    def read(
        cls,
        max_draft_len: int,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        lm_head: Any,
        embed_tokens: Any,
        attn_metadata: AttentionMetadata,
        spec_metadata: Any,
        mtp_layers: Any,
        draft_model: Any,
        *,
        draft_len: int | None = None,
    ) -> ForwardInputs:
        """Check them, and read what a ``draft_model`` has of them.

        Args:
            draft_len: K of the step, whatever the host's metadata says; None: as they say.

        Raises:
            TensorContractError, MetadataError: an input that does not fit the others.
        """
        ids, positions = input_ids.reshape(-1), position_ids.reshape(-1)
        rows = ids.shape[0]
        expect(
            positions.shape[0] == rows and hidden_states.shape[0] == rows,
            TensorContractError,
            f"forward: expected T = {rows} positions and states like input_ids, got "
            f"{positions.shape[0]} and {hidden_states.shape[0]}",
        )

        def given(value: Any, name: str) -> Any:
            return value if value is not None else part_of(draft_model, name)

        return cls(
            host=HostStep.read(
                attn_metadata, spec_metadata, max_draft_len, positions, draft_len=draft_len
            ),
            rows=TargetRows(ids, hidden_states),
            positions=positions,
            logits=as_rows(logits),
            lm_head=given(lm_head, "lm_head"),
            embed_tokens=given(embed_tokens, "embed_tokens"),
            attn_metadata=attn_metadata,
            mtp_layers=given(mtp_layers, "mtp_layers"),
            spec_metadata=spec_metadata,
        )

    def with_ranks(self, ranks: Ranks, further_rows: int) -> ForwardInputs:
        """The same, with what draft layers are told of other ranks in a first pass.

        Args:
            further_rows: that a generation feeds beyond those of the target.

        Raises:
            MetadataError: the host counted other rows.
        """
        if not ranks.attention_dp:
            return self
        layout = self.layout
        rows = layout.num_tokens + layout.num_generations * further_rows
        told = self.host.ranks.of_first_pass(ranks, rows, further_rows)
        return replace(self, host=replace(self.host, ranks=told))

    def kv(self, fed_rows: int) -> LoopKVLens | None:
        """The host's KV lengths, for generations that feed ``fed_rows`` rows; None: it has none."""
        lens = self.host.kv_lens
        return None if lens is None else LoopKVLens(lens, kv_floor(self.attn_metadata, fed_rows))

    def context_successors(self, last_tokens: torch.Tensor) -> torch.Tensor | None:
        """The token behind each context's last row [C]: emitted, or the known next prompt token;
        None without contexts.

        Args:
            last_tokens: [R] that each request emitted last.
        """
        contexts = self.layout.num_contexts
        if contexts == 0:
            return None
        emitted = last_tokens[:contexts]
        if self.host.known_successors is None:
            return emitted
        known = self.host.known_successors.to(emitted.dtype)
        return torch.where(known >= 0, known, emitted)


def read_history(step: HostStep, max_draft_len: int) -> History:
    """The pools of the host's manager, which keep K pairs per slot.

    Raises:
        MetadataError: the host gave no manager, or no slots.
        ConfigError: the pools keep another number of pairs.
    """
    manager, slots = step.expect_manager()
    tokens, states = manager.mtp_past_tokens_pool, manager.mtp_past_hidden_states_pool
    if tokens.shape[1] != max_draft_len or states.shape[1] != max_draft_len:
        raise ConfigError(
            f"pools of the MTP manager: expected K = {max_draft_len} past pairs per slot as this "
            f"worker drafts, got {tokens.shape[1]} tokens and {states.shape[1]} states; give "
            f"manager and worker the same max_draft_len"
        )
    return History(tokens, states, slots)


def as_rows(logits: torch.Tensor) -> torch.Tensor:
    """[V] of one row -> [1, V]."""
    return logits.unsqueeze(0) if logits.dim() == 1 else logits

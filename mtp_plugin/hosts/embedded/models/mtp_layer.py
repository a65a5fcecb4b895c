"""One multi-token-prediction layer around a decoder layer of the target's own class."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mtp_plugin.checkpoint.families import DraftTraits
from mtp_plugin.errors import UnsupportedModelError
from mtp_plugin.infer.language_model import transformers_arguments


class TransformersAttention(Protocol):
    """The part of the step's attention metadata that an MTP layer reads."""

    _seq_lens_cuda: torch.Tensor
    """Rows of each sequence in the flat batch, [R] integers on the device."""

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers modules.

        `past_key_values`, `attention_mask` (None where the attention function needs none),
        `use_cache`, and the metadata itself as `attn_metadata`.
        """
        ...


class MTPLayer(nn.Module):
    """Normalizes and projects a token embedding and a hidden state, then runs a decoder layer.

    The target's embedding and LM head are passed to each call; its rotary embedding is held by
    reference.
    """

    takes_output_rows = True

    def __init__(
        self,
        config: Any,
        *,
        block_class: type[nn.Module],
        norm_class: type[nn.Module],
        layer_idx: int,
        traits: DraftTraits,
        rotary: nn.Module,
    ) -> None:
        """Build the modules without meaningful weights.

        Args:
            config: a transformers config under which `block_class(config, layer_idx)` is an MTP
                block.
            block_class: the target's decoder layer class.
            norm_class: the class of the target's final norm.
            layer_idx: row of the KV pools, the number of target layers plus the depth.
            traits: how the family wires its MTP head.
            rotary: the target's rotary embedding.

        Raises:
            UnsupportedModelError: a head per depth, which is not supported.
        """
        super().__init__()
        if traits.head != "shared":
            raise UnsupportedModelError(
                f"MTP layer: expected a family with a shared LM head, got head={traits.head!r}"
            )
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.traits = traits
        self.layer_idx = layer_idx
        self.enorm = norm_class(hidden_size, eps=eps)
        self.hnorm = norm_class(hidden_size, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block_class(config, layer_idx)
        self.norm = norm_class(hidden_size, eps=eps)
        # in a tuple, so that the shared module is not registered (moved, saved, counted) twice
        self._rotary = (rotary,)

    @property
    def rotary(self) -> nn.Module:
        """The target's rotary embedding."""
        return self._rotary[0]

    def forward(
        self,
        *,
        embed_tokens: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        attn_metadata: TransformersAttention,
        output_rows: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Run one draft depth over the flat rows of a batch.

        Args:
            embed_tokens: the target's embedding.
            input_ids: [T], the token after the one each state belongs to.
            position_ids: [1, T], positions of the states.
            hidden_states: [T, H], hidden states of the target or of the previous depth.
            attn_metadata: gives the keyword arguments of the decoder layer.
            output_rows: [N] integers, the rows to return; keys and values of every row are written
                anyway. None: all rows.

        Returns:
            [T, H] or [N, H], the hidden state for the next depth: after the last norm for
            `recycle="post_norm"`.
        """
        embedded = self.enorm(embed_tokens(input_ids))  # [T, H]
        state = self.hnorm(hidden_states)  # [T, H]
        halves = (embedded, state) if self.traits.concat == "embed_hidden" else (state, embedded)
        x = self.eh_proj(torch.cat(halves, dim=-1))[None]  # [1, T, H]
        rope_ids = position_ids + 1 if self.traits.position == "token" else position_ids
        x = self.block(
            x,
            position_embeddings=self.rotary(x, rope_ids),
            position_ids=rope_ids,
            **transformers_arguments(**attn_metadata.model_kwargs()),
        )[0]
        if output_rows is not None:
            x = x[output_rows]
        return self.norm(x) if self.traits.recycle == "post_norm" else x  # type: ignore[no-any-return]

    def shared_head(
        self,
        hidden: torch.Tensor,
        lm_head: nn.Module,
        attn_metadata: TransformersAttention,
        return_all: bool = False,
    ) -> torch.Tensor:
        """Compute logits of states that `forward` returned, which are normalized exactly once.

        Args:
            hidden: [T, H] as returned by `forward`.
            lm_head: the target's LM head, or one over some of its rows.
            attn_metadata: `_seq_lens_cuda` gives the ends of sequences; not read with `return_all`.
            return_all: return logits of every state instead of the last one of each sequence.

        Returns:
            [T, V] with `return_all`, else [R, V].
        """
        if not return_all:
            last_rows = attn_metadata._seq_lens_cuda.cumsum(0, dtype=torch.int64) - 1
            hidden = hidden[last_rows]
        if self.traits.recycle == "pre_norm":
            hidden = self.norm(hidden)
        return lm_head(hidden)  # type: ignore[no-any-return]

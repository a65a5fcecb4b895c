"""Draft layers with the signatures that the host's have, over those of the tiny model."""

from __future__ import annotations

from typing import Any


class DeepseekLayer:
    """As DeepSeek's MTP layer of July 2025 and later: what it does not name goes to attention."""

    def __init__(self, layer: Any, *, attention_dp: bool = False) -> None:
        self.layer = layer
        self.shared_head = layer.shared_head
        self.attention_dp = attention_dp

    def __call__(
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        embed_tokens: Any,
        attn_metadata: Any,
        all_rank_num_tokens: list[int] | None = None,
        all_rank_max_num_tokens: int | None = None,  # noqa: ARG002 - of July 2025
        **kwargs: Any,
    ) -> Any:
        rows = [len(input_ids)] if self.attention_dp else None
        assert all_rank_num_tokens == rows, (
            f"ranks were given {all_rank_num_tokens} rows of this one, expected {rows}"
        )
        return self.attention(
            input_ids, position_ids, hidden_states, embed_tokens, attn_metadata, **kwargs
        )

    def attention(
        self,
        input_ids: Any,
        position_ids: Any,
        hidden_states: Any,
        embed_tokens: Any,
        attn_metadata: Any,
    ) -> Any:
        """The rest of the layer; it takes no further argument."""
        return self.layer(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            embed_tokens=embed_tokens,
            attn_metadata=attn_metadata,
        )


class MetadataLayer(DeepseekLayer):
    """A layer for the eagle worker of 1.3, which passes ``spec_metadata`` to every layer."""

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        assert kwargs.pop("spec_metadata").request_ids is not None
        return super().__call__(*arguments, **kwargs)

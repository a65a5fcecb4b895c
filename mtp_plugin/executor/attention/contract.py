"""What a backend of paged attention is asked, and what it may read of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mtp_plugin.executor.attention.layout import Layout, RowCounts
from mtp_plugin.executor.kv_cache import PagedKVPools

SDPA_BACKEND = "mtp_paged_sdpa"
"""Name under which the sdpa backend is registered with transformers."""
TRITON_BACKEND = "mtp_paged_triton"
"""Name under which the Triton backend is registered with transformers."""


@dataclass(frozen=True)
class HeadShape:
    """Heads of a model as its cache and its attention see them."""

    num_query_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False
    """The cache holds latents, which modules expand to keys and values themselves."""

    @classmethod
    def of(cls, config: Any) -> HeadShape:
        """Heads that a transformers config of a decoder describes."""
        heads = int(config.num_attention_heads)
        latent = getattr(config, "kv_lora_rank", None)
        if latent:
            return cls(heads, 1, int(latent), int(config.qk_rope_head_dim), latent=True)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(heads, kv_heads, width, width)


class StepMetadata(Protocol):
    """What a backend reads of :class:`PagedAttentionMetadata`: R sequences, T query rows."""

    @property
    def num_seqs(self) -> int:
        """R."""
        ...

    @property
    def num_tokens(self) -> int:
        """T."""
        ...

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """[R] int32 on the device, query rows per sequence."""
        ...

    @property
    def kv_lens_cuda(self) -> torch.Tensor:
        """[R] int32 on the device, KV length per sequence behind this step's rows."""
        ...

    @property
    def kv_write_limit(self) -> torch.Tensor:
        """[R] int32 on the device: rows at or past it are dead."""
        ...

    @property
    def block_table(self) -> torch.Tensor:
        """[R, B] int32 on the device; unused entries hold the sentinel block."""
        ...

    @property
    def pools(self) -> PagedKVPools:
        """KV rows of every layer."""
        ...

    def row_counts(self) -> RowCounts:
        """Query rows per sequence, from the host's lengths alone."""
        ...

    def layout(self) -> Layout:
        """The indices that follow from the current lengths."""
        ...


class AttentionBackend(Protocol):
    """Causal attention of every sequence of a step over its own pages."""

    @property
    def name(self) -> str:
        """Value of ``attn_backend`` in the config."""
        ...

    @property
    def attention_function(self) -> str:
        """Name under which transformers' modules find it."""
        ...

    @property
    def gathers_pages(self) -> bool:
        """Modules of transformers get every sequence's pages behind their write, as latent
        attention needs them; otherwise pages are read where they lie."""
        ...

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:
        """Why it cannot serve a model with these heads on this device; None: it can."""
        ...

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """Put the step's rows into the layer's pools; dead rows go to the sentinel block.

        Args:
            layer_idx: the layer's place in the pools.
            key, value: [T, Hk, D] and [T, Hk, Dv], any strides in front of contiguous widths.
            metadata: lengths, limits and block table of the step.
        """
        ...

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        metadata: StepMetadata,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Each row over the keys of its sequence up to its own position, which are written.

        Args:
            query: [T, Hq, D], any strides in front of a contiguous width; Hq is a multiple of Hk,
                and neighbouring heads share a key head.
            scaling: factor of the scores; None: ``D ** -0.5``.

        Returns:
            [T, Hq, Dv] in the type of ``query``; rows that are dead are finite, and mean nothing.
        """
        ...

"""Data classes of paged attention, and the protocols of a backend and of what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools

SDPA_BACKEND = "mtp_paged_sdpa"
"""Name under which the sdpa backend is registered with transformers."""
TRITON_BACKEND = "mtp_paged_triton"
"""Name under which the Triton backend is registered with transformers."""


@dataclass(frozen=True)
class HeadShape:
    """Number and width of a model's heads."""

    num_query_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False
    """Whether the cache holds latents (MLA), which modules expand to keys and values."""

    @classmethod
    def of(cls, config: Any) -> HeadShape:
        """Read the heads from a transformers config of a decoder."""
        heads = int(config.num_attention_heads)
        latent = getattr(config, "kv_lora_rank", None)
        if latent:
            return cls(heads, 1, int(latent), int(config.qk_rope_head_dim), latent=True)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(heads, kv_heads, width, width)


@dataclass(frozen=True)
class Group:
    """Adjacent sequences with equal query rows, attended in one call."""

    first_seq: int
    num_seqs: int
    first_row: int
    query_rows: int

    @property
    def seqs(self) -> slice:
        """Slice of the step's sequences."""
        return slice(self.first_seq, self.first_seq + self.num_seqs)

    @property
    def rows(self) -> slice:
        """Slice of the step's query rows."""
        return slice(self.first_row, self.first_row + self.num_seqs * self.query_rows)


@dataclass(frozen=True)
class Layout:
    """Indices that follow from the lengths of a step."""

    positions: torch.Tensor  # [T] KV position of each query row; negative: padding
    alive: torch.Tensor  # [T] bool: no padding, the row writes and reads KV of its request
    write_rows: torch.Tensor  # [T] pool row that each query row writes
    read_rows: torch.Tensor  # [R, S'] pool rows of each sequence, position order
    readable: torch.Tensor  # [R, S'] bool: rows that hold keys of the request
    groups: list[Group]

    @cached_property
    def visible(self) -> list[torch.Tensor]:
        """Per group [B, 1, q, S'] bool: the keys of its sequence that each query row attends.

        A padding row attends the first key, so that it is finite.
        """
        key_positions = torch.arange(self.read_rows.shape[1], device=self.positions.device)
        last_key = torch.where(self.alive, self.positions, 0)
        return [
            (key_positions <= last_key[group.rows].view(group.num_seqs, 1, group.query_rows, 1))
            for group in self.groups
        ]

    @cached_property
    def flat_read_rows(self) -> torch.Tensor:
        """[R * S'] the rows of all sequences, concatenated."""
        return self.read_rows.flatten()

    @cached_property
    def unreadable(self) -> torch.Tensor:
        """[R, S', 1, 1] bool: rows that hold no key of the request."""
        return ~self.readable[..., None, None]

    @cached_property
    def unreadable_rows(self) -> torch.Tensor:
        """[N] the same as indices into the rows of all sequences; on a CPU, which knows N."""
        return self.unreadable.flatten().nonzero().flatten()


@dataclass(frozen=True)
class RowCounts:
    """Query rows of a step, known to the host: contexts of any length, then generations of one.

    Generations of unequal rows count as ragged, and so do the contexts before them.
    """

    ragged: tuple[int, ...]
    """Rows of each of the first sequences."""
    num_uniform: int
    """Number of the other sequences."""
    uniform_rows: int
    """Rows of each of those; 0 if there are none."""

    @classmethod
    def of(cls, seq_lens: list[int], num_contexts: int) -> RowCounts:
        """Counts of a step, contexts first."""
        generations = seq_lens[num_contexts:]
        if len(set(generations)) != 1:
            return cls(tuple(seq_lens), 0, 0)
        return cls(tuple(seq_lens[:num_contexts]), len(generations), generations[0])

    @property
    def ragged_rows(self) -> int:
        """Sum of the rows of the ragged sequences."""
        return sum(self.ragged)


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
        """[R] int32 on the device, KV length per sequence after this step's rows."""
        ...

    @property
    def kv_write_limit(self) -> torch.Tensor:
        """[R] int32 on the device: rows at or past it are padding."""
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
        """Whether transformers' modules get the gathered pages of every sequence after their write,
        as latent attention requires; otherwise pages are read in place."""
        ...

    @property
    def reads_lengths_on_device(self) -> bool:
        """Whether a captured step may be replayed with prompt chunks of other lengths, as long as
        the number of chunks and the sum of their lengths stay the same."""
        ...

    def refusal(self, heads: HeadShape, device: torch.device) -> str | None:
        """Return why the backend does not support these heads on this device, or None."""
        ...

    def write(
        self,
        layer_idx: int,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """Write the step's rows into the layer's pools; padding rows go to the sentinel block.

        Args:
            layer_idx: the layer's index in the pools.
            key, value: [T, Hk, D] and [T, Hk, Dv], any strides, contiguous widths.
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
        """Attend the written keys of its sequence up to its own position, for each row.

        Args:
            query: [T, Hq, D], any strides, contiguous width; Hq is a multiple of Hk,
                and neighbouring heads share a key head.
            scaling: factor of the scores; None: ``D ** -0.5``.

        Returns:
            [T, Hq, Dv] in the type of ``query``; padding rows are finite and undefined.
        """
        ...

"""Attention over the paged cache: the step's metadata, and the ``sdpa`` backend that reads it.

The metadata holds lengths; every derived index (which row a token writes, which keys it sees) is
rebuilt from them whenever they change, so a draft loop that changes lengths cannot leave a stale
map.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from mtp_plugin.errors import MetadataError
from mtp_plugin.executor.kv_cache import PagedKVPools

SDPA_BACKEND = "mtp_paged_sdpa"
"""Name under which the backend is registered with transformers."""


@dataclass(frozen=True)
class _Group:
    """Neighbouring sequences with equal query rows, attended in one call."""

    first_seq: int
    num_seqs: int
    first_row: int
    query_rows: int


@dataclass(frozen=True)
class Layout:
    """What follows from the lengths of a step."""

    positions: torch.Tensor  # [T] KV position of each query row; negative: dead
    alive: torch.Tensor  # [T] bool: the row writes and reads KV of its request
    write_rows: torch.Tensor  # [T] pool row that each query row writes
    read_rows: torch.Tensor  # [R, S'] pool rows of each sequence, position order
    readable: torch.Tensor  # [R, S'] bool: rows that hold keys of the request
    groups: list[_Group]


class PagedAttentionMetadata:
    """Lengths, block table and limits of one step, with TensorRT-LLM's names.

    Args:
        seq_lens: [R] int32 on the host, query rows per sequence.
        kv_lens: [R] int32 on the device, KV length per sequence behind this step's rows.
        num_contexts: C, the first sequences.
        num_cached_tokens_per_seq: host list, tokens cached before this step (an upper bound under
            overlap).
        block_table: [R, B] int32 on the device; unused entries hold the sentinel block.
        kv_write_limit: [R] int32: rows at or past it write to the sentinel block and attend nobody.
        kv_capacity: [R] int32: rows that the request has reserved.
        pools: KV rows of every layer.
        check: compare every cached index with one rebuilt from scratch, at every attention call.
    """

    supports_dead_rows = True
    reads_cached_token_counts = False

    def __init__(
        self,
        *,
        seq_lens: torch.Tensor,
        kv_lens: torch.Tensor,
        num_contexts: int,
        num_cached_tokens_per_seq: list[int],
        block_table: torch.Tensor,
        kv_write_limit: torch.Tensor,
        kv_capacity: torch.Tensor,
        pools: PagedKVPools,
        request_ids: list[int] | None = None,
        check: bool = False,
    ) -> None:
        device = kv_lens.device
        self._seq_lens = seq_lens
        self._seq_lens_cuda = seq_lens.to(device, non_blocking=True)
        if self._seq_lens_cuda is seq_lens:
            self._seq_lens_cuda = seq_lens.clone()
        self.kv_lens_cuda = kv_lens
        self.kv_write_limit = kv_write_limit
        self.kv_capacity = kv_capacity
        self.block_table = block_table
        self.host_request_types = torch.ones(seq_lens.shape[0], dtype=torch.int32)
        self.host_request_types[:num_contexts] = 0
        self.kv_cache_params = SimpleNamespace(
            num_cached_tokens_per_seq=num_cached_tokens_per_seq, num_extra_kv_tokens=0
        )
        self.is_cuda_graph = False
        self.request_ids = request_ids
        self.check = check
        self._pools = pools
        self._num_contexts = num_contexts
        self._layout: Layout | None = None
        self.on_update()

    # ---- TensorRT-LLM's names -----------------------------------------------------------------

    @property
    def num_seqs(self) -> int:
        """R."""
        return int(self._seq_lens.shape[0])

    @property
    def num_contexts(self) -> int:
        """C."""
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value: int) -> None:
        self._num_contexts = value
        self.on_update()

    @property
    def num_generations(self) -> int:
        """G."""
        return self.num_seqs - self._num_contexts

    @property
    def seq_lens(self) -> torch.Tensor:
        """[R] on the host."""
        return self._seq_lens

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """[R] on the device."""
        return self._seq_lens_cuda

    @property
    def num_ctx_tokens(self) -> int:
        """Query rows of contexts."""
        return self._num_ctx_tokens

    @property
    def num_tokens(self) -> int:
        """Query rows, T."""
        return self._num_tokens

    def on_update(self) -> None:
        """Host lengths or the number of contexts changed."""
        self._num_ctx_tokens = int(self._seq_lens[: self._num_contexts].sum())
        self._num_tokens = int(self._seq_lens.sum())
        self._layout = None

    def on_update_kv_lens(self) -> None:
        """Device lengths changed."""
        self._layout = None

    # ---- what transformers modules get ----------------------------------------------------------

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers modules."""
        return {
            "past_key_values": _PagedCache(self._pools, self),
            "attention_mask": None,
            "use_cache": True,
            "attn_metadata": self,
        }

    def layout(self) -> Layout:
        """The indices that follow from the current lengths.

        Raises:
            MetadataError: in check mode, where a length changed without ``on_update_kv_lens``.
        """
        if self._layout is None:
            self._layout = self._build_layout()
        elif self.check:
            fresh = self._build_layout()
            for name in ("positions", "write_rows", "read_rows", "readable", "alive"):
                if not torch.equal(getattr(fresh, name), getattr(self._layout, name)):
                    raise MetadataError(f"attention metadata: {name} is stale for these lengths")
        return self._layout

    def _build_layout(self) -> Layout:
        device = self.kv_lens_cuda.device
        lens = self._seq_lens_cuda.to(torch.int64)
        seq = torch.repeat_interleave(
            torch.arange(self.num_seqs, device=device), lens, output_size=self._num_tokens
        )
        kv_lens = self.kv_lens_cuda.to(torch.int64)
        limit = self.kv_write_limit.to(torch.int64)
        starts = lens.cumsum(0) - lens
        offset = torch.arange(self._num_tokens, device=device) - starts[seq]
        positions = (kv_lens - lens)[seq] + offset
        alive = (positions >= 0) & (positions < limit[seq])

        block_size = self._pools.block_size
        table = self.block_table.to(torch.int64)
        block = (positions // block_size).clamp(0, table.shape[1] - 1)
        sentinel_row = self._pools.num_rows - block_size
        write_rows = table[seq, block] * block_size + positions % block_size
        write_rows = torch.where(alive, write_rows, sentinel_row + positions % block_size)

        offsets = torch.arange(block_size, device=device)
        read_rows = (table.unsqueeze(-1) * block_size + offsets).flatten(1)
        key_positions = torch.arange(read_rows.shape[1], device=device)
        readable = key_positions < torch.minimum(kv_lens, limit).unsqueeze(1)
        return Layout(positions, alive, write_rows, read_rows, readable, self._groups())

    def _groups(self) -> list[_Group]:
        groups: list[_Group] = []
        first_seq = first_row = 0
        for query_rows, members in groupby(self._seq_lens.tolist()):
            count = len(list(members))
            groups.append(_Group(first_seq, count, first_row, query_rows))
            first_seq += count
            first_row += count * query_rows
        return groups


class _PagedCache:
    """The cache object that transformers' attention modules update: writes rows, gathers pages."""

    is_compileable = False

    def __init__(self, pools: PagedKVPools, metadata: PagedAttentionMetadata) -> None:
        self._pools = pools
        self._metadata = metadata

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Positions are given explicitly; transformers never derives them from here."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's rows and return every sequence's rows, [1, heads, R*S', width]."""
        layout = self._metadata.layout()
        gathered = []
        for pool, rows in zip(self._pools.layer(layer_idx, key, value), (key, value), strict=True):
            pool.index_copy_(0, layout.write_rows, rows[0].transpose(0, 1))
            pages = pool[layout.read_rows]  # [R, S', heads, width]
            # a row that holds no key must not reach the product: 0 * NaN is NaN
            pages = pages.masked_fill(~layout.readable[..., None, None], 0)
            gathered.append(pages.flatten(0, 1).transpose(0, 1).unsqueeze(0))
        return gathered[0], gathered[1]


def _paged_sdpa(
    module: Any,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    *,
    attn_metadata: PagedAttentionMetadata,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of every sequence over its own pages.

    query [1, Hq, T, D]; key, value [1, Hk, R*S', D]: sequences in order, S' positions each.
    """
    layout = attn_metadata.layout()
    num_seqs, num_keys = layout.read_rows.shape
    keys = key[0].unflatten(1, (num_seqs, num_keys)).transpose(0, 1)  # [R, Hk, S', D]
    values = value[0].unflatten(1, (num_seqs, num_keys)).transpose(0, 1)
    key_positions = torch.arange(num_keys, device=query.device)
    outputs = []
    for group in layout.groups:
        rows = slice(group.first_row, group.first_row + group.num_seqs * group.query_rows)
        seqs = slice(group.first_seq, group.first_seq + group.num_seqs)
        shape = (group.num_seqs, group.query_rows)
        # a dead row attends one zeroed or foreign-free key, so that it stays finite
        last_key = torch.where(layout.alive[rows], layout.positions[rows], 0).view(*shape, 1)
        visible = (key_positions <= last_key).unsqueeze(1)  # [B, 1, q, S']
        output = functional.scaled_dot_product_attention(
            query[0, :, rows].unflatten(1, shape).transpose(0, 1),
            keys[seqs],
            values[seqs],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [B*q, Hq, D]
    return torch.cat(outputs).unsqueeze(0), None


AttentionInterface.register(SDPA_BACKEND, _paged_sdpa)

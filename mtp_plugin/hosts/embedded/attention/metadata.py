"""The step's metadata: lengths, limits and block table, and what attention derives from them.

Derived indices (the row that a token writes, the keys that it sees) are rebuilt whenever lengths
change, so a draft loop that changes lengths cannot leave them stale. A backend that reads lengths
on the device needs only the number of query rows per sequence, which the host knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.errors import MetadataError, expect
from mtp_plugin.hosts.embedded.attention.backend import find_backend
from mtp_plugin.hosts.embedded.attention.types import AttentionBackend, Group, Layout, RowCounts
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.ops.early_compile import is_recording
from mtp_plugin.ops.step import Accepted


class PagedAttentionMetadata:
    """Lengths, block table and limits of one step, with TensorRT-LLM's names.

    Args:
        seq_lens: [R] int32 on the host, query rows per sequence.
        kv_lens: [R] int32 on the device, KV length per sequence after this step's rows.
        num_contexts: C, the first sequences.
        num_cached_tokens_per_seq: host list, tokens cached before this step (an upper bound under
            overlap).
        block_table: [R, B] int32 on the device; unused entries hold the sentinel block.
        kv_write_limit: [R] int32: rows at or past it write to the sentinel block and attend no key.
        kv_capacity: [R] int32: rows that the request has reserved.
        pools: KV rows of every layer.
        check: compare cached indices with rebuilt ones at every attention call.
        backend: backend that writes and attends; None: sdpa.
        seq_lens_cuda: ``seq_lens`` on the device, if already copied.

    With ``is_cuda_graph``, the tensors are buffers whose contents change between replays while
    ``seq_lens`` stays the same; values derived from the contents are then not cached beyond the
    call or the capture that contains it.
    """

    supports_dead_rows = True
    reads_cached_token_counts = False
    derived_fields = frozenset({"_layout", "_layout_captured", "_layout_of", "_layout_rows"})
    """Attributes that are computed from the others when they are read."""

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
        backend: AttentionBackend | None = None,
        seq_lens_cuda: torch.Tensor | None = None,
    ) -> None:
        device = kv_lens.device
        self._seq_lens = seq_lens
        if seq_lens_cuda is None:
            seq_lens_cuda = seq_lens.to(device, non_blocking=True)
        self._seq_lens_cuda = seq_lens.clone() if seq_lens_cuda is seq_lens else seq_lens_cuda
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
        self.check = check and not is_recording()  # there, lengths have no values
        self.backend: AttentionBackend = find_backend("sdpa") if backend is None else backend
        self.after_verification: Callable[[Accepted, torch.Tensor | None], Any] | None = None
        self._pools = pools
        self._num_contexts = num_contexts
        self._layout: Layout | None = None
        self._layout_captured = False
        self._layout_of: list[torch.Tensor] = []  # in check mode
        self._layout_rows: RowCounts | None = None
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
        """Notify that host lengths or the number of contexts changed."""
        self._num_ctx_tokens = int(self._seq_lens[: self._num_contexts].sum())
        self._num_tokens = int(self._seq_lens.sum())
        self._layout = None
        self._layout_rows = None

    def on_update_kv_lens(self) -> None:
        """Notify that device lengths changed."""
        self._layout = None

    # ---- attention ------------------------------------------------------------------------------

    @property
    def pools(self) -> PagedKVPools:
        """KV rows of every layer."""
        return self._pools

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values of a layer, then attend.

        Args:
            layer_idx: index of the layer in the pools: target layers first, then draft depths.
            query: [T, Hq, D], any strides, contiguous width.
            key: [T, Hk, D], likewise.
            value: [T, Hk, Dv], likewise.
            scaling: factor of the scores; None: ``D ** -0.5``.

        Returns:
            [T, Hq, Dv]; padding rows are finite and undefined.
        """
        self.backend.write(layer_idx, key, value, self)
        return self.backend.attend(layer_idx, query, self, scaling)

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers modules."""
        # a process that compiles kernels imports this package, but not transformers
        from mtp_plugin.hosts.embedded.attention.bridge import PagedCache

        return {
            "past_key_values": PagedCache(self),
            "attention_mask": None,
            "use_cache": True,
            "attn_metadata": self,
        }

    def row_counts(self) -> RowCounts:
        """Query rows per sequence, from the host's lengths.

        Raises:
            MetadataError: in check mode, if a length changed without ``on_update``, or the device's
                lengths differ.
        """
        if self._layout_rows is None:
            self._layout_rows = RowCounts.of(self._seq_lens.tolist(), self._num_contexts)
        elif self.check:
            fresh = RowCounts.of(self._seq_lens.tolist(), self._num_contexts)
            expect(
                fresh == self._layout_rows,
                MetadataError,
                f"attention metadata: query rows are stale: {self._layout_rows} is kept, the "
                f"lengths say {fresh}",
            )
        if self.check:
            self._check_device_lens()
        return self._layout_rows

    def layout(self) -> Layout:
        """The indices that follow from the current lengths.

        Raises:
            MetadataError: in check mode, if a length changed without ``on_update_kv_lens``, or
                the query rows of host and device differ.
        """
        if self.check:
            self._check_device_lens()
        capturing = self._is_capturing()
        # a replay recomputes what its capture computed; anything else is valid for one step
        kept = not self.is_cuda_graph or (capturing and self._layout_captured)
        if self._layout is None or not kept:
            self._layout, self._layout_captured = self._build_layout(), capturing
            can_read = self.check and not capturing
            self._layout_of = [each.clone() for each in self._lengths] if can_read else []
        elif self.check and not capturing and self._has_changed():
            fresh = self._build_layout()
            for name in ("positions", "write_rows", "read_rows", "readable", "alive"):
                if not torch.equal(getattr(fresh, name), getattr(self._layout, name)):
                    raise MetadataError(f"attention metadata: {name} is stale for these lengths")
        return self._layout

    @property
    def _lengths(self) -> list[torch.Tensor]:
        """What a layout follows from."""
        return [self._seq_lens_cuda, self.kv_lens_cuda, self.kv_write_limit, self.block_table]

    def _has_changed(self) -> bool:
        """Whether a kept layout may have been built from other lengths."""
        kept = self._layout_of
        return not kept or not all(map(torch.equal, kept, self._lengths))

    def _is_capturing(self) -> bool:
        return self.kv_lens_cuda.is_cuda and torch.cuda.is_current_stream_capturing()

    def _check_device_lens(self) -> None:
        if self._is_capturing():
            return  # nothing can be read back
        host, device = self._seq_lens, self._seq_lens_cuda.cpu()
        if self.is_cuda_graph:  # a replay's chunks have other lengths, with the same sum
            chunks = slice(0, self._num_contexts)
            host, device = host.clone(), device.clone()
            host[chunks], device[chunks] = host[chunks].sum(), device[chunks].sum()
        expect(
            torch.equal(host, device),
            MetadataError,
            "attention metadata: seq_lens differ between host and device",
        )

    def _build_layout(self) -> Layout:
        device = self.kv_lens_cuda.device
        lens = self._seq_lens_cuda.to(torch.int64)
        tokens = torch.arange(self._num_tokens, device=device)
        ends = lens.cumsum(0)
        # unlike repeat_interleave, valid for the meaningless lengths of `record_launches` too
        seq = torch.searchsorted(ends, tokens, right=True).clamp_max(self.num_seqs - 1)
        kv_lens = self.kv_lens_cuda.to(torch.int64)
        limit = self.kv_write_limit.to(torch.int64)
        offset = tokens - (ends - lens)[seq]
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

    def _groups(self) -> list[Group]:
        groups: list[Group] = []
        first_seq = first_row = 0
        for query_rows, members in groupby(self._seq_lens.tolist()):
            count = len(list(members))
            groups.append(Group(first_seq, count, first_row, query_rows))
            first_seq += count
            first_row += count * query_rows
        return groups

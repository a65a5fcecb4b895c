"""Attention metadata as the host has it: lengths, and the views that its kernels really read."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.hosts.embedded.attention import find_backend
from mtp_plugin.hosts.embedded.attention.bridge import PagedCache
from mtp_plugin.hosts.embedded.attention.types import Group, Layout
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from tests.contract_host.kv_cache import KVCacheManager

BUFFERS = ("kv_lens_cuda", "kv_lens", "prompt_lens_cuda", "host_request_types")


class AttentionMetadata:
    """One step's; an object may serve many, `prepare` fills it anew.

    Rows without a block are written to an extra block, and counted in `spilled_rows`.
    """

    def __init__(self, max_num_requests: int, manager: KVCacheManager, pools: PagedKVPools) -> None:
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = manager
        self.pools = pools
        self.backend = find_backend("sdpa")
        self.is_cuda_graph = False
        self.use_spec_decoding = True
        self.all_rank_num_tokens: list[int] | None = None
        self.request_ids: list[int] = []
        self.prompt_lens: list[int] = []
        self.kv_cache_params = SimpleNamespace(
            use_cache=True, num_cached_tokens_per_seq=[], num_extra_kv_tokens=0
        )
        for name in BUFFERS:
            setattr(self, name, torch.full((max_num_requests,), -(2**30), dtype=torch.int32))
        self._seq_lens = torch.zeros(0, dtype=torch.int32)
        self._seq_lens_cuda = torch.zeros(0, dtype=torch.int32)
        self._num_contexts = 0
        self.spilled_rows = 0
        self._derived: tuple[Any, Layout] | None = None
        self.on_update()

    # ---- lengths ----

    @property
    def num_seqs(self) -> int:
        return int(self._seq_lens.shape[0])

    @property
    def num_contexts(self) -> int:
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value: int) -> None:
        self._num_contexts = value
        self.on_update()

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value: torch.Tensor) -> None:
        self._seq_lens, self._seq_lens_cuda = value, value.clone()
        self.on_update()

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        return self._seq_lens_cuda

    def on_update(self) -> None:
        """These three are stale until it is called."""
        self.num_ctx_tokens = int(self._seq_lens[: self._num_contexts].sum())
        self.num_tokens = int(self._seq_lens.sum())
        self.num_generations = self.num_seqs - self._num_contexts

    def on_update_kv_lens(self) -> None:
        """Nothing is derived before it is read."""

    def update_for_spec_dec(self) -> None:
        """Nothing is derived before it is read."""

    # ---- a step ----

    def prepare(self) -> None:
        """Lengths after the step, and the views of its rows."""
        rows = self.num_seqs
        assert rows <= self.max_num_requests
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        assert cached.shape == self._seq_lens.shape
        self.kv_lens_cuda[:rows] = cached + self._seq_lens
        self.kv_lens[:rows] = cached + self._seq_lens + self.kv_cache_params.num_extra_kv_tokens
        self.prompt_lens_cuda[:rows] = torch.tensor(self.prompt_lens, dtype=torch.int32)
        self.host_request_types[: self._num_contexts] = 0
        self.host_request_types[self._num_contexts : rows] = 1
        for name in BUFFERS:
            setattr(self, f"{name}_runtime", getattr(self, name)[:rows])
        tables = [self.kv_cache_manager.tables[request_id] for request_id in self.request_ids]
        # room for what a draft loop writes after the reserved rows
        width, spare = max(map(len, tables)) + 2, self.kv_cache_manager.num_blocks
        padded = [table + [spare] * (width - len(table)) for table in tables]
        self._blocks = torch.tensor(padded, dtype=torch.int64)
        self._derived = None

    def create_cuda_graph_metadata(self, max_batch_size: int, max_draft_tokens: int) -> Any:
        """Of a shrunken size, generations alone."""
        view = AttentionMetadata(max_batch_size, self.kv_cache_manager, self.pools)
        view.is_cuda_graph = True
        view.seq_lens = torch.full((max_batch_size,), 1 + max_draft_tokens, dtype=torch.int32)
        return view

    # ---- attention ----

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for transformers modules."""
        return {
            "past_key_values": PagedCache(self),
            "attention_mask": None,
            "use_cache": True,
            "attn_metadata": self,
        }

    def layout(self) -> Layout:
        """Which rows are written and read, from the views and lengths as they are now."""
        lengths = self.kv_lens_cuda_runtime.tolist(), self._seq_lens_cuda.tolist()
        key = (*lengths, self._seq_lens.tolist(), self._num_contexts)
        if self._derived is None or self._derived[0] != key:
            self._derived = (key, self._derive())
        return self._derived[1]

    def _derive(self) -> Layout:
        types = self.host_request_types_runtime
        assert int((types == 0).sum()) == self._num_contexts, "request types are stale"
        lens, kv_lens = self._seq_lens_cuda.long(), self.kv_lens_cuda_runtime.long()
        assert torch.equal(self._seq_lens, self._seq_lens_cuda), "query rows differ on the device"
        assert len(set(self._seq_lens[self._num_contexts :].tolist())) <= 1, "ragged generations"
        rows = torch.repeat_interleave(torch.arange(self.num_seqs), lens)
        starts = lens.cumsum(0) - lens
        positions = (kv_lens - lens)[rows] + torch.arange(len(rows)) - starts[rows]
        assert int(positions.min()) >= 0, "KV lengths fell below the query rows"
        size = self.pools.block_size
        places = positions // size
        assert int(places.max()) < self._blocks.shape[1], "a row far outside its sequence's blocks"
        blocks = self._blocks[rows, places]
        self.spilled_rows += int((blocks == self.kv_cache_manager.num_blocks).sum())
        keys = (self._blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
        groups: list[Group] = []
        first_seq = first_row = 0
        for query_rows, members in groupby(self._seq_lens.tolist()):
            count = len(list(members))
            groups.append(Group(first_seq, count, first_row, query_rows))
            first_seq, first_row = first_seq + count, first_row + count * query_rows
        return Layout(
            positions=positions,
            alive=torch.ones_like(rows, dtype=torch.bool),
            write_rows=blocks * size + positions % size,
            read_rows=keys,
            readable=torch.arange(keys.shape[1]) < kv_lens.unsqueeze(1),
            groups=groups,
        )

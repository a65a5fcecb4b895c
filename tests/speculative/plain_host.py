"""A host engine of the public Plain* classes, with the fields that a test sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import RequestState
from mtp_plugin.speculative.host.plain import PlainAttentionMetadata, PlainRequest


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Request(PlainRequest):
    """A host's request: its options are fields with TensorRT-LLM's names, not ``facts``."""

    def __init__(self, request_id: int, tokens: Sequence[int] = (1, 2, 3), **fields: Any) -> None:
        super().__init__(request_id, tokens, SamplingParams(), max_seq_len=2**20)
        del self.facts
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def output(self) -> list[int]:
        return self.output_token_ids

    def generate(self) -> None:
        """The prompt has been processed."""
        self.context_chunk_size = self.context_remaining_length
        self.move_to_next_context_chunk()
        self.state = RequestState.GENERATION_IN_PROGRESS


class Attention(PlainAttentionMetadata):
    """Metadata of such query rows, without KV lengths on the device."""

    def __init__(
        self, seq_lens: list[int], num_contexts: int, *, num_cached: list[int] | None = None
    ) -> None:
        self._seq_lens, self._seq_lens_cuda = int32(seq_lens), int32(seq_lens)
        self.num_contexts = num_contexts
        self.is_cuda_graph = False
        self.kv_cache_params = SimpleNamespace(
            use_cache=True, num_cached_tokens_per_seq=num_cached or [10] * len(seq_lens)
        )


class KVAttention(Attention):
    """With KV lengths on the device and request types on the host; counts its refreshes."""

    supports_dead_rows = False
    reads_cached_token_counts = False

    def __init__(self, seq_lens: list[int], num_contexts: int, kv_lens: list[int]) -> None:
        cached = [kv_len - rows for kv_len, rows in zip(kv_lens, seq_lens, strict=True)]
        super().__init__(seq_lens, num_contexts, num_cached=cached)
        self.refreshed: Counter[str] = Counter()
        self.kv_lens_cuda = int32(kv_lens)
        self.host_request_types = int32([0] * num_contexts + [1] * self.num_generations)
        self.request_ids: list[int] | None = None

    def on_update_kv_lens(self) -> None:
        self.refreshed["kv_lens"] += 1

    def update_for_spec_dec(self) -> None:
        self.refreshed["spec_dec"] += 1


class LimitedAttention(KVAttention):
    """With write limits, as the embedded executor has them; rows before the start are legal."""

    supports_dead_rows = True

    def __init__(self, seq_lens: list[int], num_contexts: int, kv_lens: list[int]) -> None:
        super().__init__(seq_lens, num_contexts, kv_lens)
        self.kv_write_limit = int32(kv_lens)
        self.kv_capacity = int32([kv_len + 8 for kv_len in kv_lens])


class PlainAttributes(SimpleNamespace):
    """The same fields without a property among them."""

    def __init__(self, seq_lens: list[int], num_contexts: int) -> None:
        lens, device_lens = int32(seq_lens), int32(seq_lens)
        super().__init__(
            _seq_lens=lens,
            seq_lens=lens,
            _seq_lens_cuda=device_lens,
            seq_lens_cuda=device_lens,
            num_contexts=num_contexts,
            num_seqs=len(seq_lens),
            num_generations=len(seq_lens) - num_contexts,
            num_ctx_tokens=sum(seq_lens[:num_contexts]),
            is_cuda_graph=False,
            kv_cache_params=None,
        )

    def on_update(self) -> None:
        pass

"""Changes of the attention metadata in the draft loop.

Nothing else changes the metadata. Every field that the loop changes is bound to a tensor of the
loop; on exit, exceptions included, the originals are restored, on host and device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from mtp_plugin.errors import MetadataError, expect
from mtp_plugin.ops.step import to_device


def kv_floor(attn_metadata: Any, rows: int) -> int | None:
    """Return the minimum KV length of a generation that feeds ``rows`` rows: ``rows``, or None if
    the attention backend accepts rows at negative positions (``supports_dead_rows``)."""
    return None if getattr(attn_metadata, "supports_dead_rows", False) else rows


def _reads_counts(attn_metadata: Any) -> bool:
    """Return whether the attention backend reads ``num_cached_tokens_per_seq`` between passes.

    The metadata's ``reads_cached_token_counts`` decides; without it, the list is read if there are
    no KV lengths on the device. Updating the list by accepted tokens waits for the device.
    """
    params = getattr(attn_metadata, "kv_cache_params", None)
    if params is None:
        return False
    declared: bool | None = getattr(attn_metadata, "reads_cached_token_counts", None)
    if declared is not None:
        return declared
    if isinstance(getattr(attn_metadata, "kv_lens_cuda", None), torch.Tensor):
        return False
    return isinstance(getattr(params, "num_cached_tokens_per_seq", None), list)


@contextmanager
def draft_loop(attn_metadata: Any) -> Iterator[DraftLoop]:
    """Context manager: a :class:`DraftLoop` over the metadata, whose fields are restored on exit.

    Raises:
        MetadataError: a draft loop over this metadata is already open.
    """
    loop = DraftLoop(attn_metadata)
    loop.open()
    try:
        yield loop
    finally:
        loop.close()


class DraftLoop:
    """Changes attention metadata for the passes of a draft loop.

    Fields are bound to new tensors; the original tensors are not written. KV lengths are computed
    here, unless a kernel has computed them before.
    """

    _ones: ClassVar[dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]] = {}

    def __init__(self, attn_metadata: Any) -> None:
        self._metadata = attn_metadata
        self._originals: dict[str, Any] = {}
        self._num_contexts = 0
        self._num_cached_tokens: list[int] | None = None
        self._host_kv_lens: torch.Tensor | None = None  # for backends that read counts on the host

    def open(self) -> None:
        """Begin. Fields are copied only when they change."""
        metadata = self._metadata
        expect(
            not getattr(metadata, "_draft_loop_open", False),
            MetadataError,
            "draft loop: this attention metadata is already changed for a draft loop",
        )
        self._num_contexts = metadata.num_contexts
        if not metadata.is_cuda_graph and _reads_counts(metadata):
            params = metadata.kv_cache_params
            counts = params.num_cached_tokens_per_seq
            expect(
                len(counts) == metadata.num_seqs,
                MetadataError,
                f"num_cached_tokens_per_seq: expected {metadata.num_seqs}, got {len(counts)}",
            )
            self._host_kv_lens = torch.tensor(counts) + metadata._seq_lens
            self._num_cached_tokens = counts
            params.num_cached_tokens_per_seq = list(counts)
        metadata._draft_loop_open = True

    def close(self) -> None:
        """Restore the original fields."""
        metadata = self._metadata
        for name, original in self._originals.items():
            setattr(metadata, name, original)
        if self._num_cached_tokens is not None:
            metadata.kv_cache_params.num_cached_tokens_per_seq = self._num_cached_tokens
            self._num_cached_tokens = None
        metadata.num_contexts = self._num_contexts
        del metadata._draft_loop_open
        self._changed("on_update_kv_lens")

    @property
    def kv_lens(self) -> torch.Tensor | None:
        """Return the KV lengths of the loop on the device, which may be increased in place; None if
        the metadata has none."""
        lens: torch.Tensor | None = getattr(self._metadata, "kv_lens_cuda", None)
        return lens if "kv_lens_cuda" in self._originals else None

    def feed_window(
        self,
        num_accepted: torch.Tensor,
        step_rows: int,
        window: int,
        history_lens: list[int] | None = None,
        kv_lens: torch.Tensor | None = None,
    ) -> None:
        """Vanilla: every generation feeds ``window`` rows that end at its last accepted position.

        ``seq_lens`` of generations decrease by K+1 - window and ``kv_lens`` by K+1 - n, where n is
        the number of accepted tokens; ``seq_lens`` of contexts include the history rows before
        their chunk.

        Args:
            num_accepted: [R] int32. step_rows: K+1. history_lens: per context, on the host.
            kv_lens: [>= R] the resulting lengths, if they are known; the loop may write to them.
        """
        metadata = self._metadata
        has_history = history_lens is not None and any(history_lens)
        if has_history or window != step_rows:
            host, device = metadata._seq_lens.clone(), metadata._seq_lens_cuda.clone()
            if has_history:
                self._lengthen(history_lens or [], host, device)
                self._lengthen_prompts(history_lens or [])
            generations = slice(metadata.num_contexts, metadata.num_seqs)
            host[generations] -= step_rows - window
            device[generations] -= step_rows - window
            self._rebind_seq_lens(host, device)
        self._rewind(num_accepted, step_rows, window, 0, kv_lens)
        self._changed("on_update_kv_lens")

    def feed_single_rows(
        self,
        num_accepted: torch.Tensor,
        max_draft_len: int,
        real_contexts: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
    ) -> None:
        """Eagle, before pass 2: every request feeds one row, after its last accepted position.

        Contexts become generations, unless the metadata's ``kv_cache_manager`` is None.

        Args:
            num_accepted: [R] int32. max_draft_len: K.
            real_contexts: [C] bool; the others are padding rows from here on. None: all.
            kv_lens: as :meth:`feed_window`.
        """
        metadata = self._metadata
        num_contexts = metadata.num_contexts
        self._rewind(num_accepted, max_draft_len, 1, 1, kv_lens)
        self._rebind_seq_lens(
            torch.ones_like(metadata._seq_lens), self._ones_like(metadata._seq_lens_cuda)
        )
        # without a KV cache, backends read contexts as such in every pass
        if getattr(metadata, "kv_cache_manager", True) is not None:
            self._end_contexts(num_contexts, real_contexts)
        if getattr(metadata, "use_spec_decoding", False):
            # kernels for K+1 query rows per generation
            self._rebind("use_spec_decoding", False)
        self._changed("update_for_spec_dec", "on_update_kv_lens")

    def _end_contexts(self, num_contexts: int, real_contexts: torch.Tensor | None) -> None:
        """Make contexts generations for passes that read the KV cache."""
        metadata = self._metadata
        if isinstance(getattr(metadata, "host_request_types", None), torch.Tensor):
            types = metadata.host_request_types.clone()
            types[:num_contexts] = 1
            self._rebind("host_request_types", types)
        if isinstance(getattr(metadata, "kv_write_limit", None), torch.Tensor):
            limit = metadata.kv_capacity
            if real_contexts is not None:
                limit = limit.clone()
                limit[:num_contexts] *= real_contexts.to(limit.dtype)
            self._rebind("kv_write_limit", limit)
        if num_contexts > 0 and getattr(metadata, "enable_flash_mla", False):
            # its first row is that of the first generation, which now is request 0
            self._rebind("block_ids_per_seq", metadata.kv_block_ids_per_seq)
        metadata.num_contexts = 0

    def advance(self, *, moved: bool = False) -> None:
        """Eagle, between later passes: every request feeds its next row.

        Args:
            moved: :attr:`kv_lens` were increased already.
        """
        if not moved and self.kv_lens is not None:
            self.kv_lens[: self._metadata.num_seqs] += 1
        if self._host_kv_lens is not None:
            self._host_kv_lens += 1
        self._changed("update_for_spec_dec", "on_update_kv_lens")

    def set_rank_counts(self, counts: Sequence[int] | None) -> None:
        """Set ``all_rank_num_tokens`` for the next passes, if several ranks exchange rows and the
        metadata has this field."""
        several = counts is not None and len(counts) > 1
        if several and hasattr(self._metadata, "all_rank_num_tokens"):
            self._rebind("all_rank_num_tokens", counts)

    def _lengthen(self, rows: list[int], host: torch.Tensor, device: torch.Tensor) -> None:
        """Add ``rows`` to the lengths of contexts, on host and device."""
        contexts = slice(0, self._metadata.num_contexts)
        host[contexts] += torch.tensor(rows, dtype=host.dtype)
        device[contexts] += to_device(rows, device.dtype, device.device)

    def _lengthen_prompts(self, rows: list[int]) -> None:
        """Add ``rows`` to ``prompt_lens``, which kernels read as the query rows of contexts."""
        host = getattr(self._metadata, "prompt_lens_cpu", None)
        device = getattr(self._metadata, "prompt_lens_cuda", None)
        if isinstance(host, torch.Tensor) and isinstance(device, torch.Tensor):
            host, device = host.clone(), device.clone()
            self._lengthen(rows, host, device)
            self._rebind("prompt_lens_cpu", host)
            self._rebind("prompt_lens_cuda", device)

    def _rebind(self, name: str, value: Any) -> None:
        metadata = self._metadata
        self._originals.setdefault(name, getattr(metadata, name))
        setattr(metadata, name, value)
        # TensorRT-LLM's kernels read this view, which prepare() made of the field
        view = getattr(metadata, f"{name}_runtime", None)
        if isinstance(view, torch.Tensor):
            self._originals.setdefault(f"{name}_runtime", view)
            setattr(metadata, f"{name}_runtime", value[: view.shape[0]])

    def _rebind_seq_lens(self, host: torch.Tensor, device: torch.Tensor) -> None:
        for name, value in (("seq_lens", host), ("seq_lens_cuda", device)):
            self._rebind(f"_{name}", value)
            # a property in most host engines; a plain attribute would keep the original
            if name in getattr(self._metadata, "__dict__", {}):
                self._rebind(name, value)

    def _rewind(
        self,
        num_accepted: torch.Tensor,
        step_rows: int,
        fed_rows: int,
        context_rows: int,
        kv_lens: torch.Tensor | None,
    ) -> None:
        """KV lengths: contexts + context_rows, generations - (step_rows - n)."""
        metadata = self._metadata
        contexts = slice(0, metadata.num_contexts)
        generations = slice(metadata.num_contexts, metadata.num_seqs)
        original = getattr(metadata, "kv_lens_cuda", None)
        own = kv_lens
        if own is None and isinstance(original, torch.Tensor):
            own = original.clone()
        for lens in (None if own is kv_lens else own, self._host_kv_lens):
            if lens is None:
                continue
            if context_rows:
                lens[contexts] += context_rows
            # only for the host list this waits for the device
            lens[generations] -= (step_rows - num_accepted[generations]).to(lens)
            floor = kv_floor(metadata, fed_rows)
            if floor is not None:
                lens[generations].clamp_(min=floor)
        if own is not None:
            self._rebind("kv_lens_cuda", own)

    @classmethod
    def _ones_like(cls, lens: torch.Tensor) -> torch.Tensor:
        """Return cached, read-only ones, so that a captured loop launches no kernel for them.

        Shorter ones stay cached, because a graph may read them.
        """
        kept = cls._ones.setdefault((lens.device, lens.dtype), [])
        size = lens.shape[0]
        if not kept or kept[-1].shape[0] < size:
            # in powers of two, so that few are cached
            ones = lens.new_ones(1 << max(size - 1, 0).bit_length())
            if lens.is_cuda and torch.cuda.is_current_stream_capturing():
                return ones[:size]
            kept.append(ones)
        return kept[-1][:size]

    def _changed(self, *hooks: str) -> None:
        """Update what depends on the lengths: the host list, and by the first hook that exists."""
        metadata = self._metadata
        if self._num_cached_tokens is not None and self._host_kv_lens is not None:
            cached = self._host_kv_lens - metadata._seq_lens
            metadata.kv_cache_params.num_cached_tokens_per_seq[:] = cached.tolist()
        metadata.on_update()
        for hook in hooks:
            method = getattr(metadata, hook, None)
            if method is not None:
                method()
                return

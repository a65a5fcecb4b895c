"""Per-step speculative metadata, and the changes that the draft loop makes to attention metadata.

``MTPSpecMetadata`` keeps TensorRT-LLM's fields. ``draft_loop`` is the only place that changes a
host's attention metadata: it rebinds every field it touches to a tensor of its own and puts the
originals back on exit, also when the body raises, so that the loop leaves no trace on host or
device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mtp_plugin.batch import RowParameters, to_device
from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import MetadataError, expect
from mtp_plugin.requests.states import is_graph_dummy_id


@dataclass(kw_only=True)
class MTPSpecMetadata:
    """Speculative metadata of one step; buffers are allocated once and keep their addresses.

    The host assigns the per-step fields (``num_generations`` to ``all_rank_num_seqs``) and then
    calls :meth:`prepare` once per forward. Source of the names: TensorRT-LLM's ``MTPSpecMetadata``.
    """

    max_num_requests: int
    max_draft_len: int
    spec_dec_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.MTP
    max_total_draft_tokens: int | None = None
    runtime_draft_len: int | None = None
    is_cuda_graph: bool = False
    num_generations: int = 0
    num_tokens: int = 0
    draft_tokens: torch.Tensor | None = None  # [G*K] int32
    draft_lens: torch.Tensor | None = None  # [G] int32; None: K everywhere
    next_prompt_tokens: torch.Tensor | None = None  # [C] int32, -1 where the chunk ends the prompt
    request_ids: Sequence[int] | None = None
    seq_lens: Sequence[int] | None = None
    gather_ids: torch.Tensor | None = None
    num_accepted_draft_tokens: torch.Tensor | None = None  # carried for hosts, not read
    num_extra_kv_tokens: int | None = 0  # carried for hosts, not read
    num_layers: int = 0  # carried for hosts, not read
    is_spec_dec_tree: bool = False  # drafts are linear
    is_spec_dec_dynamic_tree: bool = False
    all_rank_num_tokens: list[int] | None = None
    all_rank_max_num_tokens: int | None = None
    mtp_num_modules: int = 1
    mtp_hidden_states_manager: Any | None = None
    mtp_hidden_states_ptrs: torch.Tensor | None = None  # carried for hosts, not read
    mtp_past_tokens_ptrs: torch.Tensor | None = None  # carried for hosts, not read
    slot_ids: torch.Tensor | None = None  # [max_num_requests] int64
    batch_indices_cuda: torch.Tensor | None = None  # [max_num_requests] int32
    draft_token_indices_cuda: torch.Tensor | None = None  # [mtp_num_modules] int64: 0, 1, ...
    subseq_all_rank_num_tokens: list[int] | None = None
    row_parameters: RowParameters | None = None
    max_position: int | None = None  # highest legal position id; None: unbounded
    draft_window: str = "exact"  # as the worker's: decides the draft tokens that prepare() counts
    device: torch.device | None = None
    _all_rank_num_seqs: list[int] | None = None

    def __post_init__(self) -> None:
        if self.device is None:
            manager = self.mtp_hidden_states_manager
            if manager is not None:
                self.device = torch.device(manager.device)
            else:
                self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.max_total_draft_tokens is None:
            self.max_total_draft_tokens = self.max_draft_len
        self.batch_indices_cuda = torch.zeros(
            self.max_num_requests, dtype=torch.int32, device=self.device
        )
        self.draft_token_indices_cuda = torch.arange(
            self.mtp_num_modules, dtype=torch.int64, device=self.device
        )
        if self.mtp_hidden_states_manager is not None:
            self.slot_ids = torch.zeros(
                self.max_num_requests, dtype=torch.int64, device=self.device
            )

    @property
    def all_rank_num_seqs(self) -> list[int] | None:
        """Sequences per rank under attention data parallelism."""
        return self._all_rank_num_seqs

    @all_rank_num_seqs.setter
    def all_rank_num_seqs(self, value: list[int] | None) -> None:
        self._all_rank_num_seqs = value
        # later passes of a reused layer have one token per sequence
        if _is_eagle(self.spec_dec_mode):
            self.subseq_all_rank_num_tokens = value

    def prepare(self) -> None:
        """Fill the device buffers of this step; call once, on the object that the forward uses.

        Raises:
            MetadataError: a request without a slot, or more requests than the buffers hold.
        """
        request_ids = self.request_ids
        expect(
            request_ids is not None,
            MetadataError,
            "prepare(): request_ids must be assigned before it is called",
        )
        num_seqs = len(request_ids or ())
        expect(
            num_seqs <= self.max_num_requests,
            MetadataError,
            f"prepare(): {num_seqs} requests, but max_num_requests is {self.max_num_requests}",
        )
        self._upload(self.batch_indices_cuda, list(range(num_seqs)), torch.int32)
        if _is_vanilla(self.spec_dec_mode) and self.draft_window == "trtllm":
            self.num_tokens -= self.num_generations
        if self.mtp_hidden_states_manager is not None:
            slots = [self.slot_of(request_id) for request_id in request_ids or ()]
            self._upload(self.slot_ids, slots, torch.int64)

    def create_cuda_graph_metadata(self, max_batch_size: int) -> MTPSpecMetadata:
        """A view for graphs of up to ``max_batch_size`` rows with buffers of its own."""
        if self.is_cuda_graph:
            return self
        view = copy.copy(self)
        view.is_cuda_graph = True
        view.max_num_requests = max_batch_size
        view.__post_init__()
        return view

    @property
    def is_all_greedy_sample(self) -> bool:
        """True: hosts that draw otherwise capture graphs of their own for that."""
        return True

    def populate_sampling_params_for_one_model(self, requests: Any) -> None:
        """Nothing: decoding is greedy."""

    def update_is_all_greedy_sample(self, requests: Any) -> None:
        """Nothing: it always is."""

    def is_layer_capture(self, layer_id: int) -> bool:  # noqa: ARG002
        """False: MTP reads the target's last states alone."""
        return False

    def maybe_capture_hidden_states(
        self,
        layer_id: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Nothing: no layer is captured."""

    def slot_of(self, request_id: int) -> int:
        """The request's row in the manager's pools; padding rows have the sentinel slot.

        Raises:
            MetadataError: the manager gave it none.
        """
        manager = self.mtp_hidden_states_manager
        slot = manager.slot_manager.get_slot(request_id) if manager is not None else None
        if slot is None and manager is not None and is_graph_dummy_id(request_id):
            slot = manager.sentinel_slot
        if slot is None:
            raise MetadataError(f"request {request_id} has no slot in the MTP manager")
        return int(slot)

    @staticmethod
    def _upload(buffer: torch.Tensor | None, values: list[int], dtype: torch.dtype) -> None:
        if buffer is None or not values:
            return
        host = torch.tensor(values, dtype=dtype)
        if buffer.is_cuda:
            host = host.pin_memory()
        buffer[: len(values)].copy_(host, non_blocking=True)


def _is_eagle(mode: Any) -> bool:
    """Whether one layer drafts all tokens; hosts' modes may call the one-model way by a name of its
    own."""
    names = ("is_mtp_eagle", "is_mtp_eagle_one_model")
    return any(getattr(mode, name)() for name in names if hasattr(mode, name))


def _is_vanilla(mode: Any) -> bool:
    """Whether there is a layer per depth; older modes ask by value."""
    asked = getattr(mode, "is_mtp_vanilla", None)
    return bool(asked()) if asked is not None else getattr(mode, "name", None) == "MTP"


def kv_floor(attn_metadata: Any, rows: int) -> int | None:
    """The least KV length of a generation that feeds ``rows`` rows: as many, except where the host
    takes rows at negative positions; None then."""
    return None if getattr(attn_metadata, "supports_dead_rows", False) else rows


@contextmanager
def draft_loop(attn_metadata: Any) -> Iterator[DraftLoop]:
    """Change attention metadata for the draft loop; every field is put back on exit.

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
    """The changes that the draft loop makes: fields are rebound to tensors of its own, not edited.

    KV lengths may be handed in ready made, by kernels that computed them on the way; otherwise they
    are computed here.
    """

    _ones: ClassVar[dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]] = {}

    def __init__(self, attn_metadata: Any) -> None:
        self._metadata = attn_metadata
        self._originals: dict[str, Any] = {}
        self._num_contexts = 0
        self._num_cached_tokens: list[int] | None = None
        self._host_kv_lens: torch.Tensor | None = None  # for backends that read counts on the host

    def open(self) -> None:
        """Start changing; nothing is copied before it changes."""
        metadata = self._metadata
        expect(
            not getattr(metadata, "_draft_loop_open", False),
            MetadataError,
            "draft loop: this attention metadata is already changed for a draft loop",
        )
        self._num_contexts = metadata.num_contexts
        params = getattr(metadata, "kv_cache_params", None)
        reads_counts = getattr(metadata, "reads_cached_token_counts", False)
        if params is not None and reads_counts and not metadata.is_cuda_graph:
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
        """Put the originals back."""
        metadata = self._metadata
        for name, original in self._originals.items():
            setattr(metadata, name, original)
        if self._num_cached_tokens is not None:
            metadata.kv_cache_params.num_cached_tokens_per_seq = self._num_cached_tokens
            self._num_cached_tokens = None
        metadata.num_contexts = self._num_contexts
        del metadata._draft_loop_open
        self._changed()

    @property
    def kv_lens(self) -> torch.Tensor | None:
        """The loop's own KV lengths on the device, free to be moved on in place; None where the
        host has none."""
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
        """Vanilla: a generation feeds ``window`` rows that end at its last accepted position.

        ``seq_lens`` of generations fall by K+1 - window and ``kv_lens`` by K+1 - n; those of
        contexts count the history rows in front of their chunk.

        Args:
            num_accepted: [R] int32. step_rows: K+1. history_lens: per context, on the host.
            kv_lens: [>= R] the lengths that result, where they are known; the loop owns them now.
        """
        metadata = self._metadata
        has_history = history_lens is not None and any(history_lens)
        if has_history or window != step_rows:
            host, device = metadata._seq_lens.clone(), metadata._seq_lens_cuda.clone()
            if has_history:
                contexts = slice(0, metadata.num_contexts)
                lens = history_lens or []
                host[contexts] += torch.tensor(lens, dtype=host.dtype)
                device[contexts] += to_device(lens, device.dtype, device.device)
            generations = slice(metadata.num_contexts, metadata.num_seqs)
            host[generations] -= step_rows - window
            device[generations] -= step_rows - window
            self._rebind_seq_lens(host, device)
        self._rewind(num_accepted, step_rows, window, 0, kv_lens)
        self._changed()

    def feed_single_rows(
        self,
        num_accepted: torch.Tensor,
        max_draft_len: int,
        real_contexts: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
    ) -> None:
        """Eagle, before pass 2: one row per request, right behind its last accepted position.

        Args:
            num_accepted: [R] int32. max_draft_len: K.
            real_contexts: [C] bool; the others are padding rows from here on. None: all are real.
            kv_lens: as :meth:`feed_window`.
        """
        metadata = self._metadata
        num_contexts = metadata.num_contexts
        self._rewind(num_accepted, max_draft_len, 1, 1, kv_lens)
        self._rebind_seq_lens(
            torch.ones_like(metadata._seq_lens), self._ones_like(metadata._seq_lens_cuda)
        )
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
        metadata.num_contexts = 0
        self._changed()

    def advance(self, *, moved: bool = False) -> None:
        """Eagle, between later passes: every request one row further.

        Args:
            moved: :attr:`kv_lens` were moved on already.
        """
        if not moved and self.kv_lens is not None:
            self.kv_lens[: self._metadata.num_seqs] += 1
        if self._host_kv_lens is not None:
            self._host_kv_lens += 1
        self._changed()

    def _rebind(self, name: str, value: torch.Tensor) -> None:
        metadata = self._metadata
        self._originals.setdefault(name, getattr(metadata, name))
        setattr(metadata, name, value)
        # TensorRT-LLM's kernels read a view of the step's rows, bound when the step was prepared
        view = getattr(metadata, f"{name}_runtime", None)
        if isinstance(view, torch.Tensor):
            self._originals.setdefault(f"{name}_runtime", view)
            setattr(metadata, f"{name}_runtime", value[: view.shape[0]])

    def _rebind_seq_lens(self, host: torch.Tensor, device: torch.Tensor) -> None:
        for name, value in (("seq_lens", host), ("seq_lens_cuda", device)):
            self._rebind(f"_{name}", value)
            # a property on most hosts; a plain attribute would keep showing the original
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
            # only backends that declare to read the host list pay for this read-back
            lens[generations] -= (step_rows - num_accepted[generations]).to(lens)
            floor = kv_floor(metadata, fed_rows)
            if floor is not None:
                lens[generations].clamp_(min=floor)
        if own is not None:
            self._rebind("kv_lens_cuda", own)

    @classmethod
    def _ones_like(cls, lens: torch.Tensor) -> torch.Tensor:
        """Ones that nobody writes to; kept, so that a captured loop launches nothing for them.

        Those that became too short are kept too: a graph may read them.
        """
        kept = cls._ones.setdefault((lens.device, lens.dtype), [])
        size = lens.shape[0]
        if not kept or kept[-1].shape[0] < size:
            # in powers of two, so that few are kept
            ones = lens.new_ones(1 << max(size - 1, 0).bit_length())
            if lens.is_cuda and torch.cuda.is_current_stream_capturing():
                return ones[:size]
            kept.append(ones)
        return kept[-1][:size]

    def _changed(self) -> None:
        metadata = self._metadata
        if self._num_cached_tokens is not None and self._host_kv_lens is not None:
            cached = self._host_kv_lens - metadata._seq_lens
            metadata.kv_cache_params.num_cached_tokens_per_seq[:] = cached.tolist()
        metadata.on_update()
        for hook in ("on_update_kv_lens", "update_for_spec_dec"):
            method = getattr(metadata, hook, None)
            if method is not None:
                method()

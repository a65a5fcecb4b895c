"""Per-step speculative metadata, with TensorRT-LLM's fields."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, MetadataError, expect, expect_int, format_value
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.speculative.host import (
    STATES_POOL,
    TOKENS_POOL,
    expect_distinct_ids,
    is_eagle,
    is_vanilla,
    manager_device,
    manager_slot,
    needs_sampling,
    pool_of,
    sampling_kind_of,
)


class SlotPointers:
    """Attribute [max_num_requests] int64: where the row of each request's slot in a pool begins.

    None without such a pool or without ``slot_ids``. A value other than None that a host assigns
    replaces the computed one.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, spec: Any, value: Any) -> None:
        vars(spec)[self.name] = value

    def __get__(self, spec: Any, _: type | None = None) -> Any:
        if spec is None:
            return None  # the default of the dataclass field
        assigned = vars(spec).get(self.name)
        if assigned is not None:
            return assigned
        pool = pool_of(spec.mtp_hidden_states_manager, self.pool)
        if spec.slot_ids is None or not isinstance(pool, torch.Tensor):
            return None
        return pool.data_ptr() + spec.slot_ids * (pool.stride(0) * pool.element_size())


@dataclass(kw_only=True)
class MTPSpecMetadata:
    """Speculative metadata of one step; buffers are allocated once and keep their addresses.

    The host assigns the per-step fields (``num_generations`` to ``all_rank_num_seqs``) and then
    calls :meth:`prepare` once per forward. Source of the names: TensorRT-LLM's ``MTPSpecMetadata``.

    ``mtp_hidden_states_manager`` may be a host's own with ``slot_manager`` and the pools of past
    tokens and hidden states, for steps whose requests are all greedy.

    Raises:
        ConfigError: a size, a draft window or a position that is out of range, or a manager without
            ``slot_manager``.
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
    prepared_ids: list[int] | None = field(default=None, init=False)
    """Ids that `prepare` was last called for; None before the first call."""
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
    slot_ids: torch.Tensor | None = None  # [max_num_requests] int64
    batch_indices_cuda: torch.Tensor | None = None  # [max_num_requests] int32
    draft_token_indices_cuda: torch.Tensor | None = None  # [mtp_num_modules] int64: 0, 1, ...
    subseq_all_rank_num_tokens: list[int] | None = None
    sampling_kind: SamplingKind | None = None
    """What the step's requests need at most; None: read from the manager by ``request_ids``."""
    is_all_greedy_sample: bool = True
    """Every request of :meth:`update_is_all_greedy_sample` needs only the argmax of its logits."""
    group_all_greedy_sample: bool | None = None  # agreed on by all ranks; None: not agreed
    max_position: int | None = None  # highest legal position id; None: unbounded
    draft_window: str = "exact"  # the worker's; decides the draft tokens that prepare() counts
    device: torch.device | None = None
    _all_rank_num_seqs: list[int] | None = None
    _force_non_greedy_for_capture: bool = False  # set while a host captures the other graph
    _scanned: list[Any] = field(default_factory=list)  # requests of the last scan
    _scanned_greedy: bool = True
    _num_indices: int = 0  # entries of batch_indices_cuda that are written
    # for kernels of hosts, not read here
    mtp_hidden_states_ptrs: Any = SlotPointers(STATES_POOL)
    mtp_past_tokens_ptrs: Any = SlotPointers(TOKENS_POOL)

    def __post_init__(self) -> None:
        for name, least in (("max_num_requests", 1), ("max_draft_len", 0), ("mtp_num_modules", 0)):
            value = vars(self)[name]
            expect_int(f"MTPSpecMetadata: {name}", value, minimum=least, error=ConfigError)
        if self.max_position is not None:
            name = "MTPSpecMetadata: max_position"
            expect_int(name, self.max_position, minimum=0, error=ConfigError)
        expect(
            self.draft_window in ("exact", "trtllm"),
            ConfigError,
            f"MTPSpecMetadata: draft_window: expected exact or trtllm, got "
            f"{format_value(self.draft_window)}",
        )
        manager = self.mtp_hidden_states_manager
        device = manager_device(manager)
        if self.device is None:
            self.device = device
        if self.max_total_draft_tokens is None:
            self.max_total_draft_tokens = self.max_draft_len
        self.batch_indices_cuda = torch.zeros(
            self.max_num_requests, dtype=torch.int32, device=self.device
        )
        self._num_indices = 0
        self.prepared_ids = None
        self.draft_token_indices_cuda = torch.arange(
            self.mtp_num_modules, dtype=torch.int64, device=self.device
        )
        if manager is not None:
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
        if is_eagle(self.spec_dec_mode):
            self.subseq_all_rank_num_tokens = value

    def prepare(self) -> None:
        """Fill the device buffers of this step; call once, on the object that the forward uses.

        Raises:
            MetadataError: a request without a slot or listed twice, more requests than the buffers
                hold, or a request with options that the captured step does not serve.
        """
        request_ids: Any = self.request_ids
        if request_ids is None or isinstance(request_ids, torch.Tensor):
            raise MetadataError(
                "prepare(): request_ids must be assigned before it is called, as a list"
            )
        num_seqs = len(request_ids)
        expect(
            num_seqs <= self.max_num_requests,
            MetadataError,
            f"prepare(): {num_seqs} requests, but max_num_requests is {self.max_num_requests}",
        )
        if num_seqs > self._num_indices:  # entries never change
            self._upload(self.batch_indices_cuda, list(range(num_seqs)), torch.int32)
            self._num_indices = num_seqs
        self.num_tokens = self.dp_num_tokens()
        if self.mtp_hidden_states_manager is not None:
            expect_distinct_ids(request_ids, self.mtp_hidden_states_manager)
            slots = [self.slot_of(request_id) for request_id in request_ids]
            self._upload(self.slot_ids, slots, torch.int64)
            self._expect_served_by_graph()
        self.prepared_ids = list(request_ids)

    def dp_num_tokens(self) -> int:
        """Return the number of rows of the first draft pass, from the target's ``num_tokens``.

        Ranks may exchange it before :meth:`prepare`, which stores it in ``num_tokens``.
        """
        is_row_short = is_vanilla(self.spec_dec_mode) and self.draft_window == "trtllm"
        return self.num_tokens - (self.num_generations if is_row_short else 0)

    def create_cuda_graph_metadata(self, max_batch_size: int) -> MTPSpecMetadata:
        """Return a copy with its own buffers for graphs of up to ``max_batch_size`` requests."""
        if self.is_cuda_graph:
            return self
        view = copy.copy(self)
        view.is_cuda_graph = True
        view.max_num_requests = max_batch_size
        view.__post_init__()
        return view

    def update_is_all_greedy_sample(self, requests: Iterable[Any]) -> None:
        """Set ``is_all_greedy_sample``: whether every request needs only the argmax of its logits.

        Hosts call it before they choose a graph, so logits processing and log-probabilities count
        like sampling. It clears the ranks' agreement, which was about the previous batch.
        """
        self.group_all_greedy_sample = None
        self.populate_sampling_params_for_one_model(requests)

    def populate_sampling_params_for_one_model(self, requests: Iterable[Any]) -> None:
        """Set ``is_all_greedy_sample``; an agreement of the ranks takes precedence.

        Sampling parameters are not copied here: the slots have them since admission.
        """
        if self.group_all_greedy_sample is not None:
            self.is_all_greedy_sample = self.group_all_greedy_sample
        elif self._force_non_greedy_for_capture:
            self.is_all_greedy_sample = False
        else:
            scanned = list(requests)
            if scanned != self._scanned:  # most steps have the requests of the step before
                self._scanned_greedy = not any(map(needs_sampling, scanned))
                self._scanned = scanned
            self.is_all_greedy_sample = self._scanned_greedy

    def is_layer_capture(self, layer_id: int) -> bool:  # noqa: ARG002
        """Return False: MTP reads only the target's last hidden states."""
        return False

    def maybe_capture_hidden_states(
        self,
        layer_id: int,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Do nothing: no layer is captured."""

    def slot_of(self, request_id: int) -> int:
        """Return the request's row in the manager's pools; padding rows have the sentinel slot.

        Raises:
            MetadataError: the request has no slot.
        """
        return manager_slot(self.mtp_hidden_states_manager, request_id)

    def _expect_served_by_graph(self) -> None:
        """Refuse to replay a greedy graph for a request that samples or processes its logits.

        Raises:
            MetadataError: naming such a request.
        """
        is_chosen = self.sampling_kind is not None or not self.is_all_greedy_sample
        if not self.is_cuda_graph or is_chosen:
            return
        manager, request_ids = self.mtp_hidden_states_manager, self.request_ids or ()
        if sampling_kind_of(manager, ()) or not sampling_kind_of(manager, request_ids):
            return  # every step serves every option, or all are greedy
        request_id = next(number for number in request_ids if sampling_kind_of(manager, (number,)))
        raise MetadataError(
            f"prepare(): request {request_id} needs more than the argmax of its logits, and this "
            "graph was chosen with is_all_greedy_sample=True: call "
            "update_is_all_greedy_sample() first, or set the manager's always_edits before capture"
        )

    @staticmethod
    def _upload(buffer: torch.Tensor | None, values: list[int], dtype: torch.dtype) -> None:
        if buffer is None or not values:
            return
        host = torch.tensor(values, dtype=dtype)
        if buffer.is_cuda:
            host = host.pin_memory()
        buffer[: len(values)].copy_(host, non_blocking=True)

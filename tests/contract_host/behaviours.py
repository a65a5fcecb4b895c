# ruff: noqa: ARG002, B027 - signatures are the host's
"""What the host's own base classes do, in plain classes of our own words.

`bodies` gives their methods by the recorded names, so that a generated package can take them in.
For that no method uses ``super()``: bases are called by name.
"""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tests.contract_host.line_rules import Line

GRAPH_DUMMY_ID = 2**64 - 1
ATTENTION_DP_DUMMY_ID = 0


class LlmRequestState(Enum):
    CONTEXT_INIT = auto()
    GENERATION_IN_PROGRESS = auto()
    GENERATION_TO_COMPLETE = auto()
    GENERATION_COMPLETE = auto()


class FinishReason(IntEnum):
    """Without ERROR, as the host's."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class SpeculativeDecodingMode(IntEnum):
    MTP = auto()
    MTP_EAGLE = auto()
    MTP_EAGLE_ONE_MODEL = auto()
    NONE = auto()

    def is_mtp_one_model(self) -> bool:
        return self.name in ("MTP", "MTP_EAGLE_ONE_MODEL")

    def is_mtp_vanilla(self) -> bool:
        return self.name == "MTP"

    def is_mtp_eagle_one_model(self) -> bool:
        return self.name == "MTP_EAGLE_ONE_MODEL"

    def is_mtp_eagle(self) -> bool:
        """The two-model way."""
        return self.name == "MTP_EAGLE"

    def support_overlap_scheduler(self) -> bool:
        return self.is_mtp_one_model()

    def without_logits(self) -> bool:
        return self.is_mtp_one_model()


@dataclass
class DecodingConfig:
    """The host's config of MTP: mutable."""

    max_draft_len: int | None = None
    num_nextn_predict_layers: int | None = None
    num_nextn_predict_layers_from_model_config: int | None = None
    max_total_draft_tokens: int | None = None
    use_mtp_vanilla: bool = False
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799
    draft_len_schedule: dict[int, int] | None = None
    decoding_type: str = "MTP"
    modes: Any = SpeculativeDecodingMode

    @property
    def spec_dec_mode(self) -> Any:
        """By the checkpoint's layers, which are known only once the host has written them here."""
        layers = self.num_nextn_predict_layers_from_model_config or self.num_nextn_predict_layers
        if layers == 1 and not self.use_mtp_vanilla:
            return self.modes.MTP_EAGLE_ONE_MODEL
        return self.modes.MTP

    @property
    def tokens_per_gen_step(self) -> int:
        return 1 + (self.max_total_draft_tokens or 0)


def user_config(line: Line, draft_len: int, **more: Any) -> DecodingConfig:
    """As a user gives it; the older line knows K by the number of layers alone."""
    if line.is_newer:
        return DecodingConfig(max_draft_len=draft_len, max_total_draft_tokens=draft_len, **more)
    lens = dict.fromkeys(
        ("num_nextn_predict_layers", "max_draft_len", "max_total_draft_tokens"), draft_len
    )
    return DecodingConfig(**lens, **more)


def update_spec_config_from_model_config(line: Line, config: Any, num_layers: int) -> None:
    """The host writes what the checkpoint says into the config that the user gave."""
    setattr(config, line.writes_layers_to, num_layers)
    if not line.is_newer:
        config.max_draft_len = config.num_nextn_predict_layers
    config.max_total_draft_tokens = config.max_draft_len


# ---- resource managers --------------------------------------------------------------------------


class BaseResourceManager(ABC):
    @abstractmethod
    def get_max_resource_count(self) -> int: ...

    @abstractmethod
    def get_needed_resource_to_completion(self, request: Any) -> int: ...

    def add_dummy_requests(self, request_ids: Sequence[int]) -> None:
        """Nothing by default."""

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Nothing by default."""

    def update_resources(self, scheduled_batch: Any) -> None:
        """Nothing by default."""

    def free_resources(self, request: Any) -> None:
        """Nothing by default."""

    def shutdown(self) -> None:
        """Nothing by default."""


class SlotManager:
    """Slots in no particular order: here the one freed last comes first."""

    def __init__(self, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests
        self.slot_mapping: dict[int, int] = {}
        self.free_slots = list(range(max_num_requests))

    def get_slot(self, request_id: int) -> int | None:
        return self.slot_mapping.get(request_id)

    def fill_slot_id_tensor(self, requests: Sequence[Any], slot_id_tensor: torch.Tensor) -> None:
        for row, request in enumerate(requests):
            slot = self.get_slot(request.request_id)
            if slot is None:
                raise ValueError(f"no slot for request {request.request_id}")
            slot_id_tensor[row] = slot

    def add_slot(self, request_id: int) -> int:
        if request_id in self.slot_mapping:
            assert request_id == GRAPH_DUMMY_ID, f"request {request_id} was added twice"
            return self.slot_mapping[request_id]
        if not self.free_slots:
            raise ValueError("No free slots")
        slot = self.free_slots.pop()
        self.slot_mapping[request_id] = slot
        return slot

    def remove_slot(self, request_id: int) -> None:
        if request_id in self.slot_mapping:
            self.free_slots.append(self.slot_mapping.pop(request_id))

    def shutdown(self) -> None:
        for request_id in list(self.slot_mapping):
            self.remove_slot(request_id)
        assert len(self.free_slots) == self.max_num_requests


# ---- sampler ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplerArgs:
    """``TorchSampler.Args``."""

    max_seq_len: int
    max_draft_len: int
    max_num_sequences: int
    max_beam_width: int
    max_total_draft_tokens: int
    disable_overlap_scheduler: bool = False
    enable_async_worker: bool = False


@dataclass(kw_only=True)
class SampleStateTensors:
    new_tokens: torch.Tensor
    log_probs: torch.Tensor | None = None


@dataclass(kw_only=True)
class SampleState:
    """The older form: the batch hangs on the state."""

    scheduled_requests: Any
    device: Any = None
    host: Any = None
    sampler_event: Any = None


@dataclass(kw_only=True)
class ListedSampleState:
    """The newer form: the requests that were sampled."""

    requests: list[Any]
    device: Any = None
    host: Any = None
    sampler_event: Any = None
    runtime_draft_len: int | None = None


@dataclass(kw_only=True)
class SampleStateTensorsSpec(SampleStateTensors):
    """What engines ask for by ``isinstance``."""

    new_tokens_lens: torch.Tensor
    next_draft_tokens: torch.Tensor


@dataclass(kw_only=True)
class SampleStateMTP(SampleState):
    pass


@dataclass(kw_only=True)
class SampleStateSpec(ListedSampleState):
    draft_lens: list[int] | None = None


class Sampler(ABC):
    SampleState: Any = None

    def setup_sampler_step(self, scheduled_requests: Any) -> None:
        """Nothing by default."""

    def get_cache_indirection(self) -> torch.Tensor | None:
        return None

    @abstractmethod
    def is_generation_model(self) -> bool: ...

    def should_provide_draft_probs(self, request: Any) -> bool:
        return True


class ValidatingSampler(Sampler):
    """API versions 1.3: validates requests at admission."""

    def validate_request(self, request: Any) -> None:
        """Everything is fine by default."""


# ---- worker -------------------------------------------------------------------------------------


class OpenSpecWorkerBase(nn.Module, ABC):
    """Line 1.2: subclasses write ``forward``."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.guided_decoder: Any = None

    @property
    @abstractmethod
    def max_draft_len(self) -> int: ...

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        self.guided_decoder = guided_decoder
        return True


class SpecWorkerBase(nn.Module, ABC):
    """Lines 1.3: ``forward`` is the base's, and puts back what a failed step has left changed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        nn.Module.__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must write _forward_impl, not forward")

    def __init__(self, use_separate_draft_kv_cache: bool = False) -> None:
        nn.Module.__init__(self)
        self.guided_decoder: Any = None
        self.use_separate_draft_kv_cache = use_separate_draft_kv_cache

    @property
    @abstractmethod
    def max_draft_len(self) -> int: ...

    @abstractmethod
    def _forward_impl(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]: ...

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        try:
            return self._forward_impl(*args, **kwargs)
        finally:
            self._ensure_spec_dec_state_restored(
                kwargs.get("attn_metadata"), kwargs.get("spec_metadata")
            )

    def _ensure_spec_dec_state_restored(self, attn_metadata: Any, spec_metadata: Any) -> None:
        if attn_metadata is not None and attn_metadata.has_spec_dec_saved_state:
            self._restore_attn_metadata_from_spec_dec(attn_metadata)

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata: Any) -> None:
        attn_metadata.restore_from_spec_dec()
        attn_metadata.on_update()

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        self.guided_decoder = guided_decoder
        return True

    def set_draft_model(self, draft_model: Any) -> None:
        """Nothing by default."""

    def get_draft_kv_cache_manager(self, resource_manager: Any) -> Any:
        """None: drafts share the target's cache."""


# ---- metadata -----------------------------------------------------------------------------------


@dataclass
class SpecMetadata:
    """Fields of line 1.2."""

    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    num_generations: int = 0
    is_cuda_graph: bool = False
    spec_dec_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.NONE
    draft_tokens: torch.Tensor | None = None
    draft_lens: torch.Tensor | None = None
    request_ids: list[int] | None = None
    seq_lens: list[int] | None = None
    gather_ids: torch.Tensor | None = None
    num_accepted_draft_tokens: torch.Tensor | None = None
    num_tokens: int = 0
    all_rank_num_tokens: list[int] | None = None
    all_rank_num_seqs: list[int] | None = None
    num_extra_kv_tokens: int = 0
    num_layers: int = 0
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False

    def __post_init__(self) -> None:
        """Nothing by default."""

    def prepare(self) -> None:
        """Nothing by default."""

    def create_cuda_graph_metadata(self, max_batch_size: int) -> Any:
        """Of a shrunken size, with buffers of its own; everything else is shared."""
        if self.is_cuda_graph:
            return self
        view = copy.copy(self)
        view.is_cuda_graph = True
        view.max_num_requests = max_batch_size
        view.__post_init__()
        return view

    def is_layer_capture(self, layer_id: int) -> bool:
        return False

    def maybe_capture_hidden_states(
        self, layer_id: int, hidden_states: Any, residual: Any = None
    ) -> None:
        """Nothing by default."""

    def populate_sampling_params_for_one_model(self, requests: Sequence[Any]) -> None:
        """Nothing in this model of it: tensors of temperatures and the like."""


@dataclass
class RuntimeSpecMetadata(SpecMetadata):
    """And what lines 1.3 have besides."""

    runtime_draft_len: int = 0
    runtime_tokens_per_gen_step: int = 1
    is_all_greedy_sample: bool = True
    vocab_size: int = 0
    num_seq_slots: int = 0
    context_prompt_lookahead_tokens: torch.Tensor | None = None

    def update_is_all_greedy_sample(self, requests: Sequence[Any]) -> None:
        """Nothing in this model of it."""

    def write_padding_onehot_draft_probs(self, *slots_and_lengths: Any) -> None:
        """Nothing in this model of it."""


class _LookAhead:
    """What the newest ``SpecMetadata`` has besides."""

    def dp_num_tokens(self: Any) -> int:
        """Exchanged with the other ranks before `prepare`."""
        return int(self.num_tokens)

    def allocate_context_prompt_lookahead(self: Any) -> None:
        self.context_prompt_lookahead_tokens = torch.full(
            (self.max_num_requests,), -1, dtype=torch.int32
        )

    def populate_context_prompt_lookahead(self: Any, lookahead_tokens: list[int]) -> None:
        if self.context_prompt_lookahead_tokens is not None:
            reported = torch.tensor(lookahead_tokens, dtype=torch.int32)
            self.context_prompt_lookahead_tokens[: len(reported)] = reported


def _fill_batch_indices(metadata: Any) -> None:
    count = len(metadata.request_ids)
    metadata.batch_indices_cuda[:count] = torch.arange(count, dtype=torch.int32)


def _fill_slots(metadata: Any, manager: Any) -> list[int]:
    slots = [manager.slot_manager.get_slot(rid) for rid in metadata.request_ids]
    # a request without a slot is a None here, of which no tensor can be made
    metadata.slot_ids[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
    return slots


def _has_slots(manager: Any) -> bool:
    return getattr(manager, "slot_manager", None) is not None


class _MTPBuffers:
    """What ``MTPSpecMetadata`` of every line allocates and fills."""

    @property
    def all_rank_num_seqs(self: Any) -> list[int] | None:
        return vars(self).get("_all_rank_num_seqs")

    @all_rank_num_seqs.setter
    def all_rank_num_seqs(self: Any, value: list[int] | None) -> None:
        self._all_rank_num_seqs = value
        if self.spec_dec_mode.is_mtp_eagle_one_model():
            self.subseq_all_rank_num_tokens = value

    def __post_init__(self: Any) -> None:
        self.batch_indices_cuda = torch.empty(self.max_num_requests, dtype=torch.int32)
        self.draft_token_indices_cuda = torch.arange(self.mtp_num_modules)
        if self.mtp_hidden_states_manager is not None:
            for name in ("mtp_hidden_states_ptrs", "mtp_past_tokens_ptrs", "slot_ids"):
                setattr(self, name, torch.empty(self.max_num_requests, dtype=torch.int64))

    def prepare(self: Any) -> None:
        _fill_batch_indices(self)
        is_vanilla = self.spec_dec_mode.is_mtp_vanilla()
        if hasattr(self, "dp_num_tokens"):
            self.num_tokens = self.dp_num_tokens()
        elif is_vanilla:
            self.num_tokens -= self.num_generations
        manager = self.mtp_hidden_states_manager
        if manager is None:
            return
        for row, slot in enumerate(_fill_slots(self, manager)):
            if is_vanilla:
                states, tokens = manager.mtp_past_hidden_states_pool, manager.mtp_past_tokens_pool
                self.mtp_hidden_states_ptrs[row] = states[slot].data_ptr()
                self.mtp_past_tokens_ptrs[row] = tokens[slot].data_ptr()


class _ReportingMTPBuffers:
    """And what that of the newest line has besides."""

    def dp_num_tokens(self: Any) -> int:
        reduced = self.num_generations if self.spec_dec_mode.is_mtp_vanilla() else 0
        return int(self.num_tokens - reduced)


@dataclass
class MTPSpecMetadata(_MTPBuffers, SpecMetadata):
    mtp_num_modules: int = 1
    mtp_hidden_states_manager: Any = None
    slot_ids: torch.Tensor | None = None
    batch_indices_cuda: torch.Tensor | None = None
    subseq_all_rank_num_tokens: list[int] | None = None


@dataclass
class RuntimeMTPSpecMetadata(_MTPBuffers, RuntimeSpecMetadata):
    mtp_num_modules: int = 1
    mtp_hidden_states_manager: Any = None
    slot_ids: torch.Tensor | None = None
    batch_indices_cuda: torch.Tensor | None = None
    subseq_all_rank_num_tokens: list[int] | None = None


@dataclass
class NewestMTPSpecMetadata(_ReportingMTPBuffers, _LookAhead, RuntimeMTPSpecMetadata):
    pass


@dataclass
class Eagle3OneModelSpecMetadata(RuntimeSpecMetadata):
    hidden_size: int = 0
    max_num_tokens: int = 0
    spec_resource_manager: Any = None
    slot_ids: torch.Tensor | None = None
    batch_indices_cuda: torch.Tensor | None = None
    subseq_all_rank_num_tokens: list[int] | None = None

    def __post_init__(self) -> None:
        indices = getattr(self.spec_resource_manager, "batch_indices_cuda", None)
        if indices is None:
            indices = torch.empty(self.max_num_requests, dtype=torch.int32)
        self.batch_indices_cuda = indices
        if _has_slots(self.spec_resource_manager):
            self.slot_ids = torch.empty(self.max_num_requests, dtype=torch.int64)

    def prepare(self) -> None:
        _fill_batch_indices(self)
        if _has_slots(self.spec_resource_manager):
            _fill_slots(self, self.spec_resource_manager)


@dataclass
class LookAheadSpecMetadata(_LookAhead, Eagle3OneModelSpecMetadata):
    """``Eagle3OneModelSpecMetadata`` of the newest line."""

    def __post_init__(self) -> None:
        Eagle3OneModelSpecMetadata.__post_init__(self)
        self.allocate_context_prompt_lookahead()

    def dp_num_tokens(self) -> int:
        return int(self.num_tokens)


# ---- by line, and by name -----------------------------------------------------------------------


@dataclass(frozen=True)
class HostClasses:
    """The classes of a line that engine and loop use themselves."""

    worker_base: type
    vanilla_metadata: type
    eagle_metadata: type
    state: type
    tensors: type
    modes: Any = SpeculativeDecodingMode


def host_classes(line: Line) -> HostClasses:
    """Our own, used without a generated package."""
    if not line.is_newer:
        return HostClasses(
            worker_base=OpenSpecWorkerBase,
            vanilla_metadata=MTPSpecMetadata,
            eagle_metadata=MTPSpecMetadata,
            state=SampleStateMTP,
            tensors=SampleStateTensorsSpec,
        )
    vanilla, eagle = RuntimeMTPSpecMetadata, Eagle3OneModelSpecMetadata
    if line.is_newest:
        vanilla, eagle = NewestMTPSpecMetadata, LookAheadSpecMetadata
    return HostClasses(
        worker_base=SpecWorkerBase,
        vanilla_metadata=vanilla,
        eagle_metadata=eagle,
        state=SampleStateSpec,
        tensors=SampleStateTensorsSpec,
    )


_TORCH = "tensorrt_llm._torch"


def package_classes(line: Line) -> HostClasses:
    """Those of a package ``tensorrt_llm`` that is loaded, generated or real."""
    mtp, interface = _module("speculative.mtp"), _module("speculative.interface")
    states, names = mtp, ("SampleStateMTP", "SampleStateTensorsMTP")
    eagle = mtp.MTPSpecMetadata
    if line.is_newer:
        states = _module("speculative.spec_sampler_base")
        names = ("SampleStateSpec", "SampleStateTensorsSpec")
        eagle = _module("speculative.eagle3").Eagle3OneModelSpecMetadata
    return HostClasses(
        worker_base=interface.SpecWorkerBase,
        vanilla_metadata=mtp.MTPSpecMetadata,
        eagle_metadata=eagle,
        state=getattr(states, names[0]),
        tensors=getattr(states, names[1]),
        modes=interface.SpeculativeDecodingMode,
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"{_TORCH}.{name}")


def bodies(line: Line) -> dict[str, Callable[..., Any]]:
    """The methods of this module's classes as ``module:Class.method``, for a generated package.

    The assigning of a property is ``module:Class.name.setter``.
    """
    classes = host_classes(line)
    homes: dict[str, tuple[type, ...]] = {
        "pyexecutor.resource_manager:BaseResourceManager": (BaseResourceManager,),
        "pyexecutor.resource_manager:SlotManager": (SlotManager,),
        "pyexecutor.sampler:Sampler": (Sampler,),
        "speculative.interface:SpecWorkerBase": (classes.worker_base,),
        "speculative.interface:SpecMetadata": (SpecMetadata,),
        "speculative.interface:SpeculativeDecodingMode": (SpeculativeDecodingMode,),
        "speculative.mtp:MTPSpecMetadata": (_MTPBuffers,),
    }
    if line.is_newer:
        sampler = homes.pop("pyexecutor.sampler:Sampler")
        homes["pyexecutor.sampler.sampler:Sampler"] = (*sampler, ValidatingSampler)
        homes["speculative.interface:SpecMetadata"] += (RuntimeSpecMetadata,)
        eagle = (Eagle3OneModelSpecMetadata, classes.eagle_metadata)
        homes["speculative.eagle3:Eagle3OneModelSpecMetadata"] = eagle
    if line.is_newest:
        homes["speculative.interface:SpecMetadata"] += (_LookAhead,)
        homes["speculative.mtp:MTPSpecMetadata"] += (_ReportingMTPBuffers,)
    found = {
        f"{_TORCH}.{home}.{name}": body
        for home, sources in homes.items()
        for source in sources
        for name, body in _bodies_of(source)
    }
    if line.is_newest:
        del found[f"{_TORCH}.speculative.interface:SpeculativeDecodingMode.is_mtp_eagle"]
    return found


def _bodies_of(source: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in vars(source).items():
        reported = {name: value.__func__ if isinstance(value, classmethod) else value}
        if isinstance(value, property):
            reported = {name: value.fget, f"{name}.setter": value.fset}
        for key, body in reported.items():
            # dataclasses make methods of their own
            is_ours = isinstance(body, FunctionType) and body.__code__.co_filename == __file__
            if is_ours and not getattr(body, "__isabstractmethod__", False):
                yield key, body

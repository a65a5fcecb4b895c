"""What the host's own base classes do, as bodies for a generated package.

For that no method uses ``super()``: bases are called by name.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from mtp_plugin.hosts.tensorrt_llm.seams import SPECULATIVE
from tests.contract_host.line_rules import Line

GRAPH_DUMMY_ID = 2**64 - 1
ATTENTION_DP_DUMMY_ID = 0


class SpeculativeDecodingMode(IntEnum):
    MTP = auto()
    MTP_EAGLE = auto()
    MTP_EAGLE_ONE_MODEL = auto()
    NONE = auto()

    def is_mtp_vanilla(self) -> bool:
        return self.name == "MTP"

    def is_mtp_eagle_one_model(self) -> bool:
        return self.name == "MTP_EAGLE_ONE_MODEL"


@dataclass
class DecodingConfig:
    """The host's config of MTP: mutable."""

    max_draft_len: int | None = None
    num_nextn_predict_layers: int | None = None
    num_nextn_predict_layers_from_model_config: int | None = None
    max_total_draft_tokens: int | None = None
    use_mtp_vanilla: bool = False
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
    names = ("num_nextn_predict_layers", "max_draft_len", "max_total_draft_tokens")
    return DecodingConfig(**dict.fromkeys(names, draft_len), **more)


def update_spec_config_from_model_config(line: Line, config: Any, num_layers: int) -> None:
    """The host writes what the checkpoint says into the config that the user gave."""
    setattr(config, line.writes_layers_to, num_layers)
    if not line.is_newer:
        config.max_draft_len = config.num_nextn_predict_layers
    config.max_total_draft_tokens = config.max_draft_len


@dataclass(frozen=True, kw_only=True)
class SamplerArgs:
    """``TorchSampler.Args``."""

    max_seq_len: int
    max_draft_len: int
    max_num_sequences: int
    max_beam_width: int
    max_total_draft_tokens: int


# ---- bodies by class ----------------------------------------------------------------------------


class _OpenWorker:
    """1.2: subclasses write ``forward``."""

    def __init__(self: Any) -> None:
        nn.Module.__init__(self)


class _Worker:
    """1.3: ``forward`` is the base's, and restores what a failed step has left changed."""

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        nn.Module.__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must write _forward_impl, not forward")

    def __init__(self: Any, use_separate_draft_kv_cache: bool = False) -> None:
        nn.Module.__init__(self)
        self.use_separate_draft_kv_cache = use_separate_draft_kv_cache

    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = self._forward_impl(*args, **kwargs)
        return outputs

    def get_draft_kv_cache_manager(self, resource_manager: Any) -> Any:
        """None: drafts share the target's cache."""


class _Metadata:
    """``SpecMetadata``."""

    def __post_init__(self) -> None:
        """Nothing by default."""

    def prepare(self) -> None:
        """Nothing by default."""

    def create_cuda_graph_metadata(self: Any, max_batch_size: int) -> Any:
        """Of a shrunken size, with buffers of its own; everything else is shared."""
        if self.is_cuda_graph:
            return self
        view = copy.copy(self)
        view.is_cuda_graph = True
        view.max_num_requests = max_batch_size
        view.__post_init__()
        return view


class _LookAhead:
    """What that of 1.3b has besides."""

    def populate_context_prompt_lookahead(self: Any, lookahead_tokens: list[int]) -> None:
        if self.context_prompt_lookahead_tokens is not None:
            given = torch.tensor(lookahead_tokens, dtype=torch.int32)
            self.context_prompt_lookahead_tokens[: len(given)] = given


class _MTPMetadata:
    """``MTPSpecMetadata``; it is prepared without a manager, which the plugin's part has."""

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
        if self.mtp_hidden_states_manager is not None:
            for name in ("mtp_hidden_states_ptrs", "mtp_past_tokens_ptrs"):
                setattr(self, name, torch.empty(self.max_num_requests, dtype=torch.int64))

    def prepare(self: Any) -> None:
        count = len(self.request_ids)
        self.batch_indices_cuda[:count] = torch.arange(count, dtype=torch.int32)
        assert self.mtp_hidden_states_manager is None
        if self.spec_dec_mode.is_mtp_vanilla():
            self.num_tokens -= self.num_generations


class _EagleMetadata:
    """``Eagle3OneModelSpecMetadata``; it is prepared without a manager too."""

    def __post_init__(self: Any) -> None:
        self.batch_indices_cuda = torch.empty(self.max_num_requests, dtype=torch.int32)
        if hasattr(self, "context_prompt_lookahead_tokens"):
            rows = torch.full((self.max_num_requests,), -1, dtype=torch.int32)
            self.context_prompt_lookahead_tokens = rows

    def prepare(self: Any) -> None:
        count = len(self.request_ids)
        self.batch_indices_cuda[:count] = torch.arange(count, dtype=torch.int32)
        assert self.spec_resource_manager is None


def bodies(line: Line) -> dict[str, Callable[..., Any]]:
    """The methods of these classes as ``module:Class.method``, and two functions.

    The assignment of a property is ``module:Class.name.setter``.
    """
    homes: list[tuple[str, type]] = [
        ("interface:SpecWorkerBase", _Worker if line.is_newer else _OpenWorker),
        ("interface:SpecMetadata", _Metadata),
        ("interface:SpeculativeDecodingMode", SpeculativeDecodingMode),
        ("mtp:MTPSpecMetadata", _MTPMetadata),
    ]
    found = {f"{SPECULATIVE}.utils:get_spec_metadata": _metadata_of(line)}
    if line.is_newer:
        homes.append(("eagle3:Eagle3OneModelSpecMetadata", _EagleMetadata))
        found[f"{SPECULATIVE}.utils:get_mtp_hidden_size"] = lambda config: config.hidden_size
    if line.is_newest:
        homes.append(("interface:SpecMetadata", _LookAhead))
    for home, source in homes:
        for name, value in vars(source).items():
            given = {name: getattr(value, "__func__", value)}
            if isinstance(value, property):
                given = {name: value.fget, f"{name}.setter": value.fset}
            for key, body in given.items():
                # enums make methods of their own
                if isinstance(body, FunctionType) and body.__code__.co_filename == __file__:
                    found[f"{SPECULATIVE}.{home}.{key}"] = body
    return found


def host_classes(line: Line) -> SimpleNamespace:
    """The classes of a loaded package ``tensorrt_llm`` that engine and loop use themselves."""
    mtp, interface = _module("mtp"), _module("interface")
    states, suffix, eagle = mtp, "MTP", mtp.MTPSpecMetadata
    if line.is_newer:
        states, suffix = _module("spec_sampler_base"), "Spec"
        eagle = _module("eagle3").Eagle3OneModelSpecMetadata
    return SimpleNamespace(
        worker_base=interface.SpecWorkerBase,
        vanilla_metadata=mtp.MTPSpecMetadata,
        eagle_metadata=eagle,
        state=getattr(states, f"SampleState{suffix}"),
        tensors=getattr(states, f"SampleStateTensors{suffix}"),
        modes=interface.SpeculativeDecodingMode,
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"{SPECULATIVE}.{name}")


def _metadata_of(line: Line) -> Callable[..., Any]:
    """What the line's own ``get_spec_metadata`` does for MTP, as far as engines read it."""

    def get_spec_metadata(
        config: Any, model: Any, max_num_requests: int, max_num_tokens: int, manager: Any, *_: Any
    ) -> Any:
        classes, mode = host_classes(line), config.spec_dec_mode
        shared = {
            "max_draft_len": config.max_draft_len,
            "max_total_draft_tokens": config.tokens_per_gen_step - 1,
            "spec_dec_mode": mode,
            "max_num_requests": max_num_requests,
        }
        if mode.is_mtp_vanilla() or not line.is_newer:
            return classes.vanilla_metadata(
                **shared,
                mtp_num_modules=config.num_nextn_predict_layers,
                mtp_hidden_states_manager=manager,
            )
        return classes.eagle_metadata(
            **shared,
            num_layers=model.num_hidden_layers,
            hidden_size=model.hidden_size,
            max_num_tokens=max_num_tokens,
            spec_resource_manager=manager,
        )

    return get_spec_metadata

"""Factory functions common to all API versions: from the host's config to its components."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError, HostError, expect
from mtp_plugin.hosts.tensorrt_llm.manager import manager_class
from mtp_plugin.hosts.tensorrt_llm.metadata import adopt
from mtp_plugin.hosts.tensorrt_llm.options import HostOptions, read_options
from mtp_plugin.hosts.tensorrt_llm.ranks import expect_everywhere
from mtp_plugin.hosts.tensorrt_llm.sampler import sampler_class
from mtp_plugin.hosts.tensorrt_llm.seams import (
    PACKAGE,
    PYEXECUTOR,
    SPECULATIVE,
    UTILS,
    Need,
    named,
)
from mtp_plugin.hosts.tensorrt_llm.worker import check_draft_cache, worker_class
from mtp_plugin.requests.logprobs import Logprob
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.drafting.worker import SpecWorker
from mtp_plugin.speculative.host import num_ranks
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.metrics.alarms import AcceptanceAlarms
from mtp_plugin.speculative.sampler import MTPSampler, SamplerHooks
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.verification import label_of, make_modes

_logger = logging.getLogger("mtp_plugin")


@dataclass(frozen=True)
class HostClasses:
    """Subclasses of the host's base classes that delegate to ours."""

    worker: type
    manager: type
    sampler: type


@dataclass
class Adapter:
    """Replacements for TensorRT-LLM's factory functions; one subclass per API version.

    A subclass lists the names that identify its API version (``needs``) and what differs in it.
    """

    line: ClassVar[str]
    """API version."""
    releases: ClassVar[str]
    """Releases of TensorRT-LLM with this API version, as far as the public source says."""
    needs: ClassVar[tuple[Need, ...]]
    step_method: ClassVar[str]
    """Name of the worker method that runs a step."""
    state_names: ClassVar[tuple[tuple[str, str, str], ...]]
    """(module, state class, tensors class): candidates for the sampler state classes."""
    state_requests: ClassVar[str]
    """Name of the field of a sampler state that holds its requests."""
    greedy_key: ClassVar[bool]
    """Whether the host captures separate CUDA graphs for greedy batches."""
    eagle_layer_kwargs: ClassVar[frozenset[str]]
    """Arguments that the host's eagle worker passes to every draft layer; its vanilla worker passes
    none of them."""

    managers: WeakSet[Any] = field(default_factory=WeakSet)
    """Managers of engines that may still be running."""

    def make_classes(self) -> HostClasses:
        """Create the subclasses of the host's current base classes."""
        base = named(f"{SPECULATIVE}.interface", "SpecWorkerBase") or nn.Module
        state, tensors = self._state_classes()
        classes = HostClasses(
            worker=worker_class(base, self.step_method),
            manager=manager_class(named(f"{PYEXECUTOR}.resource_manager", "BaseResourceManager")),
            sampler=sampler_class(
                named(f"{PYEXECUTOR}.sampler", "Sampler"), state, tensors, self.state_requests
            ),
        )
        for made in (classes.worker, classes.manager, classes.sampler):
            wanted = sorted(getattr(made, "__abstractmethods__", ()))
            home = made.__mro__[2]
            expect(
                not wanted,
                HostError,
                f"API version {self.line}: {home.__module__}.{home.__name__} has further abstract "
                f"methods: {', '.join(wanted)}",
            )
        return classes

    def __post_init__(self) -> None:
        self.classes = self.make_classes()

    # ---- replacements of the factory functions -----------------------------------------------

    def get_spec_worker(
        self,
        _original: Callable[..., Any],
        *,
        spec_config: Any,
        model_config: Any,
        mapping: Any = None,
        use_separate_draft_kv_cache: bool = False,
        **_: Any,
    ) -> Any:
        """Return a worker of the host's base class; ours is built once the config is final."""
        options = read_options(_with_draft_len(spec_config))  # report mistakes early
        make = partial(
            make_worker,
            is_vanilla=options.is_vanilla,
            mapping=mapping,
            layer_kwargs=frozenset() if options.is_vanilla else self.eagle_layer_kwargs,
        )
        make(_with_draft_len(spec_config), model_config=model_config)
        self._expect_all_ranks(mapping, options)
        if use_separate_draft_kv_cache:
            check_draft_cache(self.classes.worker)
        # older base classes take no such argument
        worker = self.classes.worker(*[True] * use_separate_draft_kv_cache)
        worker.mtp_plugin_make = partial(make, spec_config, model_config=model_config)
        return worker

    def get_spec_resource_manager(
        self, _original: Callable[..., Any], *, model_engine: Any, **_: Any
    ) -> Any:
        """Return a manager of the host's base class, also where the host would create none."""
        options = read_options(model_engine.spec_config)
        config = model_engine.model.config
        manager = self.classes.manager()
        manager.mtp_plugin_manager = make_manager(
            options,
            dtype=config.torch_dtype,
            hidden_size=hidden_size_of(config),
            vocab_size=config.vocab_size,
            max_batch_size=model_engine.batch_size,
        )
        manager.mtp_plugin_max_seq_len = model_engine.max_seq_len
        no_slots = named(f"{PYEXECUTOR}.resource_manager", "NoFreeSlotsError")
        if no_slots is not None:
            manager.mtp_plugin_no_slots = no_slots
        self.managers.add(manager)
        _logger.info("TensorRT-LLM: %s", manager.mtp_plugin_manager.memory_report())
        return manager

    def get_spec_metadata(
        self,
        original: Callable[..., Any],
        *,
        spec_config: Any,
        max_num_requests: int,
        spec_resource_manager: Any = None,
        **others: Any,
    ) -> Any:
        """Return the host's metadata, extended by what our components read."""
        manager = getattr(spec_resource_manager, "mtp_plugin_manager", None)
        expect(
            manager is not None,
            ConfigError,
            "get_spec_metadata: spec_resource_manager: expected the plugin's manager, got "
            f"{type(spec_resource_manager).__name__}: the engine was built without the plugin",
        )
        options = read_options(spec_config)
        vanilla, k = options.is_vanilla, options.decoding.max_draft_len
        modes = SpeculativeDecodingMode
        own = MTPSpecMetadata(
            max_num_requests=max_num_requests,
            max_draft_len=k,
            spec_dec_mode=modes.MTP if vanilla else modes.MTP_EAGLE_ONE_MODEL,
            mtp_num_modules=k if vanilla else 1,
            mtp_hidden_states_manager=manager,
            max_position=spec_resource_manager.mtp_plugin_max_seq_len - 1,
            draft_window=options.decoding.mtp.draft_window,
        )
        metadata = original(
            spec_config=spec_config,
            max_num_requests=max_num_requests,
            spec_resource_manager=None,
            **others,
        )
        return adopt(metadata, own, greedy_key=self.greedy_key)

    def get_spec_decoder(
        self, _original: Callable[..., Any], *, sampler_args: Any, spec_config: Any
    ) -> Any:
        """Return a sampler of the host's base class."""
        options = read_options(spec_config)
        sampler = self.classes.sampler()
        sampler.mtp_plugin_sampler = make_sampler(
            options,
            sampler_args,
            finish_reasons=self._of_requests("FinishReason") or FinishReason,
            logprob_class=self._of_requests("Logprob") or Logprob,
        )
        return sampler

    def _expect_all_ranks(self, mapping: Any, options: HostOptions) -> None:
        """Check that all ranks have the plugin with the same options.

        Raises:
            HostError: see `expect_everywhere`.
        """
        if (num_ranks(mapping) or 1) == 1:
            return
        make_communicator = named(f"{PACKAGE}._utils", "mpi_comm")
        communicator = None if make_communicator is None else make_communicator()
        if communicator is None or communicator.Get_size() != num_ranks(mapping):
            _logger.warning("the ranks do not use MPI: those without mtp_plugin are not detected")
            return
        own = options.decoding.mtp.model_dump(exclude_unset=True)
        expect_everywhere(f"API version {self.line}, {own}", communicator)

    @staticmethod
    def _of_requests(name: str) -> Any:
        """Return a class of the host for values in requests, or None if not found."""
        homes = (f"{PYEXECUTOR}.llm_request", f"{PYEXECUTOR}.sampler", f"{PACKAGE}.executor.result")
        return next(filter(None, (named(home, name) for home in homes)), None)

    def _state_classes(self) -> tuple[Any, Any]:
        for module, state, tensors in self.state_names:
            found = named(module, state), named(module, tensors)
            if None not in found:
                return found
        raise ConfigError(f"API version {self.line}: no class of sampler states")  # see `needs`


def make_worker(
    spec_config: Any,
    *,
    is_vanilla: bool,
    mapping: Any,
    model_config: Any,
    layer_kwargs: frozenset[str] = frozenset(),
) -> SpecWorker:
    """Build our worker from the current values of a host's config."""
    options = read_options(spec_config).decoding
    worker_type = MTPWorker if is_vanilla else MTPEagleWorker
    if mapping is None:
        mapping = getattr(model_config, "mapping", None)
    return worker_type(
        options,
        mapping=mapping,
        gather_logits=_gather(mapping),
        chain=options.mtp.chain,
        layer_kwargs=layer_kwargs,
    )


def _gather(mapping: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that gathers logits [N, V/tp] to [N, V], or None if none are sharded."""
    tp_size = getattr(mapping, "tp_size", None) or 1
    if tp_size == 1 or getattr(mapping, "enable_attention_dp", False):
        return None
    allgather = named(f"{PACKAGE}._torch.distributed.ops", "allgather")
    allgather = allgather or named(f"{PACKAGE}._torch.distributed", "allgather")
    expect(
        allgather is not None,
        HostError,
        f"tp_size={tp_size}: expected {PACKAGE}._torch.distributed to have allgather(x, mapping, "
        "dim), got none",
    )
    return partial(allgather, mapping=mapping, dim=-1)


def make_manager(
    options: HostOptions,
    *,
    dtype: torch.dtype,
    hidden_size: int,
    vocab_size: int,
    max_batch_size: int,
) -> SlotStateManager:
    """Build our manager; vanilla drafting also needs the pools of past hidden states and tokens."""
    decoding = options.decoding
    if options.is_vanilla:
        return MTPHiddenStatesManager(
            decoding, dtype, hidden_size, max_batch_size, vocab_size=vocab_size
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return SlotStateManager(
        make_modes(decoding, device),
        max_batch_size,
        device=device,
        vocab_size=vocab_size,
        thinking_end=decoding.thinking_end,
        engine_seed=decoding.mtp.seed,
    )


def make_sampler(
    options: HostOptions, args: Any, *, finish_reasons: Any, logprob_class: Any
) -> MTPSampler:
    """Build our sampler with the sampling options that the worker serves."""
    decoding = options.decoding
    label = label_of(decoding)
    alarms = None if label is not None and label.is_drawn else AcceptanceAlarms()
    worker_type = MTPWorker if options.is_vanilla else MTPEagleWorker
    return MTPSampler(
        args,
        nextn=decoding.max_draft_len,
        kernels=decoding.mtp.kernels,
        served_options=worker_type(decoding).served_options,
        hooks=SamplerHooks(
            finish_reasons=finish_reasons,
            logprob_class=logprob_class,
            on_step=None if alarms is None else alarms.record,
        ),
    )


def hidden_size_of(config: Any) -> int:
    """Width of the hidden states that the draft layers read; the host may have its own rule."""
    rule = named(UTILS, "get_mtp_hidden_size")
    return int(config.hidden_size if rule is None else rule(config))


def _with_draft_len(spec_config: Any) -> Any:
    """Return the config, or a view of it with K=1 while K is unset, so that it can be checked."""
    if getattr(spec_config, "max_draft_len", None) is not None:
        return spec_config
    if getattr(spec_config, "num_nextn_predict_layers", None) is not None:
        return spec_config
    return _Unresolved(spec_config)


class _Unresolved:
    """View of a config whose K the host has not determined yet."""

    max_draft_len = 1

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

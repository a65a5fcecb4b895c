"""The plugin registry: what an executor asks for by ``decoding_type``, and MTP's answer.

An executor calls :func:`find_plugin` with the decoding type of its config,
:meth:`~SpeculativePlugin.plan` before any weight is loaded, and :meth:`~SpeculativePlugin.build`
once the model is there. It then runs the pieces without knowing what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from mtp_plugin.alarms import AcceptanceAlarms
from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode
from mtp_plugin.draft_vocab import resolve_draft_vocab
from mtp_plugin.errors import ConfigError, PluginError, expect
from mtp_plugin.metadata import MTPSpecMetadata
from mtp_plugin.protocols import ResourceManager, Sampler
from mtp_plugin.requests.thinking import resolve_thinking_tokens
from mtp_plugin.sampler import MTPSampler
from mtp_plugin.state import MTPHiddenStatesManager
from mtp_plugin.turn_down import DraftLengthController
from mtp_plugin.workers import MTPEagleWorker, MTPWorker, PlainWorker

ENTRY_POINT_GROUP = "mtp_plugin.plugins"
NO_SPECULATION = "none"


@dataclass(frozen=True)
class HostFacts:
    """What a plugin may know of its host when it builds its pieces."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int  # requests of one batch
    max_num_sequences: int  # sequences that hold a slot at a time
    max_seq_len: int
    chain: str = "output"  # how the checkpoint's MTP depths hand states on
    encode: Callable[[str], list[int]] | None = None  # text -> ids, where a tokenizer is loaded


@dataclass(frozen=True)
class DraftPlan:
    """What speculation costs a host per step; the one rule for KV rows and token budgets."""

    max_draft_len: int  # K
    num_draft_layers: int = 0  # MTP layers to load, each with a KV pool of its own
    loop_rows: int = 0  # KV rows that the draft loop writes behind the step's own rows
    history_rows: int = 0  # rows that a continued prompt chunk feeds to the draft layers again

    @property
    def step_rows(self) -> int:
        """Target rows of a generation: K+1."""
        return self.max_draft_len + 1

    def rows_to_reserve(self, length: int, *, in_flight: bool) -> int:
        """KV rows that a generation may touch in its next step.

        Args:
            length: committed tokens as the host knows them.
            in_flight: a step whose result the host has not seen is running.
        """
        pending = self.step_rows if in_flight else 0
        return length + pending + self.step_rows + self.loop_rows

    def prompt_rows_to_reserve(self, end: int) -> int:
        """KV rows that a prompt chunk ending at ``end`` may touch."""
        return end + self.loop_rows

    def chunk_tokens(self, start: int, chunk: int) -> int:
        """Token budget that a prompt chunk takes, history rows counted."""
        return chunk + min(self.history_rows, start)


@dataclass(frozen=True)
class SpeculativePieces:
    """The pieces that an executor plugs into its loop."""

    manager: ResourceManager | None
    worker: torch.nn.Module
    sampler: Sampler
    make_metadata: Callable[[], Any]
    plan: DraftPlan
    draft_lengths: DraftLengthController | None = None
    """Chooses every step's draft length; None: K in every step."""
    alarms: AcceptanceAlarms | None = None
    """Hears of every request-step from the sampler; None: nobody does."""
    is_synthetic: bool = False
    """A coin accepts the drafts: whatever reports acceptance or text has to say so."""

    make_worker: Callable[[int], torch.nn.Module] | None = None
    """Draft length -> the worker of turned-down steps; None: every step has K, of which
    ``draft_lengths`` lets requests verify fewer."""
    draft_vocab_ids: torch.Tensor | None = None
    """[V'] int32, ascending: the host hands the worker a head over these rows; None: the target's
    head."""
    _workers: dict[int, torch.nn.Module] = field(default_factory=dict)

    def worker_for(self, draft_len: int) -> torch.nn.Module:
        """The worker of steps that verify and make ``draft_len`` drafts."""
        if self.make_worker is None or draft_len == self.plan.max_draft_len:
            return self.worker
        if draft_len not in self._workers:
            self._workers[draft_len] = self.make_worker(draft_len)
        return self._workers[draft_len]

    def draft_lens(self, batch_sizes: Iterable[int] | None = None) -> tuple[int, ...]:
        """The draft lengths that may be chosen, of all batch sizes or of these."""
        if self.draft_lengths is None or self.make_worker is None:
            return (self.plan.max_draft_len,)
        return tuple(self.draft_lengths.draft_lens(batch_sizes))

    def choose_draft_len(self, batch: Any) -> int:
        """The draft length that a scheduled batch runs with; call once per launched step.

        Afterwards the ``py_draft_state.limit`` of the batch's requests holds for this step.
        """
        if self.draft_lengths is None:
            return self.plan.max_draft_len
        chosen = self.draft_lengths.plan(batch)
        return self.plan.max_draft_len if self.make_worker is None else chosen


class SpeculativePlugin(Protocol):
    """One way to speculate, under one ``decoding_type``."""

    decoding_type: str

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:
        """What the pieces will cost, from the config and the checkpoint's MTP layer count alone.

        Raises:
            ConfigError: an option or a draft length that cannot be.
        """

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        """The pieces for a host.

        Raises:
            ConfigError: an option that this host cannot serve.
        """


class MTPPlugin:
    """Multi-token prediction with the checkpoint's own MTP layers."""

    decoding_type = "MTP"

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:
        """Eagle reuses one layer and writes K-1 rows in its loop; vanilla takes K layers."""
        config = self._own(config).resolve(num_mtp_layers)
        self._refuse_unbuilt(config)
        resolve_draft_vocab(config.mtp.draft_vocab)
        k = config.draft_len
        if config.use_mtp_vanilla:
            return DraftPlan(max_draft_len=k, num_draft_layers=k, history_rows=k)
        return DraftPlan(max_draft_len=k, num_draft_layers=1, loop_rows=k - 1)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        """Manager, worker and sampler for the planned draft length."""
        k = plan.max_draft_len
        config = self._own(config)
        if config.max_draft_len is None:
            config = config.model_copy(update={"max_draft_len": k})
        settings = SimpleNamespace(
            max_draft_len=k,
            num_nextn_predict_layers=k,
            use_relaxed_acceptance_for_thinking=config.use_relaxed_acceptance_for_thinking,
            relaxed_topk=config.relaxed_topk,
            relaxed_delta=config.relaxed_delta,
            begin_thinking_phase_token=None,
            end_thinking_phase_token=None,
            mtp=config.mtp,
        )
        if config.use_relaxed_acceptance_for_thinking:
            begin, end = resolve_thinking_tokens(config, host.encode)
            for edge, token in (("begin", begin), ("end", end)):
                if not 0 <= token < host.vocab_size:
                    raise ConfigError(
                        f"{edge}_thinking_phase_token: {token} is outside the vocabulary of "
                        f"{host.vocab_size}"
                    )
            settings.begin_thinking_phase_token = begin
            settings.end_thinking_phase_token = end
        vocab = resolve_draft_vocab(config.mtp.draft_vocab, host.vocab_size)
        draft_vocab_ids = None
        if vocab is not None:
            draft_vocab_ids = torch.tensor(vocab, dtype=torch.int32, device=host.device)
        vanilla = config.use_mtp_vanilla
        worker_class = MTPWorker if vanilla else MTPEagleWorker
        worker = worker_class(
            settings,
            chain=config.mtp.chain or host.chain,
            device=host.device,
            draft_vocab_ids=draft_vocab_ids,
        )
        manager = MTPHiddenStatesManager(
            settings,
            host.dtype,
            host.hidden_size,
            host.max_batch_size,
            device=host.device,
            num_seq_slots=host.max_num_sequences,
        )
        mode = (
            SpeculativeDecodingMode.MTP if vanilla else SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
        )

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=k,
                spec_dec_mode=mode,
                mtp_num_modules=k if vanilla else 1,
                mtp_hidden_states_manager=manager,
                max_position=host.max_seq_len - 1,
                draft_window=config.mtp.draft_window,
                device=host.device,
            )

        lengths = DraftLengthController(config, max_batch_size=host.max_batch_size)
        # a coin's acceptance says nothing about the drafts
        alarms = None if config.mtp.verification == "synthetic" else AcceptanceAlarms()

        def on_step(request: Any, num_emitted: int, num_drafted: int) -> None:
            lengths.record(num_emitted, num_drafted)
            if alarms is not None:
                alarms.record(request, num_emitted, num_drafted)

        sampler = _sampler(host, k, config.mtp.kernels, on_step)

        def make_worker(draft_len: int) -> torch.nn.Module:
            chain = config.mtp.chain or host.chain
            cold = draft_len == 0 and not config.mtp.keep_warm
            chosen = PlainWorker if cold else worker_class
            return chosen(
                settings,
                chain=chain,
                device=host.device,
                step_draft_len=draft_len,
                draft_vocab_ids=draft_vocab_ids,
            )

        return SpeculativePieces(
            manager,
            worker,
            sampler,
            make_metadata,
            plan,
            lengths,
            alarms,
            worker.is_synthetic,
            make_worker,
            draft_vocab_ids,
        )

    @staticmethod
    def _own(config: Any) -> MTPDecodingConfig:
        if not isinstance(config, MTPDecodingConfig):
            raise ConfigError(f"MTP: expected an MTPDecodingConfig, got {type(config).__name__}")
        return config

    @staticmethod
    def _refuse_unbuilt(config: MTPDecodingConfig) -> None:
        """Name every option that the schema knows and this version does not run."""
        unbuilt = [
            f"mtp.{name}={getattr(config.mtp, name)}"
            for name, built in (
                ("verification", ("coupled", "synthetic")),
                ("draft_sampling", ("coupled", "greedy")),
            )
            if getattr(config.mtp, name) not in built
        ]
        if unbuilt:
            raise ConfigError(f"not built in this version: {', '.join(unbuilt)}")


class PlainPlugin:
    """Decoding without speculation (K = 0)."""

    decoding_type = NO_SPECULATION

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:  # noqa: ARG002
        """One token per step, nothing drafted.

        Raises:
            ConfigError: options beside the decoding type, which nothing would read.
        """
        options = dict(getattr(config, "options", None) or {})
        if options:
            raise ConfigError(
                f"speculative_config: decoding_type {NO_SPECULATION!r} takes no options, got "
                f"{', '.join(sorted(options))}"
            )
        return DraftPlan(max_draft_len=0)

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:  # noqa: ARG002
        """A worker that only emits, and the sampler with an empty draft store."""

        def make_metadata() -> MTPSpecMetadata:
            return MTPSpecMetadata(
                max_num_requests=host.max_batch_size,
                max_draft_len=0,
                spec_dec_mode=SpeculativeDecodingMode.NONE,
                mtp_num_modules=0,
                max_position=host.max_seq_len - 1,
                device=host.device,
            )

        worker = PlainWorker(SimpleNamespace(max_draft_len=0), device=host.device)
        return SpeculativePieces(None, worker, _sampler(host, 0), make_metadata, plan)


def _sampler(
    host: HostFacts,
    draft_len: int,
    kernels: str = "auto",
    on_step: Callable[[Any, int, int], None] | None = None,
) -> MTPSampler:
    args = SimpleNamespace(
        max_num_sequences=host.max_num_sequences, max_seq_len=host.max_seq_len, max_beam_width=1
    )
    return MTPSampler(args, nextn=draft_len, device=host.device, kernels=kernels, on_step=on_step)


_BUILT_IN: tuple[SpeculativePlugin, ...] = (MTPPlugin(), PlainPlugin())
_registered: dict[str, SpeculativePlugin] = {p.decoding_type.lower(): p for p in _BUILT_IN}


def register_plugin(plugin: SpeculativePlugin) -> None:
    """Make ``plugin`` answer to its decoding type.

    Raises:
        PluginError: the decoding type has another plugin.
    """
    key = plugin.decoding_type.lower()
    existing = _registered.get(key)
    if existing is not None and existing is not plugin:
        raise PluginError(
            f"decoding_type {plugin.decoding_type!r} is already served by {type(existing).__name__}"
        )
    _registered[key] = plugin


def unregister_plugin(decoding_type: str) -> None:
    """Forget a registered plugin; the built-in ones stay.

    Raises:
        PluginError: the decoding type is built in or has no plugin.
    """
    key = decoding_type.lower()
    if key in {p.decoding_type.lower() for p in _BUILT_IN} or key not in _registered:
        raise PluginError(f"decoding_type {decoding_type!r} has no plugin that could be removed")
    del _registered[key]


def find_plugin(decoding_type: str | None) -> SpeculativePlugin:
    """The plugin of a decoding type: built in, registered, or from the entry-point group.

    Args:
        decoding_type: the config's name, in any case; None decodes without speculation.

    Raises:
        PluginError: no plugin has this name; the message lists those that exist.
    """
    key = (decoding_type or NO_SPECULATION).lower()
    if key in _registered:
        return _registered[key]
    offered = {point.name.lower(): point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if key in offered:
        loaded = offered[key].load()
        plugin: SpeculativePlugin = loaded() if isinstance(loaded, type) else loaded
        expect(
            plugin.decoding_type.lower() == key,
            PluginError,
            f"entry point {offered[key].name!r} of {ENTRY_POINT_GROUP}: expected a plugin with "
            f"that decoding_type, got {plugin.decoding_type!r}",
        )
        register_plugin(plugin)
        return plugin
    names = ", ".join(sorted(set(_registered) | set(offered)))
    raise PluginError(f"decoding_type {decoding_type!r} has no plugin; known: {names}")

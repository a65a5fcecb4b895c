"""What a way to speculate gives an executor, and what it may know of it.

An executor asks the registry for the plugin of its ``decoding_type``, calls
:meth:`~SpeculativePlugin.plan` before any weight is loaded, and :meth:`~SpeculativePlugin.build`
once the model is there. It then runs the pieces without knowing what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from mtp_plugin.errors import ConfigError, PluginError, expect, expect_int, format_value
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.stop_callback import StopCallback
from mtp_plugin.requests.thinking import (
    ThinkingEnd,
    names_thinking_tokens,
    resolve_thinking_end,
)
from mtp_plugin.speculative.draft_length.controller import DraftLengthController
from mtp_plugin.speculative.host import ResourceManager, Sampler
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.metrics.alarms import AcceptanceAlarms
from mtp_plugin.speculative.state import SlotStateManager

_HOST_SIZES = ("hidden_size", "vocab_size", "max_batch_size", "max_num_sequences", "max_seq_len")
_CHAINS = ("output", "target_shift", "none")


@dataclass(frozen=True)
class HostFacts:
    """Description of a host engine, given to a plugin that builds its components.

    Raises:
        ConfigError: a size below 1, or a value of another type.
    """

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    max_batch_size: int  # requests of one batch
    max_num_sequences: int  # sequences that hold a slot at a time
    max_seq_len: int
    chain: str = "output"  # how the checkpoint's MTP depths hand states on
    encode: Callable[[str], list[int]] | None = None  # text -> ids, where a tokenizer is loaded
    reads_states: bool = True  # a step's hidden states are read again behind the worker

    def __post_init__(self) -> None:
        for name in _HOST_SIZES:
            expect_int(f"HostFacts: {name}", getattr(self, name), minimum=1, error=ConfigError)
        is_dtype = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        for name, expected, is_valid in (
            ("dtype", "a floating-point torch.dtype", is_dtype),
            ("device", "a torch.device", isinstance(self.device, (torch.device, str))),
            ("chain", f"one of {', '.join(_CHAINS)}", self.chain in _CHAINS),
            ("encode", "a function or None", self.encode is None or callable(self.encode)),
        ):
            expect(
                is_valid,
                ConfigError,
                f"HostFacts: {name}: expected {expected}, got {format_value(getattr(self, name))}",
            )

    @property
    def sampler_args(self) -> SimpleNamespace:
        """What samplers ask of a host, as ``TorchSampler.Args``."""
        return SimpleNamespace(
            max_num_sequences=self.max_num_sequences, max_seq_len=self.max_seq_len, max_beam_width=1
        )


def thinking_end_of(config: Any, host: HostFacts) -> ThinkingEnd | None:
    """What budgets of thinking go by, of a config and a host's tokenizer; None: nothing says it.

    Raises:
        ConfigError: an id outside the vocabulary, or as `resolve_thinking_end`.
    """
    end = resolve_thinking_end(config, host.encode)
    wrong = [] if end is None else [t for t in (end.begin, *end.end) if t >= host.vocab_size]
    if not wrong:
        return end
    expect(
        not names_thinking_tokens(config),
        ConfigError,
        f"thinking tokens: expected ids below {host.vocab_size}, the size of the vocabulary, got "
        f"{wrong}",
    )
    return None  # the tokenizer knows more words than the model


@dataclass(frozen=True)
class DraftPlan:
    """What speculation costs a host engine per step, in KV rows and tokens of its budget.

    Raises:
        ConfigError: a field that is not an integer of at least 0.
    """

    max_draft_len: int  # K
    num_draft_layers: int = 0  # MTP layers to load, each with a KV pool of its own
    loop_rows: int = 0  # KV rows that the draft loop writes behind the step's own rows
    history_rows: int = 0  # rows that a continued prompt chunk feeds to the draft layers again
    past_pairs: int = 0  # states and tokens that a slot keeps
    num_draft_probs: int = 0  # drafts of which a slot keeps what they were drawn from

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expect_int(f"DraftPlan: {name}", value, minimum=0, error=ConfigError)

    @property
    def step_rows(self) -> int:
        """Target rows of a generation: K+1."""
        return self.max_draft_len + 1

    def bytes_per_request(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Device bytes that manager and sampler keep for each request of a batch, told before any
        is allocated; at least, and of a `SlotStateManager`.

        Args:
            dtype: of the states.
        """
        pairs = self.past_pairs * (hidden_size * dtype.itemsize + 4)
        store = 2 * 4 * (3 * self.max_draft_len + 4)
        return store + SlotStateManager.bytes_per_request(vocab_size, pairs, self.num_draft_probs)

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


class ReplayCheck(Protocol):
    """What a capture cannot check, and each replay of it can."""

    def verify(self) -> None:
        """Check what the last replay left; may wait for the device.

        Raises:
            MTPPluginError: something is not as it was.
        """


def no_replay_checks() -> AbstractContextManager[Sequence[ReplayCheck]]:
    """None at all."""
    return nullcontext(())


def no_refusals(asked: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    """None at all."""
    return ()


def any_text(asked: Mapping[str, Any]) -> bool:  # noqa: ARG001
    """Every request's."""
    return True


_FIELD: Any = object()
_METHODS = {
    "manager": ("slot_of", "prepare_resources", "update_resources", "free_resources", "shutdown"),
    "sampler": ("sample_async", "update_requests"),
}


@dataclass(frozen=True)
class SpeculativePieces:
    """The components that an executor plugs into its loop.

    What the executor calls on one of them by another name is a property: ``slot_of`` of the
    manager; ``served_options``, ``refusals``, ``device_store`` and ``set_stop_callback`` of the
    sampler.

    Raises:
        PluginError: a component without the methods that an executor calls, or of another type.
    """

    manager: ResourceManager
    """Assigns every request a slot, and stores the request's options there. ``slot_of(request_id)``
    returns the row of the slot table and pools, that of padding rows too."""
    worker: torch.nn.Module
    sampler: Sampler
    """May have ``served_options`` and ``refusals(options)``, ``device_tensors()`` (the last step's
    tensors, at fixed addresses, without which no step is captured) and ``set_stop_callback``."""
    make_metadata: Callable[[], Any]
    plan: DraftPlan
    draft_lengths: DraftLengthController | None = None
    """Chooses every step's draft length; None: K in every step."""
    alarms: AcceptanceAlarms | None = None
    """Gets every request-step from the sampler; None: nobody does."""
    label: Label | None = None
    """What reports of acceptance and text must say; None: the text is the target's own."""
    changes_text: Callable[[Mapping[str, Any]], bool] = any_text
    """Options that a request asks for, by name -> whether the label is true of its text."""
    shorter_steps: bool = False
    """The worker obeys the metadata's ``runtime_draft_len``; False: every step has K, of which
    ``draft_lengths`` lets requests verify fewer."""
    draft_vocab_ids: torch.Tensor | None = None
    """[V'] int32, ascending: the host hands the worker a head over these rows; None: the target's
    head."""
    backend: Backend = Backend.TORCH
    """What the pieces' ops run on; those of the host that belong to a step follow it."""
    checks_metadata: bool = False
    """Debug: the host rebuilds its attention metadata at every use and compares."""
    replay_checks: Callable[[], AbstractContextManager[Sequence[ReplayCheck]]] = no_replay_checks
    """Entered around a capture: the checks to make behind each of its replays."""
    make_graph_metadata: Callable[[Any, int], Any] | None = None
    """Metadata, rows of a batch -> metadata of a step that is captured; None: none can be."""
    memory_report: Callable[[], str] | None = None
    """A few words on the device memory of the pieces, for people; None: there is nothing to say."""

    def __post_init__(self) -> None:
        for name, methods in _METHODS.items():
            component = getattr(self, name)
            missing = [n for n in methods if not callable(getattr(component, n, None))]
            self._expect(name, not missing, f"an object with {', '.join(missing)}")
        for name in ("worker", "make_metadata", "changes_text", "replay_checks"):
            self._expect(name, callable(getattr(self, name)), "a function")
        for name in ("make_graph_metadata", "memory_report"):
            value = getattr(self, name)
            self._expect(name, value is None or callable(value), "a function or None")
        self._expect("plan", isinstance(self.plan, DraftPlan), "a DraftPlan")
        options = self.served_options
        is_names = isinstance(options, Set) and all(isinstance(name, str) for name in options)
        self._expect("sampler.served_options", is_names, "a set of names", options)
        self._expect("backend", isinstance(self.backend, Backend), "a Backend")
        ids = self.draft_vocab_ids
        is_ids = ids is None or isinstance(ids, torch.Tensor)
        self._expect("draft_vocab_ids", is_ids, "a tensor or None")

    def _expect(self, name: str, is_valid: bool, expected: str, given: object = _FIELD) -> None:
        if not is_valid:
            shown = format_value(getattr(self, name) if given is _FIELD else given)
            raise PluginError(f"SpeculativePieces: {name}: expected {expected}, got {shown}")

    @property
    def slot_of(self) -> Callable[[int], int]:
        """Request id -> its row of the slot table and pools."""
        manager: Any = self.manager
        slot_of: Callable[[int], int] = manager.slot_of
        return slot_of

    @property
    def served_options(self) -> Set[str]:
        """Options of a request, by name, that sampler and verification serve."""
        options: Set[str] = getattr(self.sampler, "served_options", frozenset())
        return options

    @property
    def refusals(self) -> Callable[[Mapping[str, Any]], Iterable[str]]:
        """Requested options, by name -> why they cannot be served as they are."""
        refusals: Callable[[Mapping[str, Any]], Iterable[str]]
        refusals = getattr(self.sampler, "refusals", no_refusals)
        return refusals

    @property
    def device_store(self) -> Callable[[], Any] | None:
        """The last step's tensors on the device, at fixed addresses; None: no step is captured."""
        return getattr(self.sampler, "device_tensors", None)

    @property
    def set_stop_callback(self) -> Callable[[StopCallback], None] | None:
        """Sets a user's stop callback; None: the sampler takes none."""
        return getattr(self.sampler, "set_stop_callback", None)

    def draft_lens(self, batch_sizes: Iterable[int] | None = None) -> tuple[int, ...]:
        """The draft lengths that may be chosen, of all batch sizes or of these."""
        if self.draft_lengths is None or not self.shorter_steps:
            return (self.plan.max_draft_len,)
        return tuple(self.draft_lengths.draft_lens(batch_sizes))

    def choose_draft_len(self, batch: Any) -> int:
        """The draft length that a scheduled batch runs with; call once per launched step.

        A host that never does drafts K in every step, whatever schedule and gate say.

        Afterwards the ``py_draft_state.limit`` of the batch's requests holds for this step.
        """
        if self.draft_lengths is None:
            return self.plan.max_draft_len
        chosen = self.draft_lengths.plan(batch)
        return chosen if self.shorter_steps else self.plan.max_draft_len


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

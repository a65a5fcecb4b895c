"""The interface between an executor and a speculative-decoding plugin.

An executor looks up the plugin of its ``decoding_type`` in the registry, calls
:meth:`~SpeculativePlugin.plan` before it loads weights, and :meth:`~SpeculativePlugin.build` after
it has loaded the model. It then runs the components without knowledge of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from mtp_plugin.errors import ConfigError, PluginError, expect, expect_int, format_value
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.seeds import ENGINE_SEED
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
    max_batch_size: int  # requests per batch
    max_num_sequences: int  # sequences that have a slot at the same time
    max_seq_len: int
    chain: str = "output"  # which hidden states the next MTP depth reads
    encode: Callable[[str], list[int]] | None = None  # text -> ids, if a tokenizer is loaded
    reads_states: bool = True  # hidden states of a step are read after the worker ran
    padded_sizes: Sequence[int] = ()  # batch sizes to which generation-only batches are padded
    end_ids: Sequence[int] = ()  # ids that end an output, which a draft vocabulary always has
    engine_seed: int = ENGINE_SEED  # seed of requests without one

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
        """The arguments of samplers, as ``TorchSampler.Args``."""
        return SimpleNamespace(
            max_num_sequences=self.max_num_sequences, max_seq_len=self.max_seq_len, max_beam_width=1
        )


def thinking_end_of(config: Any, host: HostFacts) -> ThinkingEnd | None:
    """Return the end sequence that thinking budgets force, from a config and the tokenizer of the
    host engine; None if neither defines one.

    Raises:
        ConfigError: an id is outside the vocabulary, or as `resolve_thinking_end`.
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
    return None  # the tokenizer has more tokens than the model


@dataclass(frozen=True)
class DraftPlan:
    """The cost of speculation per step, in KV rows and scheduled tokens.

    Raises:
        ConfigError: a field that is not an integer of at least 0.
    """

    max_draft_len: int  # K
    num_draft_layers: int = 0  # MTP layers to load, each with its own KV pool
    loop_rows: int = 0  # KV rows that the draft loop writes after the step's own rows
    history_rows: int = 0  # rows that draft layers process again for a later prompt chunk
    past_pairs: int = 0  # past hidden states and tokens stored per slot
    num_draft_probs: int = 0  # drafts per slot whose distribution is stored

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expect_int(f"DraftPlan: {name}", value, minimum=0, error=ConfigError)

    @property
    def step_rows(self) -> int:
        """Query rows of a generation in the target pass: K+1."""
        return self.max_draft_len + 1

    def bytes_per_request(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> int:
        """Return a lower bound of the device bytes per request of manager and sampler.

        It is known before anything is allocated, and holds for a `SlotStateManager`.

        Args:
            dtype: dtype of the hidden states.
        """
        pairs = self.past_pairs * (hidden_size * dtype.itemsize + 4)
        store = 2 * 4 * (3 * self.max_draft_len + 4)
        return store + SlotStateManager.bytes_per_request(vocab_size, pairs, self.num_draft_probs)

    def rows_to_reserve(self, length: int, *, in_flight: bool) -> int:
        """Return the KV rows that a generation may write in its next step.

        Args:
            length: number of committed tokens, as known to the executor.
            in_flight: a step is running whose result the executor has not read.
        """
        pending = self.step_rows if in_flight else 0
        return length + pending + self.step_rows + self.loop_rows

    def prompt_rows_to_reserve(self, end: int) -> int:
        """Return the KV rows that a prompt chunk ending at ``end`` may write."""
        return end + self.loop_rows

    def chunk_tokens(self, start: int, chunk: int) -> int:
        """Return the tokens that a prompt chunk takes from the token budget, with history rows."""
        return chunk + min(self.history_rows, start)


class ReplayCheck(Protocol):
    """A check that cannot run during graph capture, only after each replay."""

    def verify(self) -> None:
        """Check the state after the last replay; may wait for the device.

        Raises:
            MTPPluginError: something was not restored.
        """


def no_replay_checks() -> AbstractContextManager[Sequence[ReplayCheck]]:
    return nullcontext(())


def no_refusals(options: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG001
    return ()


def any_text(options: Mapping[str, Any]) -> bool:  # noqa: ARG001
    return True


_FIELD: Any = object()
_METHODS = {
    "manager": ("slot_of", "prepare_resources", "update_resources", "free_resources", "shutdown"),
    "sampler": ("sample_async", "update_requests"),
}


@dataclass(frozen=True)
class SpeculativePieces:
    """The components that an executor runs in its loop.

    Properties forward to them: ``slot_of`` to the manager; ``served_options``, ``refusals``,
    ``device_store`` and ``set_stop_callback`` to the sampler.

    Raises:
        PluginError: a component has another type, or lacks methods that an executor calls.
    """

    manager: ResourceManager
    """Assigns every request a slot and stores its options there. ``slot_of(request_id)`` returns
    the row in the slot table and the pools, also for padding rows."""
    worker: torch.nn.Module
    sampler: Sampler
    """May have ``served_options``, ``refusals(options)``, ``device_tensors()`` (the last step's
    tensors at fixed addresses; steps are captured only with it) and ``set_stop_callback``."""
    make_metadata: Callable[[], Any]
    plan: DraftPlan
    draft_lengths: DraftLengthController | None = None
    """Chooses the draft length of every step; None: always K."""
    alarms: AcceptanceAlarms | None = None
    """Alarms, called for every request-step; None: no alarms."""
    label: Label | None = None
    """Note for reports of acceptance and output; None: the output is the target's own."""
    changes_text: Callable[[Mapping[str, Any]], bool] = any_text
    """Requested options by name -> whether the label applies to the request's output."""
    shorter_steps: bool = False
    """The worker supports the metadata's ``runtime_draft_len``; False: every step has K drafts, and
    ``draft_lengths`` only limits how many a request verifies."""
    draft_vocab_ids: torch.Tensor | None = None
    """[V'] int32, ascending: the executor gives the worker a head with these rows; None: the
    target's head."""
    backend: Backend = Backend.TORCH
    """Backend of the components' ops; the executor uses it for its own ops of a step."""
    checks_metadata: bool = False
    """Debug: the executor rebuilds its attention metadata before every use and compares."""
    replay_checks: Callable[[], AbstractContextManager[Sequence[ReplayCheck]]] = no_replay_checks
    """Context of a graph capture; returns the checks to run after each replay."""
    make_graph_metadata: Callable[[Any, int], Any] | None = None
    """(metadata, batch size) -> metadata of a captured step; None: steps cannot be captured."""
    memory_report: Callable[[], str] | None = None
    """Describes the device memory of the components for logs; None: no description."""

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
        """Request id -> its row in the slot table and the pools."""
        manager: Any = self.manager
        slot_of: Callable[[int], int] = manager.slot_of
        return slot_of

    @property
    def served_options(self) -> Set[str]:
        """Names of the request options that sampler and verification support."""
        options: Set[str] = getattr(self.sampler, "served_options", frozenset())
        return options

    @property
    def refusals(self) -> Callable[[Mapping[str, Any]], Iterable[str]]:
        """Requested options by name -> why they are not supported together."""
        refusals: Callable[[Mapping[str, Any]], Iterable[str]]
        refusals = getattr(self.sampler, "refusals", no_refusals)
        return refusals

    @property
    def device_store(self) -> Callable[[], Any] | None:
        """Returns the last step's device tensors, at fixed addresses; None: no graph capture."""
        return getattr(self.sampler, "device_tensors", None)

    @property
    def set_stop_callback(self) -> Callable[[StopCallback], None] | None:
        """Sets the user's stop callback; None: the sampler does not support one."""
        return getattr(self.sampler, "set_stop_callback", None)

    def draft_lens(self, batch_sizes: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the draft lengths that may be chosen for these batch sizes (default all)."""
        if self.draft_lengths is None or not self.shorter_steps:
            return (self.plan.max_draft_len,)
        return tuple(self.draft_lengths.draft_lens(batch_sizes))

    def choose_draft_len(self, batch: Any) -> int:
        """Return the draft length of a scheduled batch; call once per launched step.

        It also sets ``py_draft_state.limit`` of the batch's requests for this step. An executor
        that never calls it drafts K tokens in every step.
        """
        if self.draft_lengths is None:
            return self.plan.max_draft_len
        chosen = self.draft_lengths.plan(batch)
        return chosen if self.shorter_steps else self.plan.max_draft_len

    def finish_step(self, batch: Any) -> None:
        """Note that the results of a launched batch were read; ``mtp.adaptive_draft_len`` measures
        the time between two steps from it."""
        if self.draft_lengths is not None:
            self.draft_lengths.finish(batch)


class SpeculativePlugin(Protocol):
    """A speculative-decoding method with its ``decoding_type``."""

    decoding_type: str

    def plan(self, config: Any, num_mtp_layers: int) -> DraftPlan:
        """Return the cost of speculation, from the config and the number of MTP layers alone.

        Raises:
            ConfigError: an option or the draft length is invalid.
        """

    def build(self, config: Any, plan: DraftPlan, host: HostFacts) -> SpeculativePieces:
        """Build the components for a host engine.

        Raises:
            ConfigError: the host engine does not support an option.
        """

"""The draft length of a step: by the schedule, the gate or measured gain, and by cold requests.

A step launched with draft length K' verifies at most K' drafts per request and makes K' for the
next step. The length is decided on the host before the launch, from the batch and from results up
to the step before last (with overlap), so it never waits for the device. Without
``mtp.adaptive_draft_len``, which measures times, the controller counts steps and adds integers:
ranks that run the same requests decide alike. Ranks with requests of their own (attention DP) agree
on the smallest of their choices before any collective.

What an executor does with K' (captured graphs are keyed by padded batch size and K'):

**Every step.** `DraftLengthController.plan` is called once, after scheduling and before the launch.
A generation has K'+1 rows, of which ``py_draft_state.limit`` + 1 count; later drafts are absent.
After the length was raised, the first step verifies only what the shorter step before it drafted.
The worker gets K' as ``runtime_draft_len``, in eager steps and in captured ones.

**keep_warm: true, K' < K.** The draft KV is kept as if every step drafted K tokens.

- Reused layer (eagle): the first pass runs over the accepted rows, also with K' = 0; K'-1 passes of
  single rows follow. Heads run only for the K' drafts.
- One layer per depth (vanilla): all K depths run over the whole window, K' of them with their
  heads. Tokens of a depth that were not drafted have id 0; later windows overwrite these rows
  before they are used, since no step accepts more tokens than were drafted.
- Prompt chunks run through every draft layer.

**keep_warm: false, K' < K.** Only what the K' drafts need runs. A request of such a step, also one
with a prompt chunk, lacks the rest; ``py_draft_state.warm`` is for how many drafts its draft KV is
complete.

- K' = 0: no draft layer runs and no history is updated. The request is cold, warm = 0.
- 0 < K' < K: a reused layer lacks nothing. With one layer per depth, depths from K' on are skipped,
  so warm is reduced to K'.
- warm is K again only when the whole prompt is computed again: for a new request, or a preempted
  one. Further prompt chunks of a cold request cannot warm it.
- A batch whose requests can all use fewer drafts than were chosen runs with fewer: a cold batch
  drafts nothing, until a warm request joins it. A cold request in a batch with warm ones takes part
  in every pass; its drafts are arbitrary and never verified.

**No speculation.** A step without prompt chunks whose requests all have
``py_disable_speculative_decoding`` runs with K' = 0, also where ``draft_lens`` does not list 0. It
takes the time of decoding without drafts, except for the draft KV that ``keep_warm`` keeps.

**In flight.** Whether a request is cold follows from launches, not from results: once a step is
launched, the state of its requests is fixed, whatever their output. Late results from before a
preemption are dropped by their epoch, and the gate does not count them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ExecutorError, expect
from mtp_plugin.speculative.draft_length.gain import AcceptanceRates, RequestGainPolicy
from mtp_plugin.speculative.host import may_speculate

_logger = logging.getLogger("mtp_plugin")


@dataclass
class DraftState:
    """How many drafts a request can use, after the steps launched so far."""

    limit: int
    """Maximum number of drafts that the current step verifies for the request."""
    warm: int
    """Number of drafts for which its draft KV and history are complete; 0: cold."""
    proposed: int = 0
    """Number of drafts that its last launched step makes for the next one."""
    most: int = sys.maxsize
    """Maximum number of drafts that the request allows (``max_draft_len``)."""
    acceptance: AcceptanceRates | None = None
    """Live acceptance rates, with ``mtp.adaptive_draft_len``; None before the first step."""

    @classmethod
    def fresh(cls, draft_len: int, most: int = sys.maxsize) -> DraftState:
        """Return the state of a warm request with K drafts, limited only by ``most``."""
        limit = min(draft_len, most)
        return cls(limit=limit, warm=draft_len, proposed=draft_len, most=most)

    @property
    def usable(self) -> int:
        """Return how many drafts it can verify, whatever a step makes."""
        return min(self.warm, self.most)


class LengthGate:
    """Decides whether one draft length is used, by the request-steps that verified so many drafts.

    An open gate closes as soon as the mean of the last ``acceptance_window`` request-steps is below
    ``close_below`` tokens. After ``gate_probe_interval`` steps it probes: it is open for one
    window. If the mean of the probe is at least ``open_at``, the gate stays open; else it closes
    for twice as long, up to ``gate_max_probe_interval``. Every decision needs a full window.

    Args:
        length: number of drafts.
        config: with the gate's options.
    """

    def __init__(self, length: int, config: MTPDecodingConfig) -> None:
        self.length, self.window = length, config.acceptance_window or 1
        share, threshold = length / config.draft_len, config.acceptance_length_threshold or 1.0
        self.close_below = 1 + (threshold - 1) * share
        self.open_at = 1 + (threshold - 1 + config.mtp.gate_margin) * share
        self.state: Literal["open", "closed", "probing"] = "open"
        self._interval = self._first_interval = config.mtp.gate_probe_interval
        self._max_interval = config.mtp.gate_max_probe_interval
        self._due = 0
        self._emitted: deque[int] = deque(maxlen=self.window)
        self._total = 0

    @property
    def acceptance_length(self) -> float:
        """Return the output tokens per request-step in the window, 0.0 if it is empty."""
        return self._total / len(self._emitted) if self._emitted else 0.0

    def admits(self, step: int) -> bool:
        """Return whether ``step`` may use this length; starts the probe if it is due."""
        if self.state == "closed" and step >= self._due:
            self.state = "probing"
        return self.state != "closed"

    def record(self, num_emitted: int, step: int) -> None:
        """Count a request-step that verified ``length`` drafts; its result arrives in ``step``."""
        if self.state == "closed":
            return  # launched before the gate closed
        if len(self._emitted) == self.window:
            self._total -= self._emitted[0]
        self._emitted.append(num_emitted)
        self._total += num_emitted
        if len(self._emitted) < self.window:
            return
        probing = self.state == "probing"
        threshold = self.open_at if probing else self.close_below
        pays = self._total >= self.window * threshold
        if pays and not probing:
            return
        _logger.info(
            "acceptance gate: draft length %d is %s, %.3f tokens per step over %d request-steps%s",
            self.length,
            "on again" if pays else "off",
            self.acceptance_length,
            self.window,
            "" if pays else f" (threshold {threshold:.3f})",
        )
        if pays:
            self.state = "open"
            return
        interval = self._interval * 2 if probing else self._first_interval
        self._interval = min(interval, self._max_interval)
        self._due = step + self._interval
        self.state = "closed"
        self._emitted.clear()
        self._total = 0


class DraftLengthController:
    """Chooses the draft length of every step, and how many drafts each request may use.

    The schedule (``draft_len_schedule`` or ``max_concurrency``) gives the largest length of a batch
    size. It is the length of every step, unless one of these chooses a smaller one:

    - The gate (``acceptance_window``) chooses the largest length of the schedule, or 0, that is
      worth its cost. Thresholds are proportional: if K drafts must reach
      ``acceptance_length_threshold`` tokens per step, k drafts must reach
      1 + (threshold - 1) * k / K, and ``mtp.gate_margin`` * k / K more after the gate closed. So
      the gate closes one length after the other, down to 0. Each length has a `LengthGate`, which
      counts the request-steps that verified exactly so many drafts. TensorRT-LLM's gate averages
      finished requests, does not count the bonus token, and never opens again: its threshold t is
      t + 1 here.
    - With ``mtp.adaptive_draft_len`` a `RequestGainPolicy` chooses among all lengths.

    Args:
        config: with K resolved (`MTPDecodingConfig.resolve`).
        max_batch_size: maximum number of requests of a batch.
        padded_sizes: batch sizes to which generation-only batches are padded.
        clock: returns seconds.

    Raises:
        ConfigError: K is not resolved.
    """

    def __init__(
        self,
        config: MTPDecodingConfig,
        *,
        max_batch_size: int,
        padded_sizes: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_draft_len = config.draft_len
        self.max_batch_size = max_batch_size
        self.keep_warm = config.mtp.keep_warm
        self._layer_per_depth = config.use_mtp_vanilla
        self._schedule = [config.draft_len_for(size) for size in range(1, max_batch_size + 1)]
        lengths = set(self._schedule)
        self.gain: RequestGainPolicy | None = None
        self.gates: dict[int, LengthGate] = {}
        if config.mtp.adaptive_draft_len:
            lengths = set(range(self.max_draft_len + 1))
            self.gain = RequestGainPolicy(self.max_draft_len, padded_sizes, clock)
        elif config.acceptance_window is not None:
            lengths |= {0, *(config.draft_len_schedule or {}).values()}
            self.gates = {length: LengthGate(length, config) for length in lengths - {0}}
        self._lengths = sorted(lengths)
        self._step = 0

    def draft_lens(self, batch_sizes: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return every draft length that batches of these sizes may use, ascending.

        Args:
            batch_sizes: default: all up to ``max_batch_size``.

        Raises:
            ExecutorError: a size out of range.
        """
        sizes = range(1, self.max_batch_size + 1) if batch_sizes is None else batch_sizes
        scheduled = {self._scheduled(size) for size in sizes}
        if self.gain is None and not self.gates and self.keep_warm:
            return tuple(sorted(scheduled))
        return tuple(k for k in self._lengths if scheduled and k <= max(scheduled))

    def choose(self, batch_size: int) -> int:
        """Return the draft length for the next step by schedule and gate; call once per step.

        Raises:
            ExecutorError: a size out of range.
        """
        scheduled = self._scheduled(batch_size)
        self._step += 1
        for length in reversed(self._lengths):
            if length <= scheduled:
                gate = self.gates.get(length)
                if gate is None or gate.admits(self._step):
                    return length
        return 0

    def record(self, num_emitted: int, num_drafted: int, request: Any = None) -> None:
        """Count one request-step.

        Args:
            num_emitted: output tokens, without those after a stop.
            num_drafted: verified drafts; steps without drafts do not count.
            request: required with ``mtp.adaptive_draft_len``.
        """
        if self.gain is not None:
            self.gain.record(request, num_emitted, num_drafted)
        elif (gate := self.gates.get(num_drafted)) is not None:
            gate.record(num_emitted, self._step)

    def finish(self, batch: Any) -> None:
        """Note that the results of a planned batch were read just now."""
        if self.gain is not None:
            self.gain.finish(batch)

    def plan(self, batch: Any) -> int:
        """Choose the draft length of a scheduled batch, and update ``py_draft_state`` of its
        requests.

        Call once per launched step. Afterwards ``limit`` applies to this step.

        Args:
            batch: a scheduled batch whose requests have a `DraftState` in ``py_draft_state``, and
                optionally ``py_disable_speculative_decoding``.

        Raises:
            ExecutorError: an empty batch, or a batch that is too large.
        """
        requests = batch.all_requests()
        for request in batch.context_requests:
            if request.is_first_context_chunk:
                # computes the prompt from its start: warm, without drafts
                state = request.py_draft_state
                state.warm, state.proposed = self.max_draft_len, 0
        size = len(requests)
        scheduled = self._scheduled(size)
        usable = max(r.py_draft_state.usable if may_speculate(r) else 0 for r in requests)
        if self.gain is not None:
            length = self.gain.choose_for(batch, min(scheduled, usable))
        else:
            length = self.choose(size)
            if usable < length and usable in self.draft_lens((size,)):
                length = usable
            if not batch.context_requests and not any(map(may_speculate, requests)):
                length = 0
        stays_warm = self.max_draft_len
        if not self.keep_warm and (self._layer_per_depth or length == 0):
            # the first pass of a reused layer writes all draft KV that later steps read
            stays_warm = length
        for request in requests:
            state = request.py_draft_state
            state.limit = min(length, state.proposed, state.usable)
            state.proposed = length
            state.warm = min(state.warm, stays_warm)
        return length

    def _scheduled(self, batch_size: int) -> int:
        """Return the largest draft length of a batch size."""
        expect(
            1 <= batch_size <= self.max_batch_size,
            ExecutorError,
            f"draft length: expected a batch of 1 to {self.max_batch_size} requests, got "
            f"{batch_size}",
        )
        return self._schedule[batch_size - 1]

"""How many drafts a step makes: the schedule by batch size, the acceptance gate, cold requests.

A step launched with the draft length K' verifies at most K' drafts per request and makes K' for the
next step. It is decided on the host before the launch, from the batch and from results up to the
step before last (under overlap), so nothing of it waits for the device. The controller counts steps
and adds integers: ranks that run the same requests decide alike. Ranks with requests of their own
(attention DP) take the smallest of their choices before any collective.

What an executor does with K' (captured graphs are keyed by padded batch and K'):

**Every step.** `DraftLengthController.plan` once, after scheduling and before the launch. A
generation has K'+1 rows, of which ``py_draft_state.limit`` + 1 count; the drafts behind are absent.
Drafts of the step before that the limit leaves out are dropped. When the length was raised, the
first step verifies only what the shorter step before it drafted.

**keep_warm: true, K' < K.** The draft side stays as if every step drafted K.

- Reused layer (eagle): the first pass runs over the accepted rows, also at K' = 0; K'-1 single-row
  passes follow. Heads are only needed for the K' drafts.
- One layer per depth (vanilla): the history advances, and all K depths run over the whole window,
  K' of them with their heads. Where a depth's last tokens were not drafted their ids are 0; later
  windows rewrite these rows before they count, since no step accepts more than was drafted for it.
- Prompt chunks run through every draft layer.

**keep_warm: false, K' < K.** Nothing runs that the K' drafts do not need. A request of such a step,
be it a prompt, loses what was not written; ``py_draft_state.warm`` is how many drafts it still has
complete draft KV for.

- K' = 0: no draft layer and no history. The request is cold, warm = 0.
- 0 < K' < K: a reused layer loses nothing. With one layer per depth the depths from K' on were
  skipped, so warm falls to K'.
- warm is K again only when the whole prompt is read again: a new request, or a preempted one.
  Further prompt chunks of a cold request cannot warm it.
- A batch whose requests can all use less than was chosen runs with that less: a cold batch drafts
  nothing, until a request joins it.
- Beside warm requests a cold one takes part in every pass; what comes out for it may be anything,
  and is never verified.

**In flight.** Coldness follows from launches, not from results: once a step is launched, the state
of its requests is fixed, whatever they turn out to emit. A preempted request starts anew with its
first prompt chunk; the late result of its old life is dropped with its epoch, and no gate sees it.

The embedded executor hands K' to the worker as ``runtime_draft_len``, in eager steps as in captured
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.speculative.draft_length.gate import LengthGate
from mtp_plugin.speculative.draft_length.schedule import DraftLengthSchedule
from mtp_plugin.speculative.host import may_speculate


class DraftLengthController:
    """Chooses the draft length of every step, and what each request may draft in it.

    The lengths are K, those of the schedule, and with a gate 0. The schedule gives the most for a
    batch size; the gate goes down from there to the largest length that pays. Drafts must pay in
    proportion: where K of them must reach ``acceptance_length_threshold`` tokens per step, k of
    them must reach 1 + (threshold - 1) * k / K, and ``mtp.gate_margin`` * k / K more to be taken up
    again. So the gate falls through the lengths that the schedule names, and ends at 0. Every
    length is judged by the request-steps that verified exactly so many drafts (`LengthGate`).

    TensorRT-LLM's gate averages finished requests, does not count the bonus, and never opens again:
    its threshold t is t + 1 here.

    Args:
        config: with K known (`MTPDecodingConfig.resolve`).
        max_batch_size: requests of one batch.

    Raises:
        ConfigError: K is not known.
    """

    def __init__(self, config: MTPDecodingConfig, *, max_batch_size: int) -> None:
        self.max_draft_len = config.draft_len
        self.max_batch_size = max_batch_size
        self.keep_warm = config.mtp.keep_warm
        self._layer_per_depth = config.use_mtp_vanilla
        self._schedule = DraftLengthSchedule(config, max_batch_size)
        lengths = self._schedule.lengths()
        if config.acceptance_window is not None:
            lengths |= {0, *(config.draft_len_schedule or {}).values()}
        self._lengths = sorted(lengths)
        self.gates: Mapping[int, LengthGate] = self._make_gates(config)
        self._step = 0

    def draft_lens(self, batch_sizes: Iterable[int] | None = None) -> tuple[int, ...]:
        """Every draft length that a batch of these sizes may run with, ascending.

        Args:
            batch_sizes: default: all up to ``max_batch_size``.

        Raises:
            ExecutorError: a size that no batch has.
        """
        most = self._schedule.lengths(batch_sizes)
        if self.gates or not self.keep_warm:
            return tuple(k for k in self._lengths if most and k <= max(most))
        return tuple(sorted(most))

    def choose(self, batch_size: int) -> int:
        """The draft length for the next step; call once per step.

        Raises:
            ExecutorError: a size that no batch has.
        """
        scheduled = self._schedule.length(batch_size)
        self._step += 1
        for length in reversed(self._lengths):
            if length <= scheduled:
                gate = self.gates.get(length)
                if gate is None or gate.admits(self._step):
                    return length
        return 0

    def record(self, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step.

        Args:
            num_emitted: tokens really emitted, a stop's cut counted.
            num_drafted: drafts really verified; steps without drafts say nothing and do not count.
        """
        gate = self.gates.get(num_drafted)
        if gate is not None:
            gate.record(num_emitted, self._step)

    def plan(self, batch: Any) -> int:
        """Choose a scheduled batch's draft length, and move its requests' ``py_draft_state`` on.

        Call once per launched step. Afterwards ``limit`` holds for the step at hand.

        Args:
            batch: a scheduled batch whose requests have a `DraftState` in ``py_draft_state``, and
                optionally ``py_disable_speculative_decoding``.

        Raises:
            ExecutorError: an empty batch, or one that is too large.
        """
        requests = batch.all_requests()
        for request in batch.context_requests:
            if request.is_first_context_chunk:
                request.py_draft_state.restart(self.max_draft_len)
        length = self._needed(requests, self.choose(len(requests)))
        stays_warm = self._stays_warm(length)
        for request in requests:
            request.py_draft_state.launch(length, stays_warm)
        return length

    def _needed(self, requests: Sequence[Any], length: int) -> int:
        """``length``, or what is left of it where no request can use it and less was captured."""
        usable = max(
            request.py_draft_state.usable if may_speculate(request) else 0 for request in requests
        )
        less = usable < length and usable in self.draft_lens((len(requests),))
        return usable if less else length

    def _stays_warm(self, length: int) -> int:
        if self.keep_warm:
            return self.max_draft_len
        # a reused layer's first pass writes every row that counts
        return length if self._layer_per_depth or length == 0 else self.max_draft_len

    def _make_gates(self, config: MTPDecodingConfig) -> dict[int, LengthGate]:
        window, threshold = config.acceptance_window, config.acceptance_length_threshold
        if window is None or threshold is None:
            return {}
        gates = {}
        for length in self._lengths:
            if length > 0:
                share = length / self.max_draft_len
                gates[length] = LengthGate(
                    length,
                    window=window,
                    close_below=1 + (threshold - 1) * share,
                    open_at=1 + (threshold - 1 + config.mtp.gate_margin) * share,
                    interval=config.mtp.gate_probe_interval,
                    max_interval=config.mtp.gate_max_probe_interval,
                )
        return gates

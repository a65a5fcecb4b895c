"""The draft length with the most tokens per second, from measured times and live acceptance."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_plugin.speculative.draft_length.acceptance_rates import AcceptanceRates
from mtp_plugin.speculative.draft_length.step_times import StepTimes
from mtp_plugin.speculative.host import has_finished, may_speculate

EXPLORATION_STEPS = 8
"""Steps of each draft length when a batch size is new; the first ones may run before their CUDA
graph is captured."""
MAX_EXPLORATION_STEPS = 24
"""Steps after which a length that could not be measured is left to the probes."""
DECISION_INTERVAL = 8
"""Steps between two decisions."""
SWITCH_GAIN = 0.02
"""Gain at which the length changes: of one decision, or summed over consecutive ones."""
PROBE_STEPS = 8
"""Steps of a probe of another length."""
PROBE_SHARE = 0.005
"""Share of the tokens that probes may cost."""
LEAST_PROBE_INTERVAL = 128
"""Minimum number of steps between two probes of a length."""
REQUEST_HORIZON, BATCH_HORIZON = 64, 1024
"""Samples over which the rates of a request, and of all requests, are averaged."""
REQUEST_PRIOR, BATCH_PRIOR = 8.0, 2.0
"""Samples as which the rates of all requests count for a request, and the first rate for all."""
FIRST_RATE = 0.7
"""Acceptance rate before the first sample."""


@dataclass
class _Shape:
    """What is known of batches of one padded size and sampling kind."""

    times: StepTimes = field(default_factory=StepTimes)
    current: int | None = None
    """The length in use; None before the first decision."""
    step: int = 0
    """Number of generation-only steps."""
    decided: int = 0
    """Step of the last decision."""
    advantage: float = 0.0
    """Summed gain of other lengths over consecutive decisions."""
    explored: dict[int, int] = field(default_factory=dict)
    """Number of exploration steps by length."""
    used: dict[int, int] = field(default_factory=dict)
    """Last step of each length."""
    probe: int = 0
    probe_steps: int = 0
    """The length that is probed, and the remaining steps of the probe."""


@dataclass(frozen=True)
class _Launched:
    """A step whose results have not been read yet."""

    batch: weakref.ReferenceType[Any]
    shape: _Shape | None
    """None: the step has prompts, so its time is not counted."""
    length: int
    number: int


class GainPolicy:
    """Chooses the draft length that gives most tokens per second.

    A length k gives sum over requests of (1 + a1 + a1*a2 + ... + a1*...*ak) tokens in t(k) seconds:

    - a_i is the request's acceptance rate at position i, an exponential average that begins with
      the average of all requests.
    - t(k) is the time between the results of two consecutive generation-only steps of the same
      padded batch size, sampling kind and length, as the host sees it; nothing waits for the
      device. With the overlap loop this is the time of the step on the device.

    0 is always a candidate. A new batch size tries every length for a few steps; later a length
    that is not in use is probed so rarely that all probes cost less than one percent. The choice
    uses results up to the step before last.

    Times differ between ranks, so ranks that run one batch must not decide on their own.

    Args:
        max_draft_len: K.
        padded_size: number of requests -> batch size of the step, with padding.
        longest_with_prompts: steps with prompts use the largest length, as only for that there are
            CUDA graphs; False: the length in use.
        clock: returns seconds.
    """

    def __init__(
        self,
        max_draft_len: int,
        padded_size: Callable[[int], int],
        *,
        longest_with_prompts: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_draft_len = max_draft_len
        self._padded_size = padded_size
        self._longest_with_prompts = longest_with_prompts
        self._clock = clock
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._rates = AcceptanceRates(max_draft_len, horizon=BATCH_HORIZON)
        self._counts: Counter[tuple[int, int]] = Counter()
        """(accepted, verified) of request-steps that are not in the rates yet."""
        self._latest = max_draft_len
        self._last_shape: _Shape | None = None
        self._launched: deque[_Launched] = deque(maxlen=2)
        self._number = 0
        self._finished: tuple[int, _Shape | None, int, float] | None = None

    def choose(self, batch: Any, most: int) -> int:
        """Return the draft length, 0 to ``most``, of the next step; call once per launched step."""
        requests = batch.all_requests()
        kind = max(int(request.sampling_kind) for request in requests)
        key = (self._padded_size(len(requests)), kind)
        shape = self._shapes.get(key)
        if batch.context_requests:
            length = most
            if not self._longest_with_prompts:
                known = None if shape is None else shape.current
                length = min(self._latest if known is None else known, most)
            self._add_launched(batch, None, length)
            return length
        if shape is None:
            shape = self._shapes[key] = _Shape()
        length = self._choose_measured(shape, requests, most)
        shape.used[length] = shape.step
        self._add_launched(batch, shape, length)
        return length

    def finish(self, batch: Any) -> None:
        """Take the time of a step whose results were read just now."""
        now = self._clock()
        while self._launched:
            step = self._launched.popleft()
            if step.batch() is batch:
                break
        else:
            return
        previous, self._finished = self._finished, (step.number, step.shape, step.length, now)
        if previous is None or step.shape is None:
            return
        number, shape, length, then = previous
        if number == step.number - 1 and shape is step.shape and length == step.length:
            shape.times.record(length, now - then, in_use=length == shape.current)

    def record(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step; one that ends its request may lack output and is not counted."""
        if num_drafted == 0 or has_finished(request):
            return
        state = request.py_draft_state
        if state.acceptance is None:
            state.acceptance = AcceptanceRates(self.max_draft_len, horizon=REQUEST_HORIZON)
        num_accepted = min(num_emitted - 1, num_drafted)
        state.acceptance.record(num_accepted, num_drafted)
        self._counts[num_accepted, num_drafted] += 1

    # ---- the choice -------------------------------------------------------------------------

    def _choose_measured(self, shape: _Shape, requests: Sequence[Any], most: int) -> int:
        shape.step += 1
        is_new, self._last_shape = shape is not self._last_shape, shape
        # the longest one first: it gives the first acceptance rates of all positions
        order: list[int] = [most, 0, *range(most - 1, 0, -1)]
        for length in order:
            count = shape.explored.get(length, 0)
            is_new_length = count < EXPLORATION_STEPS or not shape.times.is_measured(length)
            if is_new_length and count < MAX_EXPLORATION_STEPS:
                shape.explored[length] = count + 1
                return length
        is_probing = shape.probe_steps > 0 and shape.probe <= most
        is_due = is_new or shape.step >= shape.decided + DECISION_INTERVAL
        if not is_probing and (is_due or shape.current is None):
            self._decide(shape, requests, most)
        if shape.probe_steps > 0 and shape.probe <= most:
            shape.probe_steps -= 1
            return shape.probe
        return min(self._latest if shape.current is None else shape.current, most)

    def _decide(self, shape: _Shape, requests: Sequence[Any], most: int) -> None:
        """Update the length in use, and start a probe if one is due."""
        shape.decided, shape.probe_steps = shape.step, 0
        self._rates.record_all(self._counts)
        self._counts.clear()
        times = [shape.times.of(length) for length in range(most + 1)]
        tokens = self._expected_tokens(requests, most)
        rates = [count / t if t else 0.0 for count, t in zip(tokens, times, strict=True)]
        best = max(range(most + 1), key=rates.__getitem__)
        if rates[best] == 0.0:
            return  # no step was measured
        if shape.current is None:
            shape.current = self._latest = best
        current = min(shape.current, most)
        shape.advantage += rates[best] / max(rates[current], 1e-9) - 1
        if best == current:
            shape.advantage = 0.0
        elif shape.advantage > SWITCH_GAIN:
            shape.current, shape.advantage = best, 0.0
            shape.times.restart(best)
        self._latest = shape.current
        self._start_probe(shape, rates)

    @staticmethod
    def _start_probe(shape: _Shape, rates: list[float]) -> None:
        """Start a probe of the length that has waited longest for one, by its expected cost."""
        others = [length for length in range(len(rates)) if length != shape.current]
        most_overdue = 1.0
        for length in others:
            loss = max(1 - rates[length] / max(rates), 0.0)
            interval = PROBE_STEPS * loss * len(others) / PROBE_SHARE
            waited = shape.step - shape.used.get(length, 0)
            overdue = waited / max(interval, LEAST_PROBE_INTERVAL)
            if overdue >= most_overdue:
                most_overdue, shape.probe, shape.probe_steps = overdue, length, PROBE_STEPS
        if shape.probe_steps:
            shape.times.restart(shape.probe)

    def _expected_tokens(self, requests: Sequence[Any], most: int) -> list[float]:
        """Return the expected output tokens of a step by draft length, 0 to ``most``."""
        means: list[float] = []
        for position in range(most):
            before = means[-1] if means else FIRST_RATE
            means.append(self._rates.rate(position, before, BATCH_PRIOR))
        totals = [float(len(requests))] + [0.0] * most
        for request in requests:
            state = request.py_draft_state
            usable = state.usable if may_speculate(request) else 0
            rates, tokens, share = state.acceptance, 1.0, 1.0
            for position, mean in enumerate(means):
                if position < usable:
                    share *= mean if rates is None else rates.rate(position, mean, REQUEST_PRIOR)
                    tokens += share
                totals[position + 1] += tokens
        return totals

    def _add_launched(self, batch: Any, shape: _Shape | None, length: int) -> None:
        self._number += 1
        self._launched.append(_Launched(weakref.ref(batch), shape, length, self._number))

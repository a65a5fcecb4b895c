"""The draft length with the most tokens per second, from measured times and live acceptance."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_plugin.speculative.host import has_finished, may_speculate

DECISION_INTERVAL = 8
"""Steps between two decisions."""
SWITCH_GAIN = 0.02
"""Gain at which the length changes: of one decision, or summed over consecutive ones."""
PROBE_STEPS = 8
"""Steps of a probe of another length; the first ones may run before a CUDA graph is captured."""
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
WINDOW, LEAST_SAMPLES = 16, 4
"""Latest steps of a length whose times are kept, and steps from which on it is measured."""


class AcceptanceRates:
    """Exponential averages of the acceptance rate of each draft position.

    The rate of position i is conditional: of the steps that accepted drafts 1..i-1 and verified
    draft i, the share that accepted it. A position that is not verified keeps its rate.

    Args:
        horizon: number of samples over which a position is averaged.
    """

    def __init__(self, draft_len: int, *, horizon: int) -> None:
        self._decay = 1 - 1 / horizon
        self._verified = [0.0] * draft_len
        self._accepted = [0.0] * draft_len
        self._counts: Counter[tuple[int, int]] = Counter()
        """(accepted, verified drafts) of steps that are not in the averages yet."""

    def record(self, num_accepted: int, num_drafted: int) -> None:
        """Count a step that accepted ``num_accepted`` of ``num_drafted`` drafts."""
        self._counts[num_accepted, num_drafted] += 1

    def rate(self, position: int, expected: float, weight: float) -> float:
        """Return the rate of a position, with ``weight`` samples of the rate ``expected`` added."""
        if self._counts:
            self._average()
        return (self._accepted[position] + weight * expected) / (self._verified[position] + weight)

    def _average(self) -> None:
        counts, self._counts = self._counts, Counter()
        for i in range(len(self._verified)):
            decided = {n: c for n, c in counts.items() if min(n[0] + 1, n[1]) > i}
            total = sum(decided.values())
            decay = self._decay**total
            self._verified[i] = self._verified[i] * decay + total
            passed = sum(count for (accepted, _), count in decided.items() if accepted > i)
            self._accepted[i] = self._accepted[i] * decay + passed


class StepTimes:
    """Times of steps of one shape by draft length.

    The time of a length is the lower median of its latest steps, which ignores delayed steps. Only
    the length in use is measured all the time. If its time drifts (longer sequences, another
    clock rate), the older times of the other lengths move by the same amount.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._times: dict[int, float] = {}

    def restart(self, length: int) -> None:
        """Measure a length anew; its old time stays until there are enough steps."""
        if length in self._times:
            self._samples.pop(length, None)

    def record(self, length: int, seconds: float, *, in_use: bool) -> None:
        """Count a step; the times of other lengths follow the drift of the one ``in_use``."""
        samples = self._samples.setdefault(length, deque(maxlen=WINDOW))
        is_full = len(samples) == WINDOW
        samples.append(seconds)
        if len(samples) < LEAST_SAMPLES:
            return
        median = sorted(samples)[(len(samples) - 1) // 2]
        drift = median - self._times.get(length, median) if in_use and is_full else 0.0
        for other, known in self._times.items():
            self._times[other] = max(known + drift, 0.1 * known)
        self._times[length] = median

    def of(self, length: int) -> float | None:
        """Return the time of a length, interpolated if it is not measured; None: not known."""
        if not self._times or length in self._times:
            return self._times.get(length)
        # the lengths around it, or twice the nearest one
        below = max((k for k in self._times if k < length), default=min(self._times))
        above = min((k for k in self._times if k > length), default=below)
        share = (length - below) / (above - below) if above > below else 0.0
        return self._times[below] * (1 - share) + self._times[above] * share


@dataclass
class _Shape:
    """What is known of batches of one padded size and sampling kind."""

    current: int
    """The length in use."""
    times: StepTimes = field(default_factory=StepTimes)
    step: int = 0
    """Number of generation-only steps."""
    decided: int = -DECISION_INTERVAL
    """Step of the last decision."""
    advantage: float = 0.0
    """Summed gain of other lengths over consecutive decisions."""
    used: dict[int, int] = field(default_factory=dict)
    """Last step of each length."""
    probe: int = 0
    probe_steps: int = 0
    """The length that is probed, and the remaining steps of the probe."""


@dataclass(frozen=True)
class _Step:
    """A launched step; ``shape`` is None with prompts, whose time is not counted."""

    number: int
    batch: weakref.ReferenceType[Any]
    shape: _Shape | None
    length: int


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
        padded_sizes: batch sizes to which generation-only batches are padded, if they are. Steps
            with prompts then use the largest length, as only for that there are CUDA graphs, else
            the length in use.
        clock: returns seconds.
    """

    def __init__(
        self,
        max_draft_len: int,
        padded_sizes: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_draft_len = max_draft_len
        self._padded_sizes = sorted(padded_sizes)
        self._clock = clock
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._rates = AcceptanceRates(max_draft_len, horizon=BATCH_HORIZON)
        self._latest = max_draft_len
        self._number = 0
        self._launched: deque[_Step] = deque(maxlen=2)
        self._finished: tuple[_Step, float] | None = None

    def choose(self, batch: Any, most: int) -> int:
        """Return the draft length, 0 to ``most``, of the next step; call once per launched step."""
        requests = batch.all_requests()
        size = len(requests)
        # steps without padding: close sizes have close times
        padded = next((n for n in self._padded_sizes if n >= size), 1 << (size - 1).bit_length())
        key = (padded, max(int(request.sampling_kind) for request in requests))
        shape: _Shape | None = None
        if batch.context_requests:
            length = most if self._padded_sizes else min(self._latest, most)
        else:
            shape = self._shapes.setdefault(key, _Shape(most))
            length = self._choose_measured(shape, requests, most)
            shape.used[length] = shape.step
        self._number += 1
        self._launched.append(_Step(self._number, weakref.ref(batch), shape, length))
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
        before, self._finished = self._finished, (step, now)
        if before is None or step.shape is None:
            return
        last, then = before
        is_next = last.number == step.number - 1
        if is_next and last.shape is step.shape and last.length == step.length:
            in_use = step.length == step.shape.current
            step.shape.times.record(step.length, now - then, in_use=in_use)

    def record(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step; one that ends its request may lack output and is not counted."""
        if num_drafted == 0 or has_finished(request):
            return
        state = request.py_draft_state
        if state.acceptance is None:
            state.acceptance = AcceptanceRates(self.max_draft_len, horizon=REQUEST_HORIZON)
        for rates in (state.acceptance, self._rates):
            rates.record(min(num_emitted - 1, num_drafted), num_drafted)

    # ---- the choice -------------------------------------------------------------------------

    def _choose_measured(self, shape: _Shape, requests: Sequence[Any], most: int) -> int:
        shape.step += 1
        if shape.probe > most:
            shape.probe_steps = 0
        if shape.probe_steps == 0:
            # the longest one first: it gives the first acceptance rates of all positions
            new = next((k for k in (most, 0, *range(most - 1, 0, -1)) if k not in shape.used), None)
            if new is not None:
                shape.probe, shape.probe_steps = new, PROBE_STEPS
            elif shape.step >= shape.decided + DECISION_INTERVAL:
                self._decide(shape, requests, most)
        if shape.probe_steps:
            shape.probe_steps -= 1
            return shape.probe
        return min(shape.current, most)

    def _decide(self, shape: _Shape, requests: Sequence[Any], most: int) -> None:
        """Update the length in use, and start a probe if one is due."""
        shape.decided = shape.step
        times = [shape.times.of(length) for length in range(most + 1)]
        tokens = self._expected_tokens(requests, most)
        rates = [count / t if t else 0.0 for count, t in zip(tokens, times, strict=True)]
        best = max(range(most + 1), key=rates.__getitem__)
        if rates[best] == 0.0:
            return  # no step was measured
        gain = rates[best] / rates[min(shape.current, most)] - 1
        shape.advantage = shape.advantage + gain if gain > 0 else 0.0
        if shape.advantage > SWITCH_GAIN:
            shape.current, shape.advantage = best, 0.0
            shape.times.restart(best)
        self._latest = shape.current
        # probe the length that has waited longest for it, by its expected cost
        others = [length for length in range(most + 1) if length != shape.current]
        most_overdue = 1.0
        for length in others:
            loss = 1 - rates[length] / rates[best]
            interval = PROBE_STEPS * loss * len(others) / PROBE_SHARE
            overdue = (shape.step - shape.used[length]) / max(interval, LEAST_PROBE_INTERVAL)
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

"""The draft length with the most tokens per second, from measured times and live acceptance."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mtp_plugin.speculative.host import has_finished, may_speculate

DECISION_INTERVAL = 8
"""Steps between two decisions."""
SWITCH_GAIN = 0.02
"""Gain at which the length changes: of one decision, or summed over consecutive ones."""
PROBE_STEPS = 8
"""Steps of a probe of another length; the first ones may run before a CUDA graph is captured."""
WORTH_TRYING = 0.15
"""Loss by interpolated times below which a new batch size tries a length at once."""
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

MOST_IN_FLIGHT = 64
"""Steps that are launched before the results of the first one are read; more are not measured."""
ExpectedTokens = Callable[[int], Sequence[float]]
"""Returns the expected output tokens of a step by draft length, from 0 to the given one; they may
be those of an average request."""


class AcceptanceRates:
    """Exponential averages of the acceptance rate of each draft position.

    The rate of position i is conditional: of the steps that accepted drafts 1..i-1 and verified
    draft i, the share that accepted it. A position that is not verified keeps its rate.

    Args:
        horizon: number of samples over which a position is averaged.
    """

    def __init__(self, draft_len: int, *, horizon: float) -> None:
        self._decay = 1 - 1 / horizon
        self._verified = [0.0] * draft_len
        self._accepted = [0.0] * draft_len
        self._counts: Counter[tuple[int, int]] = Counter()
        """(accepted, verified drafts) of steps that are not in the averages yet."""

    def record(self, num_accepted: int, num_drafted: int, count: int = 1) -> None:
        """Count ``count`` steps that accepted ``num_accepted`` of ``num_drafted`` drafts."""
        self._counts[num_accepted, num_drafted] += count

    def fade(self, share: float, least: float) -> None:
        """Reduce the samples of every position, also of one that is not verified.

        Args:
            share: of the samples that are kept.
            least: number of samples that are kept in any case, with their rate.
        """
        self._average()
        for i, verified in enumerate(self._verified):
            kept = min(verified, max(verified * share, least))
            self._accepted[i] *= kept / verified if verified else 1.0
            self._verified[i] = kept

    def rate(self, position: int, expected: float, weight: float) -> float:
        """Return the rate of a position, with ``weight`` samples of the rate ``expected`` added."""
        if self._counts:
            self._average()
        return (self._accepted[position] + weight * expected) / (self._verified[position] + weight)

    def means(self, most: int) -> list[float]:
        """Return the rates of positions 0 to ``most`` - 1; each begins with that before it."""
        rates: list[float] = []
        for position in range(most):
            before = rates[-1] if rates else FIRST_RATE
            rates.append(self.rate(position, before, BATCH_PRIOR))
        return rates

    def _average(self) -> None:
        length = len(self._verified)
        totals, passed = [0] * length, [0] * length
        for (accepted, verified), count in self._counts.items():
            for i in range(min(accepted + 1, verified)):
                totals[i] += count
            for i in range(accepted):
                passed[i] += count
        self._counts.clear()
        for i, total in enumerate(totals):
            decay = self._decay**total
            self._verified[i] = self._verified[i] * decay + total
            self._accepted[i] = self._accepted[i] * decay + passed[i]


class StepTimes:
    """Times of steps of one shape by draft length.

    The time of a length is the lower median of its latest steps, which ignores delayed steps. Only
    the length in use is measured all the time. If its time drifts (longer sequences, another
    clock rate), the older times of the other lengths move by the same amount, or partly by the
    same factor.

    Args:
        scaled: share of a drift that moves the others by the same factor.
    """

    def __init__(self, scaled: float = 0.0) -> None:
        self._scaled = scaled
        self._samples: dict[int, deque[float]] = {}
        self._times: dict[int, float] = {}
        self._borrowed: set[int] = set()

    def of_another_shape(self) -> StepTimes:
        """Return times for a shape that has none of its own; the first one scales the others."""
        times = StepTimes(self._scaled)
        times._times = dict(self._times)
        times._borrowed = set(self._times)
        return times

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
        before = self._times.get(length, median)
        drift = median - before if in_use and is_full else 0.0
        scale = median / before if length in self._borrowed else 1.0
        self._borrowed.discard(length)
        if drift or scale != 1.0:
            for other, known in self._times.items():
                known *= scale if other in self._borrowed else 1.0
                moved = drift * (1 + self._scaled * (known / before - 1))
                self._times[other] = max(known + moved, 0.1 * known)
        self._times[length] = median

    def knows(self, length: int) -> bool:
        """Return whether a length was measured, in this shape or in the one before it."""
        return length in self._times

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
    times: StepTimes
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


class _Step(NamedTuple):
    """A launched step; ``shape`` is None with prompts, whose time is not counted."""

    number: int
    batch: weakref.ReferenceType[Any]
    shape: _Shape | None
    length: int


class GainPolicy:
    """Chooses the draft length that gives most tokens per second.

    A length k gives sum over requests of (1 + a1 + a1*a2 + ... + a1*...*ak) tokens in t(k) seconds:

    - a_i is the acceptance rate at position i.
    - t(k) is the time between the results of two consecutive generation-only steps of the same
      key (padded batch size, sampling kind) and length, as the host sees it; nothing waits for the
      device. With the overlap loop this is the time of the step on the device.

    0 is always a candidate. A new batch size tries K, 0, and then the lengths between them that may
    pay, for a few steps each; later a length that is not in use is probed so rarely that all probes
    cost less than one percent. The choice uses results up to the step before last.

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
        self._latest = max_draft_len
        self._number = 0
        self._launched: deque[_Step] = deque(maxlen=MOST_IN_FLIGHT)
        self._finished: tuple[_Step, float] | None = None

    def choose(
        self, batch: Any, key: tuple[int, int] | None, most: int, tokens: ExpectedTokens
    ) -> int:
        """Return the draft length, 0 to ``most``, of the next step; call once per launched step.

        Args:
            batch: identifies the step.
            key: what steps of similar times have in common; None: a step with prompts.
            tokens: of this step.
        """
        shape: _Shape | None = None
        if key is None:
            length = most if self._padded_sizes else min(self._latest, most)
        else:
            shape = self._shapes.get(key) or self._new_shape(key, most)
            length = self._choose_measured(shape, tokens, most)
            shape.used[length] = shape.step
        self._number += 1
        self._launched.append(_Step(self._number, weakref.ref(batch), shape, length))
        return length

    def padded(self, size: int) -> int:
        """Return the batch size to which a batch is padded; without: close sizes, close times."""
        return next((n for n in self._padded_sizes if n >= size), 1 << (size - 1).bit_length())

    def finish(self, batch: Any) -> None:
        """Take the time of a step whose results were read just now."""
        now = self._clock()
        if not any(step.batch() is batch for step in self._launched):
            return  # launched before this policy chose
        while (step := self._launched.popleft()).batch() is not batch:
            pass
        before, self._finished = self._finished, (step, now)
        if before is None or step.shape is None:
            return
        last, then = before
        is_next = last.number == step.number - 1
        if is_next and last.shape is step.shape and last.length == step.length:
            in_use = step.length == step.shape.current
            step.shape.times.record(step.length, now - then, in_use=in_use)

    # ---- the choice -------------------------------------------------------------------------

    def _new_shape(self, key: tuple[int, int], most: int) -> _Shape:
        """Add a shape; it begins with what is known of one with half to twice its batch size."""
        size, kind = key
        near = [
            (abs(n - size), n)
            for n, other in self._shapes
            if other == kind and max(n, size) <= 2 * min(n, size)
        ]
        # without padding a shape has batches of several sizes
        shape = _Shape(most, StepTimes(0.0 if self._padded_sizes else 0.5))
        if near:
            known = self._shapes[min(near)[1], kind]
            shape.current, shape.times = known.current, known.times.of_another_shape()
        self._shapes[key] = shape
        return shape

    def _choose_measured(self, shape: _Shape, tokens_of: ExpectedTokens, most: int) -> int:
        shape.step += 1
        if shape.probe > most:
            shape.probe_steps = 0
        if shape.probe_steps == 0:
            # the longest one first: it gives the first acceptance rates of all positions
            for length in (most, 0):
                if length not in shape.used and not shape.times.knows(length):
                    shape.probe, shape.probe_steps = length, PROBE_STEPS
                    break
            else:
                if shape.step >= shape.decided + DECISION_INTERVAL:
                    self._decide(shape, tokens_of, most)
        if shape.probe_steps:
            shape.probe_steps -= 1
            return shape.probe
        return min(shape.current, most)

    def _decide(self, shape: _Shape, tokens_of: ExpectedTokens, most: int) -> None:
        """Update the length in use, and start a probe if one is due."""
        shape.decided = shape.step
        times = [shape.times.of(length) for length in range(most + 1)]
        tokens = tokens_of(most)
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
            overdue = (shape.step - shape.used.get(length, 0)) / max(interval, LEAST_PROBE_INTERVAL)
            if length not in shape.used and loss < WORTH_TRYING:
                overdue = math.inf
            if overdue >= most_overdue:
                most_overdue, shape.probe, shape.probe_steps = overdue, length, PROBE_STEPS
        if shape.probe_steps:
            shape.times.restart(shape.probe)


class RequestGainPolicy(GainPolicy):
    """Chooses by the acceptance rates of every request of a batch.

    A request's rates are exponential averages that begin with those of all requests.

    Args:
        max_draft_len, padded_sizes, clock: see `GainPolicy`.
    """

    def __init__(
        self,
        max_draft_len: int,
        padded_sizes: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(max_draft_len, padded_sizes, clock)
        self._rates = AcceptanceRates(max_draft_len, horizon=BATCH_HORIZON)

    def choose_for(self, batch: Any, most: int) -> int:
        """Return the draft length, 0 to ``most``, of a batch; call once per launched step."""
        requests = batch.all_requests()
        key = None
        if not batch.context_requests:
            kind = max(int(request.sampling_kind) for request in requests)
            key = (self.padded(len(requests)), kind)
        return self.choose(batch, key, most, lambda most: self._expected_tokens(requests, most))

    def record(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step; one that ends its request may lack output and is not counted."""
        if num_drafted == 0 or has_finished(request):
            return
        state = request.py_draft_state
        if state.acceptance is None:
            state.acceptance = AcceptanceRates(self.max_draft_len, horizon=REQUEST_HORIZON)
        for rates in (state.acceptance, self._rates):
            rates.record(min(num_emitted - 1, num_drafted), num_drafted)

    def _expected_tokens(self, requests: Sequence[Any], most: int) -> list[float]:
        """Return the expected output tokens of a step by draft length, 0 to ``most``."""
        means = self._rates.means(most)
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

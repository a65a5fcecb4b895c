"""Measured times of steps by draft length."""

from __future__ import annotations

from collections import deque

WINDOW = 16
"""Number of latest steps of a length whose times are kept."""
LEAST_SAMPLES = 4
"""Number of steps from which on a length is measured."""


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
        self._samples.pop(length, None)

    def record(self, length: int, seconds: float, *, in_use: bool) -> None:
        """Count a step.

        Args:
            in_use: whether other lengths follow the drift of this one.
        """
        samples = self._samples.setdefault(length, deque(maxlen=WINDOW))
        is_full = len(samples) == WINDOW
        samples.append(seconds)
        if len(samples) < LEAST_SAMPLES:
            return
        drift = -self._times.get(length, 0.0)
        self._times[length] = sorted(samples)[(len(samples) - 1) // 2]
        drift += self._times[length]
        if in_use and is_full and drift:
            for other in self._times:
                if other != length:
                    self._times[other] = max(self._times[other] + drift, 0.1 * self._times[other])

    def is_measured(self, length: int) -> bool:
        """Whether enough steps of a length were measured."""
        return length in self._times

    def of(self, length: int) -> float | None:
        """Return the time of a length, interpolated if it is not measured; None: not known."""
        if length in self._times:
            return self._times[length]
        below = max((k for k in self._times if k < length), default=None)
        above = min((k for k in self._times if k > length), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return None if nearest is None else self._times[nearest]
        share = (length - below) / (above - below)
        return self._times[below] * (1 - share) + self._times[above] * share

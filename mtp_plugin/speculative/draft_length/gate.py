"""The acceptance gate of one draft length."""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum

_logger = logging.getLogger("mtp_plugin")


class GateState(Enum):
    OPEN = "open"
    CLOSED = "closed"
    PROBING = "probing"


class LengthGate:
    """Decides whether one draft length is used, by the request-steps that verified so many drafts.

    An open gate closes as soon as the mean of the last ``window`` request-steps is below
    ``close_below``. After ``interval`` steps it probes: it is open for one window. If the mean of
    the probe is at least ``open_at``, the gate stays open; else it closes for twice as long, up to
    ``max_interval``. Every decision needs ``window`` request-steps.

    Args:
        length: number of drafts.
        window: number of request-steps of a decision.
        close_below, open_at: acceptance lengths (output tokens per step, with the bonus token).
        interval, max_interval: in steps.
    """

    def __init__(
        self,
        length: int,
        *,
        window: int,
        close_below: float,
        open_at: float,
        interval: int,
        max_interval: int,
    ) -> None:
        self.length, self.window = length, window
        self.close_below, self.open_at = close_below, open_at
        self.state = GateState.OPEN
        self.num_closings = self.num_probes = self.num_openings = 0
        self._interval = self._first_interval = interval
        self._max_interval = max_interval
        self._due = 0
        self._emitted: deque[int] = deque(maxlen=window)
        self._total = 0

    @property
    def acceptance_length(self) -> float:
        """Return the output tokens per request-step in the window, 0.0 if it is empty."""
        return self._total / len(self._emitted) if self._emitted else 0.0

    def admits(self, step: int) -> bool:
        """Return whether ``step`` may use this length; starts the probe if it is due."""
        if self.state is GateState.CLOSED and step >= self._due:
            self.state = GateState.PROBING
            self.num_probes += 1
        return self.state is not GateState.CLOSED

    def record(self, num_emitted: int, step: int) -> None:
        """Count a request-step that verified ``length`` drafts; its result arrives in ``step``."""
        if self.state is GateState.CLOSED:
            return  # launched before the gate closed
        if len(self._emitted) == self.window:
            self._total -= self._emitted[0]
        self._emitted.append(num_emitted)
        self._total += num_emitted
        if len(self._emitted) < self.window:
            return
        probing = self.state is GateState.PROBING
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
            self.state = GateState.OPEN
            self.num_openings += 1
            return
        self.num_closings += not probing
        interval = self._interval * 2 if probing else self._first_interval
        self._interval = min(interval, self._max_interval)
        self._due = step + self._interval
        self.state = GateState.CLOSED
        self._emitted.clear()
        self._total = 0

"""Whether drafting one length pays."""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum

_logger = logging.getLogger("mtp_plugin")


class GateState(Enum):
    """Where a gate stands."""

    OPEN = "open"
    CLOSED = "closed"
    PROBING = "probing"


class LengthGate:
    """Whether drafting one length pays, by the request-steps that verified so many drafts.

    Open, it closes as soon as the mean of the last ``window`` request-steps is under
    ``close_below``. ``interval`` steps later it opens for one window, the probe; a mean of at least
    ``open_at`` leaves it open, anything less closes it for twice as long, up to
    ``max_interval``. No decision rests on fewer than ``window`` request-steps, and a mean between
    the two bars leaves open what is open and closed what is closed.

    Args:
        length: drafts.
        window: request-steps of a decision.
        close_below, open_at: acceptance lengths (emitted tokens per step, the bonus counts).
        interval, max_interval: steps.
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
        self.length = length
        self.window = window
        self.close_below = close_below
        self.open_at = open_at
        self.state = GateState.OPEN
        self.num_closings = 0
        self.num_probes = 0
        self.num_openings = 0
        self._interval = self._first_interval = interval
        self._max_interval = max_interval
        self._due = 0
        self._emitted: deque[int] = deque(maxlen=window)
        self._total = 0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per request-step in the window; 0.0 while it is empty."""
        return self._total / len(self._emitted) if self._emitted else 0.0

    def admits(self, step: int) -> bool:
        """Whether this length may be drafted in ``step``; starts the probe that is due."""
        if self.state is GateState.CLOSED and step >= self._due:
            self.state = GateState.PROBING
            self.num_probes += 1
        return self.state is not GateState.CLOSED

    def record(self, num_emitted: int, step: int) -> None:
        """Count a request-step that verified ``length`` drafts; its result is known in ``step``."""
        if self.state is GateState.CLOSED:
            return  # launched before the gate closed
        if len(self._emitted) == self.window:
            self._total -= self._emitted[0]
        self._emitted.append(num_emitted)
        self._total += num_emitted
        if len(self._emitted) < self.window:
            return
        probing = self.state is GateState.PROBING
        pays = self._total >= self.window * (self.open_at if probing else self.close_below)
        if not pays:
            self._close(step, self._interval * 2 if probing else self._first_interval)
        elif probing:
            self._open()

    def _close(self, step: int, interval: int) -> None:
        _logger.info(
            "acceptance gate: %d drafts do not pay, %.3f tokens per step over %d request-steps "
            "(bar %.3f)",
            self.length,
            self.acceptance_length,
            self.window,
            self.open_at if self.state is GateState.PROBING else self.close_below,
        )
        self.num_closings += self.state is GateState.OPEN
        self.state = GateState.CLOSED
        self._interval = min(interval, self._max_interval)
        self._due = step + self._interval
        self._emitted.clear()
        self._total = 0

    def _open(self) -> None:
        _logger.info(
            "acceptance gate: %d drafts pay again, %.3f tokens per step over %d request-steps",
            self.length,
            self.acceptance_length,
            self.window,
        )
        self.state = GateState.OPEN
        self.num_openings += 1

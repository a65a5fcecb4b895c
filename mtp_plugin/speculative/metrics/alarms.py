"""Alarms on acceptance, for problems that accuracy tests do not detect.

Two conditions are logged through the logger ``mtp_plugin``, each once until it ends: **collapse**
(almost no draft is accepted; the output stays correct, but drafting only costs time) and
**looping** (everything is accepted because the output repeats itself).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from mtp_plugin.speculative.host import has_finished
from mtp_plugin.speculative.metrics.acceptance import num_decided_drafts

_logger = logging.getLogger("mtp_plugin")

ALARM_METRIC = "mtp_plugin_acceptance_alarm"
"""Name of the Prometheus counter of collapses in every host, to which ``_total`` is added."""
ALARM_HELP = "Times that acceptance collapsed: almost no draft was accepted."

COLLAPSE_STEPS = 512
"""Number of request-steps with drafts in the window of the collapse alarm."""
COLLAPSED_BELOW = 1.05
"""Output tokens per step below which acceptance has collapsed."""
RECOVERED_AT = 1.15
"""Output tokens per step from which on the collapse is over."""

MTP_HINT = "Do the MTP weights belong to this target?"

LOOP_SPAN = 128
"""Output tokens of a request per span; every span is checked for looping."""
LOOP_CEILING = 0.95
"""Output tokens of a span divided by the maximum of its steps, from which on acceptance is at its
ceiling."""
LOOP_NGRAM = 8
LOOP_REPEATED = 0.5
"""Share of a span's n-grams that occur earlier in it, from which on the request loops."""
LOOP_HINT = "Sampling loops less: temperature 0.8, top_p 0.95 and a seed."
"""Last sentence of the message about looping."""
QUIET_SPANS = 64
"""Number of spans, of any requests, without a loop after which looping is over."""


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """Return the share of the n-grams of ``tokens`` that occur earlier in it; 0.0 without n-grams.

    ``abcabcabc`` with n = 3: 7 n-grams, 3 different ones, a share of 4/7.
    """
    count = len(tokens) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Return whether the end of an output repeats as many n-grams as one that loops."""
    span = tokens[-LOOP_SPAN:]
    return len(span) >= LOOP_SPAN // 2 and repeated_share(span, LOOP_NGRAM) >= LOOP_REPEATED


@dataclass
class _Span:
    """The latest steps of a request, up to one span of output tokens."""

    emitted: int = 0
    possible: int = 0
    loops: bool = False  # the previous span looped
    counted: bool = False  # the request is in num_looping_requests

    @property
    def at_ceiling(self) -> bool:
        """Whether acceptance is at its ceiling, or will be unless another draft is rejected."""
        whole = max(self.emitted, LOOP_SPAN)
        return whole >= LOOP_CEILING * (whole + self.possible - self.emitted)


class CollapseAlarm:
    """Logs once when almost no draft is accepted any more, and once when that is over.

    Args:
        logger: of a host engine that shows only its own; None: nothing is logged.
        hint: last sentence of the collapse message, for drafters other than MTP.

    Attributes:
        collapsed: whether acceptance is collapsed now.
        num_collapses: number of times that it collapsed.
    """

    def __init__(self, logger: logging.Logger | None = _logger, hint: str = MTP_HINT) -> None:
        self.collapsed = False
        self._logger = logger
        self._hint = hint
        self.num_collapses = 0
        self._window: deque[tuple[int, int]] = deque()  # request-steps, their output tokens
        self._num_steps = 0
        self._total = 0

    @property
    def acceptance_length(self) -> float:
        """Output tokens per step over the latest steps with drafts; 0.0 before the first."""
        return self._total / self._num_steps if self._num_steps else 0.0

    def record_step(self, num_emitted: int) -> None:
        """Count the output tokens of a request's step that verified drafts."""
        self.record_steps(1, num_emitted)

    def record_steps(self, num_steps: int, num_emitted: int) -> None:
        """Count the output tokens of one or more steps that verified drafts."""
        self._window.append((num_steps, num_emitted))
        self._num_steps += num_steps
        self._total += num_emitted
        while self._num_steps - self._window[0][0] >= COLLAPSE_STEPS:
            oldest = self._window.popleft()
            self._num_steps -= oldest[0]
            self._total -= oldest[1]
        if self._num_steps < COLLAPSE_STEPS:
            return
        mean = self.acceptance_length
        if not self.collapsed and mean < COLLAPSED_BELOW:
            self.collapsed = True
            self.num_collapses += 1
            self._log(
                logging.WARNING,
                "acceptance collapsed: %.3f tokens per step over the last %d steps with drafts; "
                "drafting costs and gains nothing. %s",
                mean,
                COLLAPSE_STEPS,
                self._hint,
            )
        elif self.collapsed and mean >= RECOVERED_AT:
            self.collapsed = False
            self._log(logging.INFO, "acceptance recovered: %.3f tokens per step", mean)

    def _log(self, level: int, message: str, *values: object) -> None:
        if self._logger is not None:
            self._logger.log(level, message, *values)


class AcceptanceAlarms(CollapseAlarm):
    """Monitor every request-step that verified drafts, from host integers without device reads.

    The caller calls `record` for every result; `MTPSampler` does. A step costs a few additions; the
    n-grams of a request are counted once per span, and only if acceptance is at its ceiling.

    Looping is over when `QUIET_SPANS` spans of tokens were output since a request last looped. A
    request that looped and is still at the ceiling continues to loop. Tokens of an unfinished span
    that may turn out to be a loop count once the request has finished or is gone; they are summed
    up only when enough other tokens were output, and then at most once per span.

    Attributes:
        looping: whether a request loops now.
        num_looping_requests: number of requests that looped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looping = False
        self.num_looping_requests = 0
        self._spans: WeakKeyDictionary[Any, _Span] = WeakKeyDictionary()
        self._since_loop = 0  # output tokens
        self._next_look = 0  # value of _since_loop at the next check

    def record(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step; its output tokens are already appended to the request.

        Args:
            request: has ``request_id`` and ``get_tokens(beam)``.
            num_emitted: output tokens of the step.
            num_drafted: drafts that the step verified.
        """
        if num_drafted == 0:
            return
        if num_decided_drafts(num_emitted, num_drafted, ends=has_finished(request)):
            self.record_step(num_emitted)
        self._watch_for_loops(request, num_emitted, num_drafted)

    def _watch_for_loops(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        span = self._spans.get(request)
        if span is None:
            span = self._spans[request] = _Span()
        span.emitted += num_emitted
        span.possible += num_drafted + 1
        if span.emitted >= LOOP_SPAN:
            self._check_span(request, span)
        if self.looping:
            self._watch_for_quiet(span, num_emitted)

    def _check_span(self, request: Any, span: _Span) -> None:
        share = 0.0
        if span.at_ceiling:
            share = repeated_share(request.get_tokens(0)[-LOOP_SPAN:], LOOP_NGRAM)
        span.emitted = span.possible = 0
        span.loops = share >= LOOP_REPEATED
        if span.loops:
            self._report_loop(request, span, share)

    def _watch_for_quiet(self, span: _Span, num_emitted: int) -> None:
        enough = QUIET_SPANS * LOOP_SPAN
        if span.loops and span.at_ceiling:
            self._since_loop, self._next_look = 0, enough
            return
        self._since_loop += num_emitted
        if self._since_loop < self._next_look:
            return
        undecided = sum(
            span.emitted
            for request, span in self._spans.items()
            if span.at_ceiling and not has_finished(request)
        )
        missing = enough + undecided - self._since_loop
        if missing > 0:
            self._next_look = self._since_loop + max(missing, LOOP_SPAN)
            return
        self.looping = False
        _logger.info("no request has looped for %d tokens", enough)

    def _report_loop(self, request: Any, span: _Span, share: float) -> None:
        self.num_looping_requests += not span.counted
        span.counted = True
        if self.looping:
            return
        self.looping = True
        _logger.warning(
            "request %s loops: every draft is accepted, and %.0f %% of the last %d tokens' "
            "%d-grams repeat. Acceptance statistics are too high because of it; a run without "
            "speculative_config shows whether the output loops without MTP too. %s",
            request.request_id,
            100 * share,
            LOOP_SPAN,
            LOOP_NGRAM,
            LOOP_HINT,
        )

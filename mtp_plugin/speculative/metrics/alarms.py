"""Alarms on acceptance: figures that no accuracy test shows.

Two conditions, each told once through the logger ``mtp_plugin`` and again only after it was over:
**collapse**, hardly a draft is accepted (the text stays right, and drafting only costs), and
**looping**, everything is accepted because the text repeats itself.
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

COLLAPSE_STEPS = 512
"""Request-steps with drafts over which a collapse is judged."""
COLLAPSED_BELOW = 1.05
"""Emitted tokens per step: under this is a collapse."""
RECOVERED_AT = 1.15
"""Emitted tokens per step: from here on it is over."""

LOOP_SPAN = 128
"""Emitted tokens of a request over which looping is judged, span after span."""
LOOP_CEILING = 0.95
"""Share of what the steps of a span could have emitted, from which acceptance is at its ceiling."""
LOOP_NGRAM = 8
LOOP_REPEATED = 0.5
"""Share of a span's n-grams that stood before in it: from here on it loops."""
QUIET_SPANS = 64
"""So many spans' tokens, of any requests, without a loop: looping is over."""


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """Share of the n-grams of ``tokens`` that stood before in it; 0.0 where it has none.

    ``abcabcabc`` with n = 3: 7 n-grams, 3 different ones, a share of 4/7.
    """
    count = len(tokens) - n + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count


@dataclass
class _Span:
    """The newest steps of a request, until they emitted a span's tokens."""

    emitted: int = 0
    possible: int = 0
    loops: bool = False  # the span before it did
    counted: bool = False  # the request is one of those that looped

    @property
    def at_ceiling(self) -> bool:
        """Whether acceptance is at its ceiling, or will be if nothing more is rejected."""
        whole = max(self.emitted, LOOP_SPAN)
        return whole >= LOOP_CEILING * (whole + self.possible - self.emitted)


class AcceptanceAlarms:
    """Watches every request-step that verified drafts; host integers alone, no device read-back.

    Where results are recorded call `record`; the samplers of the plugin do (`MTPSampler`). A step
    costs a few additions, a request's n-grams are counted once per span, and only where acceptance
    is at its ceiling.

    Looping is over when requests emitted `QUIET_SPANS` spans' tokens since one of them looped. One
    that looped and still emits at the ceiling loops on. Tokens of an unfinished span that may yet
    be a loop count once the request has ended or is gone; they are summed up only when enough
    others were emitted, and then at most once per span's tokens.

    Attributes:
        collapsed, looping: whether the condition holds now.
        num_collapses: times that acceptance collapsed.
        num_looping_requests: requests that were seen looping.
    """

    def __init__(self) -> None:
        self.collapsed = False
        self.looping = False
        self.num_collapses = 0
        self.num_looping_requests = 0
        self._emitted: deque[int] = deque(maxlen=COLLAPSE_STEPS)
        self._total = 0
        self._spans: WeakKeyDictionary[Any, _Span] = WeakKeyDictionary()
        self._since_loop = 0  # emitted tokens
        self._next_look = 0  # how many they are when it may be over

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per step over the newest steps with drafts; 0.0 before the first."""
        return self._total / len(self._emitted) if self._emitted else 0.0

    def record(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        """Count one request-step; the request holds its emitted tokens already.

        Args:
            request: with ``request_id`` and ``get_tokens(beam)``.
            num_emitted: tokens really emitted. num_drafted: drafts really verified.
        """
        if num_drafted == 0:
            return
        if num_decided_drafts(num_emitted, num_drafted, ends=has_finished(request)):
            self._watch_for_collapse(num_emitted)
        self._watch_for_loops(request, num_emitted, num_drafted)

    def _watch_for_collapse(self, num_emitted: int) -> None:
        if len(self._emitted) == COLLAPSE_STEPS:
            self._total -= self._emitted[0]
        self._emitted.append(num_emitted)
        self._total += num_emitted
        if len(self._emitted) < COLLAPSE_STEPS:
            return
        mean = self.acceptance_length
        if not self.collapsed and mean < COLLAPSED_BELOW:
            self.collapsed = True
            self.num_collapses += 1
            _logger.warning(
                "acceptance collapsed: %.3f tokens per step over the last %d steps with drafts; "
                "drafting costs and gains nothing. Do the MTP weights belong to this target?",
                mean,
                COLLAPSE_STEPS,
            )
        elif self.collapsed and mean >= RECOVERED_AT:
            self.collapsed = False
            _logger.info("acceptance recovered: %.3f tokens per step", mean)

    def _watch_for_loops(self, request: Any, num_emitted: int, num_drafted: int) -> None:
        span = self._spans.get(request)
        if span is None:
            span = self._spans[request] = _Span()
        span.emitted += num_emitted
        span.possible += num_drafted + 1
        if span.emitted >= LOOP_SPAN:
            self._judge(request, span)
        if self.looping:
            self._watch_for_quiet(span, num_emitted)

    def _judge(self, request: Any, span: _Span) -> None:
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
            "%d-grams repeat. Acceptance figures are flattered by it; a run without "
            "speculative_config shows whether the text loops without MTP too",
            request.request_id,
            100 * share,
            LOOP_SPAN,
            LOOP_NGRAM,
        )

"""``"draft_len": "auto"``: the number of drafts with the most tokens per second, as measured."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from mtp_plugin.speculative.draft_length.gain import (
    DECISION_INTERVAL,
    AcceptanceRates,
    GainPolicy,
)

HORIZON = 128
"""Steps over which acceptance rates are averaged."""
LEAST_SAMPLES = 16
"""Request-steps that a rate keeps while its position is not verified: few, so that a probe at a
small batch changes it."""

MOST_COUNTED = 32
"""Requests of a step whose acceptance is counted; of more, others in each step."""


class AutoDraftLengths:
    """Chooses by `GainPolicy` from the acceptance of all requests and the times between outputs.

    Drafts that a grammar or a request's limit forbids count as rejected: they cost the same.

    Args:
        max_draft_len: ``num_speculative_tokens``.
        clock: returns seconds.
    """

    def __init__(self, max_draft_len: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy = GainPolicy(max_draft_len, clock=clock)
        self._most = max_draft_len
        self._rates = AcceptanceRates(max_draft_len, horizon=math.inf)
        self._emitted: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """By number of drafts: output tokens of request-steps since the last decision."""
        self._turn = 0

    def choose(self, scheduled: Any) -> int:
        """See `DraftLengths.choose`."""
        size = len(scheduled.num_scheduled_tokens)
        if not size:
            return self._most  # nothing runs
        each = _tokens_of_each(scheduled)
        key = None
        if each:
            whole = 1 << (size - 1).bit_length()
            key = (whole if size > whole * 3 // 4 else whole * 3 // 4, 0)
        return self.policy.choose(scheduled, key, self._most, self._expected_tokens)

    def record(self, scheduled: Any, output: Any) -> None:
        """See `DraftLengths.record`."""
        if not scheduled.num_scheduled_tokens:
            return
        self.policy.finish(scheduled)
        drafts = scheduled.scheduled_spec_decode_tokens
        outputs = output.sampled_token_ids
        if not drafts or not outputs:
            return
        if len(drafts) < len(outputs):
            rows = output.req_id_to_index
            outputs = [outputs[rows[identifier]] for identifier in drafts if identifier in rows]
        each = _tokens_of_each(scheduled) or 1 + max(map(len, drafts.values()))
        stride = -(-len(outputs) // MOST_COUNTED)
        self._turn += 1
        self._emitted[each - 1].update(map(len, outputs[self._turn % stride :: stride]))

    def _expected_tokens(self, most: int) -> list[float]:
        """Return the tokens of an average request; called once per decision."""
        for num_drafts, emitted in self._emitted.items():
            for count in emitted.keys() - {0}:  # 0: of requests that are gone
                accepted = min(count - 1, num_drafts)
                self._rates.record(accepted, num_drafts, emitted[count])
        self._emitted.clear()
        self._rates.fade(1 - DECISION_INTERVAL / HORIZON, LEAST_SAMPLES)
        tokens, share = [1.0], 1.0
        for rate in self._rates.means(most):
            share *= rate
            tokens.append(tokens[-1] + share)
        return tokens


def _tokens_of_each(scheduled: Any) -> int:
    """Return the tokens of every request of a step; 0: they differ, or some are of a prompt."""
    drafts = scheduled.scheduled_spec_decode_tokens
    each = 1 + len(next(iter(drafts.values()))) if drafts else 1
    is_even = scheduled.total_num_scheduled_tokens == each * len(scheduled.num_scheduled_tokens)
    return each if is_even else 0

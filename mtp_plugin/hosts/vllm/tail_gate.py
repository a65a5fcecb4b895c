"""Which steps have a tail of copied text: those after a request of the batch matched.

The match flags of a step come with the tokens of the next one, so that the gate costs no
synchronization and follows one step late; texts without copies never pay for the rows of a tail.
"""

from __future__ import annotations

from typing import Any

MATCHES = "mtp_plugin_matches"
"""Attribute of vLLM's ``SamplerOutput`` ([S] bool tensor, and the slots [R] of the requests) and
``ModelRunnerOutput`` (list by request): which requests had a tail among the drafts that the step
verified, or would have had one."""

HOLD = 4
"""Steps, over all requests of a batch, for which a match counts: one wrong draft ends a match, and
the text goes on copying. Of a batch of more requests, others match meanwhile."""


class TailGate:
    """Chooses the number of drafts of every step; `DraftLengths` of ``scheduled_draft_len``.

    Args:
        num_mtp: drafts of the MTP layers. num_drafts: these and the tail.
        lengths: `DraftLengths` of steps without a tail; None: all drafts of the MTP layers.
    """

    def __init__(self, num_mtp: int, num_drafts: int, lengths: Any = None) -> None:
        self._num_mtp, self._num_drafts = num_mtp, num_drafts
        self._lengths = lengths
        self._left = 0  # steps for which the gate is open

    def choose(self, scheduled: Any) -> int:
        """See `DraftLengths`."""
        if self._left:
            return self._num_drafts
        return self._num_mtp if self._lengths is None else self._lengths.choose(scheduled)

    def record(self, scheduled: Any, output: Any) -> None:
        """See `DraftLengths`. Columns without a match count as invalid drafts, which vLLM's metrics
        leave out."""
        drafts = scheduled.scheduled_spec_decode_tokens
        most = max(map(len, drafts.values()), default=0)
        # a step that makes or verifies a tail says nothing of the others
        if self._lengths is not None and self._num_mtp >= max(
            most, scheduled.num_spec_tokens_to_schedule
        ):
            self._lengths.record(scheduled, output)
        matches = getattr(output, MATCHES, None)
        if matches is None:  # no request was sampled
            return
        self._left = 1 + HOLD // len(matches) if any(matches) else max(self._left - 1, 0)
        invalid = dict(scheduled.num_invalid_spec_tokens or {})
        for identifier, is_match in zip(output.req_ids, matches, strict=True):
            absent = len(drafts.get(identifier, ())) - self._num_mtp
            if absent > 0 and not is_match:
                invalid[identifier] = max(absent, invalid.get(identifier, 0))
        scheduled.num_invalid_spec_tokens = invalid or None

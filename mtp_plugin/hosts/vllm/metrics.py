"""Counts of drafts in vLLM's scheduler: withheld drafts, and the alarm in the engine core's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mtp_plugin.hosts.vllm.options import EngineSettings, read_settings
from mtp_plugin.hosts.vllm.requests import read_request
from mtp_plugin.speculative.metrics.alarms import CollapseAlarm


class DraftCounter:
    """Corrects the arguments of ``Scheduler.make_spec_decoding_stats``.

    vLLM proposes K drafts for every request. Those beyond a request's own limit are never accepted
    and must not count as proposed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._alarm = None
        if settings.synthetic_rates is None:
            self._alarm = CollapseAlarm(logging.getLogger("vllm.mtp_plugin"))

    def counted(self, request: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments for vLLM; None: no draft of the request was proposed.

        Args:
            request: vLLM's, None if it is gone. arguments: by name.
        """
        proposed = int(arguments["num_draft_tokens"])
        invalid = (arguments.get("num_invalid_spec_tokens") or {}).get(arguments["request_id"], 0)
        limit = proposed if request is None else self._limit_of(request, proposed)
        if limit == 0 and proposed:
            return None
        verified = min(proposed, limit)
        # drafts that a grammar forbids are no sign of wrong MTP weights
        if self._alarm is not None and verified > invalid:
            self._alarm.record_step(arguments["num_accepted_tokens"] + 1)
        return {**arguments, "num_draft_tokens": max(verified, invalid)}

    def _limit_of(self, request: Any, proposed: int) -> int:
        params = getattr(request, "sampling_params", None)
        extra = getattr(params, "extra_args", None)
        if not extra:
            return proposed
        options = read_request(extra, self._settings)
        if not options.speculate:
            return 0
        return proposed if options.max_draft_len is None else options.max_draft_len


def counter_of(vllm_config: Any) -> DraftCounter | None:
    """Return the counter of an engine; None if the plugin is off or nothing is drafted."""
    settings = read_settings(vllm_config)
    return None if settings is None or not settings.num_drafts else DraftCounter(settings)

"""Alarms in the log of vLLM's engine core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mtp_plugin.hosts.vllm.options import read_options
from mtp_plugin.speculative.metrics.alarms import CollapseAlarm


def alarm_of(vllm_config: Any) -> Callable[[int, int], None] | None:
    """Return a function that counts a request's step, given its numbers of drafts and of accepted
    drafts; None if the plugin is off or acceptance is synthetic.
    """
    spec = vllm_config.speculative_config
    if read_options(vllm_config) is None or spec is None:
        return None
    if getattr(spec, "rejection_sample_method", "") == "synthetic":
        return None
    alarm = CollapseAlarm(logging.getLogger("vllm.mtp_plugin"))

    def count(num_draft_tokens: int, num_accepted_tokens: int) -> None:
        if num_draft_tokens:
            alarm.record_step(num_accepted_tokens + 1)

    return count

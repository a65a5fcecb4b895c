"""Metrics of an executor, as vLLM's ``LLM.get_metrics`` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mtp_plugin.hosts.embedded.outputs import FINISH_REASONS
from mtp_plugin.hosts.embedded.py_executor import PyExecutor

PREFIX = "mtp_plugin:"


@dataclass(frozen=True)
class Metric:
    """A named metric."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only increases."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that may decrease."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by index, such as the position of a draft."""

    values: list[int]
    index: str = "position"
    """What the index is."""


def read_metrics(executor: PyExecutor, prefix: str = PREFIX) -> list[Metric]:
    """Return the metrics of an executor; reading them does not synchronize the device.

    Numbers of speculative decoding count finished requests, except the steps per draft length.

    Args:
        prefix: prefix of every name; ``vllm:`` gives vLLM's names.
    """
    stats, blocks = executor.acceptance, executor.engine.blocks
    accepted = [sum(stats.histogram[i + 2 :]) for i in range(stats.max_draft_len)]
    used = 1 - blocks.num_free_blocks / blocks.num_blocks
    return [
        Gauge(f"{prefix}num_requests_running", len(executor.scheduler.active)),
        Gauge(f"{prefix}num_requests_waiting", executor.num_waiting),
        Gauge(f"{prefix}kv_cache_usage_perc", used),
        Counter(f"{prefix}num_preemptions", executor.num_preemptions),
        Counter(f"{prefix}prompt_tokens", executor.num_prompt_tokens),
        Counter(f"{prefix}generation_tokens", executor.num_generation_tokens),
        *(
            Counter(f"{prefix}request_success", count, labels={"finished_reason": reason})
            for reason, count in _finished(executor).items()
        ),
        Counter(f"{prefix}spec_decode_num_drafts", stats.steps),
        Counter(f"{prefix}spec_decode_num_draft_tokens", stats.num_drafted),
        Counter(f"{prefix}spec_decode_num_accepted_tokens", sum(accepted)),
        Vector(f"{prefix}spec_decode_num_accepted_tokens_per_pos", accepted),
        Vector(
            f"{prefix}spec_decode_num_steps_per_draft_len",
            list(executor.num_steps_per_draft_len),
            "draft_len",
        ),
    ]


def _finished(executor: PyExecutor) -> dict[str, int]:
    """Return the number of finished requests for each finish reason of outputs."""
    counts = dict.fromkeys(FINISH_REASONS.values(), 0)
    for reason, count in list(executor.num_finished.items()):
        counts[FINISH_REASONS[reason]] += count
    return counts

"""Metrics in Prometheus' format: those of the engine, and times that the server measures."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.hosts.embedded.metrics import Gauge as EngineGauge
from mtp_plugin.hosts.embedded.metrics import Metric, Vector
from mtp_plugin.hosts.embedded.outputs import CompletionOutput
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.serving.reasoning import ThinkingTracker
from mtp_plugin.serving.settings import ServerSettings
from mtp_plugin.speculative.metrics.alarms import ALARM_HELP, ALARM_METRIC

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ABOUT = {
    "num_requests_running": "Sequences in the batch.",
    "num_requests_waiting": "Sequences in the waiting queue.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, from 0 to 1.",
    "num_preemptions": "Preempted sequences.",
    "prompt_tokens": "Prefilled prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "request_success": "Finished sequences by finish reason.",
    "spec_decode_num_drafts": "Steps of finished sequences.",
    "spec_decode_num_draft_tokens": "Verified draft tokens of finished sequences.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens of finished sequences.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted draft tokens by position in the step.",
    "spec_decode_num_steps_per_draft_len": "Steps with generating sequences by draft length.",
}


class EngineCollector(Collector):
    """Reads the engine's metrics when they are scraped; nothing synchronizes the device."""

    def __init__(self, llm: LLM, prefix: str, labels: dict[str, str]) -> None:
        self._llm = llm
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterable[Family]:
        """Return all metrics of the engine."""
        families: dict[str, Family] = {}
        for metric in self._llm.get_metrics(self._prefix):
            self._add(families, metric)
        alarms = self._llm.pieces.alarms
        if alarms is not None:
            for name, value, about in (
                ("collapsed", alarms.collapsed, "1: almost no draft is accepted."),
                ("looping", alarms.looping, "1: a sequence repeats itself."),
            ):
                self._gauge(families, f"spec_decode_{name}", float(value), about)
            looped = f"{self._prefix}spec_decode_num_looping_requests"
            for name, count, about in (
                (ALARM_METRIC, alarms.num_collapses, ALARM_HELP),
                (looped, alarms.num_looping_requests, "Sequences that looped."),
            ):
                family = CounterMetricFamily(name, about, labels=list(self._labels))
                family.add_metric(list(self._labels.values()), count)
                families[family.name] = family
        return families.values()

    def _add(self, families: dict[str, Family], metric: Metric) -> None:
        about = ABOUT.get(metric.name.removeprefix(self._prefix), "")
        labels = {**self._labels, **metric.labels}
        if isinstance(metric, EngineGauge):
            self._gauge(families, metric.name.removeprefix(self._prefix), metric.value, about)
            return
        if isinstance(metric, Vector):
            family = CounterMetricFamily(metric.name, about, labels=[*labels, metric.index])
            for position, value in enumerate(metric.values):
                family.add_metric([*labels.values(), str(position)], value)
            families[metric.name] = family
            return
        found = families.get(metric.name)
        if not isinstance(found, CounterMetricFamily):
            found = families[metric.name] = CounterMetricFamily(
                metric.name, about, labels=list(labels)
            )
        found.add_metric(list(labels.values()), getattr(metric, "value", 0))

    def _gauge(self, families: dict[str, Family], name: str, value: float, about: str) -> None:
        family = GaugeMetricFamily(self._prefix + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        families[family.name] = family


class Throughput:
    """Describes throughput and acceptance since the last line, and at the end."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._start = self._last = self._read()

    def line(self) -> str | None:
        """Return a line about the time since the last one; None: there were no requests."""
        before, self._last = self._last, self._read()
        now = self._last
        running, waiting = now["num_requests_running"], now["num_requests_waiting"]
        if now["generation_tokens"] == before["generation_tokens"] and not (running or waiting):
            return None
        seconds = now["time"] - before["time"]
        prompt, output = (
            (now[name] - before[name]) / seconds for name in ("prompt_tokens", "generation_tokens")
        )
        return (
            f"{prompt:.1f} prompt and {output:.1f} output tokens/s, {running:.0f} running, "
            f"{waiting:.0f} waiting, KV cache {now['kv_cache_usage_perc']:.1%}"
            f"{_acceptance(before, now)}"
        )

    def total(self) -> str:
        """Return a line about all requests."""
        start, now = self._start, self._read()
        finished, prompt, output = (
            now[name] - start[name]
            for name in ("request_success", "prompt_tokens", "generation_tokens")
        )
        return (
            f"stopped after {finished:.0f} sequences, {prompt:.0f} prompt and {output:.0f} output "
            f"tokens{_acceptance(start, now)}"
        )

    def _read(self) -> dict[str, float]:
        values: dict[str, float] = defaultdict(float)
        for metric in self._llm.get_metrics(""):
            values[metric.name] += getattr(metric, "value", 0)
        values["time"] = time.monotonic()
        return values


def _acceptance(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    steps, drafted, accepted = (
        now[name] - before[name]
        for name in (
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        )
    )
    if not drafted:
        return ""
    return (
        f", {1 + accepted / steps:.2f} tokens per step, {accepted / drafted:.1%} of drafts accepted"
    )


class Histogram:
    """Counts values by bucket.

    It is used in one thread, and an observation takes a fraction of the time of one of
    `prometheus_client`: there is one for each step of each sequence.
    """

    def __init__(self, name: str, about: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self._name = name
        self._about = about
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, prefix: str, labels: dict[str, str]) -> Family:
        """Return the metric for Prometheus."""
        family = HistogramMetricFamily(prefix + self._name, self._about, labels=list(labels))
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """The server's own metrics, and the registry of all."""

    def __init__(self, llm: LLM, settings: ServerSettings, num_queued: Callable[[], int]) -> None:
        self._prefix = prefix = settings.metrics_prefix
        self._labels = {"model_name": settings.model_name, "engine": "0"}
        self._first_token = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token."
        )
        self._inter_token = Histogram(
            "inter_token_latency_seconds", "Time of a step divided by its output tokens."
        )
        self._latency = Histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._draft_length = Histogram(
            "spec_decode_draft_length",
            "Mean number of draft tokens per step, one observation per finished sequence.",
            tuple(float(n) for n in range(17)),
        )
        self._steps: Counter[tuple[str, int]] = Counter()
        """Number of steps by phase and number of output tokens."""
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, prefix, self._labels))
        self._registry.register(self)
        Gauge(
            f"{prefix}num_sequences_in_server",
            "Unfinished sequences of all requests, tokenizing included.",
            list(self._labels),
            registry=self._registry,
        ).labels(**self._labels).set_function(num_queued)

    def render(self) -> bytes:
        """Return the text of ``/metrics``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """Return the server's own metrics."""
        for each in (self._first_token, self._inter_token, self._latency, self._draft_length):
            yield each.family(self._prefix, self._labels)
        steps: Counter[str] = Counter()
        accepted: Counter[tuple[str, int]] = Counter()
        for (phase, num_tokens), count in self._steps.items():
            steps[phase] += count
            for position in range(num_tokens - 1):
                accepted[phase, position] += count
        family = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_drafts_per_phase",
            "Steps by phase: thinking or answer.",
            labels=[*self._labels, "phase"],
        )
        for phase, count in steps.items():
            family.add_metric([*self._labels.values(), phase], count)
        yield family
        family = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_accepted_tokens_per_phase",
            "Accepted draft tokens by phase and position in the step.",
            labels=[*self._labels, "phase", "position"],
        )
        for (phase, position), count in accepted.items():
            family.add_metric([*self._labels.values(), phase, str(position)], count)
        yield family

    def observe_step(self, phase: str, num_tokens: int) -> None:
        """Count a generation step of a sequence, which began in a phase."""
        self._steps[phase, num_tokens] += 1

    def observe_output(self, output: CompletionOutput) -> None:
        """Count a finished sequence."""
        stats = output.acceptance
        if stats.steps:
            self._draft_length.observe(stats.num_drafted / stats.steps)

    def observe_first_token(self, seconds: float) -> None:
        """Count the time to the first token."""
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """Count the time per token of a step."""
        self._inter_token.observe(seconds)

    def observe_latency(self, seconds: float) -> None:
        """Count the time to the last token."""
        self._latency.observe(seconds)


class SequenceClock:
    """Measures the times and phases of one sequence."""

    def __init__(self, metrics: ServerMetrics, tracker: ThinkingTracker) -> None:
        self._metrics = metrics
        self.tracker = tracker
        self._started = time.monotonic()
        self._last: float | None = None

    def observe(self, event: StepEvent, now: float) -> None:
        """Count an event that arrived at ``now``, from `time.monotonic`."""
        if event.token_ids:
            if self._last is None:
                self._metrics.observe_first_token(now - self._started)
            else:
                self._metrics.observe_inter_token((now - self._last) / len(event.token_ids))
                self._metrics.observe_step(self.tracker.phase, len(event.token_ids))
            self._last = now
            self.tracker.push_all(event.token_ids)
        if event.finish_reason is not None:
            self._metrics.observe_latency(now - self._started)

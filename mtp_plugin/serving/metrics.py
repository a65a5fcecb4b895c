"""Metrics in Prometheus' format: those of the engine, and times that the server measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mtp_plugin.executor import LLM
from mtp_plugin.executor.metrics import Gauge as EngineGauge
from mtp_plugin.executor.metrics import Metric, Vector
from mtp_plugin.executor.outputs import CompletionOutput
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.serving.reasoning import ThinkingTracker
from mtp_plugin.serving.settings import ServerSettings

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
            for name, count, about in (
                ("num_collapses", alarms.num_collapses, "Times that acceptance collapsed."),
                ("num_looping_requests", alarms.num_looping_requests, "Sequences that looped."),
            ):
                family = CounterMetricFamily(
                    f"{self._prefix}spec_decode_{name}", about, labels=list(self._labels)
                )
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
            family = CounterMetricFamily(metric.name, about, labels=[*labels, "position"])
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


class ServerMetrics:
    """The registry of one server."""

    def __init__(self, llm: LLM, settings: ServerSettings, num_queued: Callable[[], int]) -> None:
        prefix = settings.metrics_prefix
        self._labels = {"model_name": settings.model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, prefix, self._labels))

        def histogram(name: str, about: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            made = Histogram(
                prefix + name, about, list(self._labels), registry=self._registry, buckets=buckets
            )
            return made.labels(**self._labels)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token."
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Time of a step divided by its output tokens."
        )
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._draft_length = histogram(
            "spec_decode_draft_length",
            "Mean number of draft tokens per step, one observation per finished sequence.",
            tuple(float(n) for n in range(17)),
        )
        self._phase_steps = Counter(
            f"{prefix}spec_decode_num_drafts_per_phase",
            "Steps by phase: thinking or answer.",
            [*self._labels, "phase"],
            registry=self._registry,
        )
        self._phase_accepted = Counter(
            f"{prefix}spec_decode_num_accepted_tokens_per_phase",
            "Accepted draft tokens by phase and position in the step.",
            [*self._labels, "phase", "position"],
            registry=self._registry,
        )
        Gauge(
            f"{prefix}num_sequences_in_server",
            "Unfinished sequences of all requests, tokenizing included.",
            list(self._labels),
            registry=self._registry,
        ).labels(**self._labels).set_function(num_queued)

    def render(self) -> bytes:
        """Return the text of ``/metrics``."""
        return generate_latest(self._registry)

    def observe_step(self, phase: str, num_tokens: int) -> None:
        """Count a generation step of a sequence, which began in a phase."""
        self._phase_steps.labels(**self._labels, phase=phase).inc()
        for position in range(num_tokens - 1):
            self._phase_accepted.labels(**self._labels, phase=phase, position=str(position)).inc()

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

    def observe(self, event: StepEvent) -> None:
        """Count an event when it arrives."""
        now = time.monotonic()
        if event.token_ids:
            if self._last is None:
                self._metrics.observe_first_token(now - self._started)
            else:
                self._metrics.observe_inter_token((now - self._last) / len(event.token_ids))
                self._metrics.observe_step(self.tracker.phase, len(event.token_ids))
            self._last = now
            for token in event.token_ids:
                self.tracker.push(token)
        if event.finish_reason is not None:
            self._metrics.observe_latency(now - self._started)

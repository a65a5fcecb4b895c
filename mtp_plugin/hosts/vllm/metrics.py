"""Counts of drafts in vLLM: withheld drafts and the alarm in the engine core, its metric in the
front end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from mtp_plugin.hosts.vllm.options import read_settings
from mtp_plugin.hosts.vllm.requests import AdmittedOptions
from mtp_plugin.speculative.metrics.alarms import (
    ALARM_HELP,
    ALARM_METRIC,
    CollapseAlarm,
)
from mtp_plugin.speculative.rows.draft_counts import WithheldDrafts
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.version import __version__

_logger = logging.getLogger("vllm.mtp_plugin")
_STAT_LOGGER = ("_counter_cls", "engine_indexes", "spec_decoding_prom")
"""Attributes of vLLM's ``PrometheusStatLogger`` that the metric of the alarm needs."""


class DraftCounter:
    """Corrects what vLLM's scheduler counts as proposed drafts, once per step."""

    def __init__(self, settings: EngineSettings) -> None:
        self._options = AdmittedOptions(settings)
        alarms = None if settings.synthetic_rates is not None else _logger
        self._withheld = WithheldDrafts(alarms, settings.drafter)
        self._sessions: dict[str, tuple[Any, Any]] = {}
        """Id -> request with streamed input, and its parameters of the turn that runs."""

    def add(self, request: Any) -> None:
        """Keep the limit of a request that the scheduler gets.

        The scheduler gets later turns of a session as further requests with its id, and replaces
        the parameters of the first one when they begin.
        """
        if request.request_id in self._sessions:
            return
        if getattr(request, "resumable", False):
            self._sessions[request.request_id] = request, request.sampling_params
        self._set_limit(request)

    def _set_limit(self, request: Any) -> None:
        extra = getattr(request.sampling_params, "extra_args", None)
        limit = self._options.read(extra).draft_limit if extra else None
        self._withheld.set_limit(request.request_id, limit)

    def correct(self, requests: Any, scheduled: Any, output: Any) -> set[str]:
        """Count withheld drafts of a step as invalid ones, which vLLM subtracts.

        Args:
            requests: those of the scheduler, by id. scheduled: vLLM's ``SchedulerOutput``, changed.
            output: vLLM's ``ModelRunnerOutput``.

        Returns:
            ids of requests without any draft, whose steps must not count.
        """
        for name, (request, params) in list(self._sessions.items()):
            if requests.get(name) is not request:
                del self._sessions[name]
            elif request.sampling_params is not params:
                self._sessions[name] = request, request.sampling_params
                self._set_limit(request)
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts:
            return set()
        invalid = dict(scheduled.num_invalid_spec_tokens or {})
        withheld = self._withheld.add_to(invalid, requests, drafts, output.sampled_token_ids)
        scheduled.num_invalid_spec_tokens = invalid or None
        return withheld


INFO_METRIC = "mtp_plugin_info"


def add_info_metric(stat_logger: Any, vllm_config: Any) -> None:
    """Say in the Prometheus metrics of vLLM's front end that the plugin is on.

    Args:
        stat_logger: a ``PrometheusStatLogger``, whose class of gauges is used: those of Ray are
            others.
    """
    settings, make = read_settings(vllm_config), getattr(stat_logger, "_gauge_cls", None)
    if settings is None:
        return
    if make is None:
        logging.getLogger("vllm.mtp_plugin").warning(
            "%s is left out: PrometheusStatLogger of this vLLM has no _gauge_cls", INFO_METRIC
        )
        return
    labels = {"version": __version__, **settings.summary}
    gauge, shown = _info_gauge(make, tuple(labels))
    values = tuple(labels.values())
    if shown - {values} and hasattr(gauge, "clear"):  # of an engine that this process had before
        gauge.clear()
        shown.clear()
    shown.add(values)
    gauge.labels(*values).set(1)


@cache
def _info_gauge(
    make: Callable[..., Any], names: tuple[str, ...]
) -> tuple[Any, set[tuple[str, ...]]]:
    """Return the gauge of this process, which Prometheus lets register once, and its labels."""
    gauge = make(
        name=INFO_METRIC,
        documentation="1 while mtp_plugin is on; the labels say how.",
        labelnames=list(names),
        multiprocess_mode="mostrecent",  # one value of all API servers
    )
    return gauge, set()


LENGTH_METRIC = "mtp_plugin_draft_len"


def add_length_metric(stat_logger: Any, vllm_config: Any) -> None:
    """Show in the Prometheus metrics how many drafts a step verifies, where the plugin chooses it.

    Args:
        stat_logger: a ``PrometheusStatLogger``, whose ``record`` is replaced.
    """
    settings, make = read_settings(vllm_config), getattr(stat_logger, "_gauge_cls", None)
    if settings is None or not settings.num_drafts or not settings.options.draft_len or not make:
        return
    name = str(vllm_config.model_config.served_model_name)
    gauge, record = _length_gauge(make), stat_logger.record

    def record_and_set(
        stats: Any, iteration: Any, *args: Any, engine_idx: int = 0, **named: Any
    ) -> None:
        record(stats, iteration, *args, engine_idx=engine_idx, **named)
        drafts = getattr(stats, "spec_decoding_stats", None)
        if drafts is not None:
            used = sum(map(bool, drafts.num_draft_tokens_per_pos))
        elif iteration and iteration.num_generation_tokens and not iteration.num_prompt_tokens:
            used = 0
        else:
            return  # no step, or a first one of requests
        gauge.labels(name, str(engine_idx)).set(used)

    stat_logger.record = record_and_set


@cache
def _length_gauge(make: Callable[..., Any]) -> Any:
    return make(
        name=LENGTH_METRIC,
        documentation="Most drafts of a request that the last step verified.",
        labelnames=["model_name", "engine"],
        multiprocess_mode="mostrecent",
    )


def counter_of(vllm_config: Any) -> DraftCounter | None:
    """Return the counter of an engine; None if the plugin is off or nothing is drafted."""
    settings = read_settings(vllm_config)
    return None if settings is None or not settings.num_drafts else DraftCounter(settings)


def add_alarm_metric(stat_logger: Any, vllm_config: Any) -> None:
    """Count collapses of acceptance in the Prometheus metrics of vLLM's front end.

    The front end gets the counts of every step and no other value of the engine core, so it applies
    the same alarm to them, without its log lines.

    Args:
        stat_logger: a ``PrometheusStatLogger``; ``observe`` of its ``spec_decoding_prom`` is
            replaced.
    """
    settings = read_settings(vllm_config)
    if settings is None or not settings.num_drafts or settings.synthetic_rates is not None:
        return
    missing = [name for name in _STAT_LOGGER if not hasattr(stat_logger, name)]
    if missing:
        _logger.warning(
            "%s_total is not counted: PrometheusStatLogger of this vLLM has no %s",
            ALARM_METRIC,
            ", ".join(missing),
        )
        return
    name = str(vllm_config.model_config.served_model_name)
    counter = _alarm_counter(stat_logger._counter_cls)
    alarms = {index: CollapseAlarm(None) for index in stat_logger.engine_indexes}
    counts = {index: counter.labels(name, str(index)) for index in alarms}
    observe = stat_logger.spec_decoding_prom.observe

    def observe_and_count(stats: Any, engine_idx: int = 0) -> None:
        observe(stats, engine_idx)
        alarm = alarms.get(engine_idx)
        if alarm is None:  # an engine that was added since
            return
        before = alarm.num_collapses
        # without requests whose drafts are all forbidden by a grammar; not in older versions
        per_position = getattr(stats, "num_draft_tokens_per_pos", None)
        num_steps = per_position[0] if per_position else stats.num_drafts
        if num_steps:
            alarm.record_steps(num_steps, num_steps + stats.num_accepted_tokens)
        counts[engine_idx].inc(alarm.num_collapses - before)

    stat_logger.spec_decoding_prom.observe = observe_and_count


@cache
def _alarm_counter(make: Callable[..., Any]) -> Any:
    """Return the counter of this process, which Prometheus lets register once."""
    return make(name=ALARM_METRIC, documentation=ALARM_HELP, labelnames=["model_name", "engine"])

"""Results of steps on the host: requests that end with an error, and counts of drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from mtp_plugin.hosts.sglang.requests import draft_limit
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, STATUS_OK
from mtp_plugin.speculative.append_tokens import NO_FINITE_LOGITS
from mtp_plugin.speculative.metrics.alarms import ALARM_HELP, ALARM_METRIC
from mtp_plugin.speculative.rows.draft_counts import collapse_alarm
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.verification import failure_of

_STATUS = "_mtp_plugin_status"
"""Attribute of a ``LogitsProcessorOutput``, which SGLang hands on to the host."""
_logger = logging.getLogger("sglang.srt.mtp_plugin")


def keep_status(logits_output: Any, status: torch.Tensor) -> None:
    """Begin to copy the status [R] int32 of a step's requests to the host, without waiting: it is
    there when SGLang's own copies are."""
    setattr(logits_output, _STATUS, status.to("cpu", non_blocking=True))


def end_failed(batch: Any, result: Any) -> None:
    """End the requests of a processed step that got no token or whose method failed, with HTTP 500.

    Args:
        batch: ``ScheduleBatch``. result: ``GenerationBatchResult``, whose copies have begun.
    """
    status = getattr(getattr(result, "logits_output", None), _STATUS, None)
    if status is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif torch.cuda.is_available():  # a step without drafts and without overlap
        torch.cuda.current_stream().synchronize()
    if not status.any():
        return
    abort = import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
    # not strict: nothing here may end the engine
    for req, code in zip(batch.reqs, status.tolist(), strict=False):
        # the token of an unfinished prompt is dropped
        if code != STATUS_OK and _is_live(req) and req.inflight_middle_chunks <= 0:
            why = _reason(code)
            _logger.error("request %s ends with an error: %s", req.rid, why)
            req.to_finish = req.to_finish or abort(why, 500, "InternalServerError")


def _reason(code: int) -> str:
    if code == STATUS_NO_FINITE_LOGIT:
        return NO_FINITE_LOGITS
    try:
        return failure_of(code)
    except KeyError:  # this rank of tensor parallelism has its results from the first one
        return "the verification method failed on the first rank"


def _is_live(req: Any) -> bool:
    """Whether the tokens of a step become output of a ``Req``."""
    return not (req.is_retracted or req.finished())


class DraftCounts:
    """Takes requests with a limit of drafts out of SGLang's counts, and watches acceptance.

    Args:
        model: name of the model in Prometheus metrics; None: there are none.
        has_alarm: False on all ranks but the first, and where acceptance is simulated.
    """

    def __init__(self, settings: EngineSettings, model: str | None, *, has_alarm: bool) -> None:
        self._num_drafts = settings.num_drafts
        self._alarm = collapse_alarm(_logger, settings.drafter) if has_alarm else None
        self._counter = None
        if has_alarm and model is not None:
            self._counter = _alarm_counter().labels(model)
        self._limited = 0, 0  # requests with a limit in the latest step, their accepted drafts

    def add(self, live: Sequence[bool], batch: Any, result: Any) -> None:
        """Count a step that verified drafts.

        Args:
            live: by request, whether its tokens become output.
            result: with the accepted drafts of each request, which SGLang has added to its own
                counts.
        """
        limited = limited_drafts = steps = drafts = 0
        accepted = result.num_correct_drafts_per_req_cpu
        for req, is_live, number in zip(batch.reqs, live, accepted, strict=False):
            limit = draft_limit(req)
            if limit is not None and limit < self._num_drafts:
                limited += 1
                limited_drafts += number
            if is_live and limit == 0:  # SGLang counts K drafts for every step
                req.spec_verify_ct -= 1
                req.spec_correct_drafts_histogram[0] -= 1
            # drafts that a grammar forbids are no sign of a wrong drafter
            elif is_live and req.grammar is None:
                steps += 1
                drafts += number
        self._limited = limited, limited_drafts
        if self._alarm is not None and steps:
            before = self._alarm.num_collapses
            self._alarm.record_steps(steps, steps + drafts)
            if self._counter is not None:
                self._counter.inc(self._alarm.num_collapses - before)

    def without_limited(self, requests: int, accepted: int) -> tuple[float, int]:
        """Return requests and accepted drafts of the latest step without those that have a limit.

        SGLang divides by the sum of the requests: it is above 0.
        """
        limited, drafts = self._limited
        return max(requests - limited, 1e-9), accepted - drafts


def live_requests(batch: Any) -> list[bool]:
    """Return, by request of a step, whether its tokens become output."""
    return [_is_live(req) for req in batch.reqs]


@cache
def _alarm_counter() -> Any:
    """Return the counter of this process, which Prometheus lets register once."""
    make = import_module("prometheus_client").Counter
    return make(ALARM_METRIC, ALARM_HELP, ["model_name"])


def has_ordered_ends(req: Any) -> bool:
    """Whether more than stop tokens may end a ``Req`` in this step: then their order matters."""
    params = req.sampling_params
    return bool(
        params.stop_strs
        or params.stop_regex_strs
        or req.grammar is not None
        or len(req.output_ids) >= params.max_new_tokens
    )


def one_by_one(req: Any, count: int) -> Iterator[None]:
    """Show a ``Req`` its last ``count`` tokens one after the other, until it has finished; its
    grammar, which has accepted all of them, with the last one."""
    first = len(req.output_ids) - count
    tokens, grammar = req.output_ids[first:], req.grammar
    shown = 0
    try:
        while shown < count and not req.finished():
            shown += 1
            req.output_ids[first:] = tokens[:shown]
            req.grammar = grammar if shown == count else None
            yield
    finally:
        req.grammar = grammar
        req.output_ids.extend(tokens[shown:])

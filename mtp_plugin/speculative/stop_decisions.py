"""Applies the decisions of a stop callback to the results of a step."""

from __future__ import annotations

import logging

from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stop_callback import StopCallback, StopDecisions, call_stop_callback
from mtp_plugin.requests.stopping import Ending
from mtp_plugin.speculative.host import take_back_tokens
from mtp_plugin.speculative.pending_row import BEAM, PendingRow
from mtp_plugin.speculative.step_output import StepResult

_logger = logging.getLogger("mtp_plugin")


def apply_stop_callback(
    callback: StopCallback,
    rows: list[PendingRow],
    results: list[StepResult],
    endings: list[Ending],
) -> None:
    """Call ``callback`` once for a step and update ``results`` and ``endings`` in place."""
    output_lens: dict[int, tuple[int, int]] = {}  # before and after the step, by request id
    for row, result, ending in zip(rows, results, endings, strict=True):
        if not row.facts.is_dummy and (result.token_ids or ending.reason is None):
            now = row.request.get_num_tokens(BEAM) - row.facts.stop.prompt_len
            output_lens[result.request_id] = (now - len(result.token_ids), now)
    if not output_lens:
        return
    decisions = call_stop_callback(callback, output_lens)
    for why in decisions.unknown:
        _logger.error(why)
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if result.request_id in output_lens:
            endings[index] = _decided(row, result, endings[index], decisions)
            results[index] = _truncated(result, endings[index])


def _decided(
    row: PendingRow, result: StepResult, ending: Ending, decisions: StopDecisions
) -> Ending:
    """Return the ending of a request's tokens after the callback's decision."""
    request, request_id = row.request, result.request_id
    number = len(result.token_ids)
    ends_itself = ending.reason is not None and not _has_no_token(ending)
    why = decisions.wrong.get(request_id)
    if why is not None and ends_itself:
        _logger.error("request %s, which has ended by itself: %s", request_id, why)
        return ending
    if why is not None:
        return Ending(number, FinishReason.ERROR, why)
    kept = decisions.keep.get(request_id)
    if kept is None:
        return ending
    surplus = request.get_num_tokens(BEAM) - row.facts.stop.prompt_len - kept
    if surplus == 0 and ends_itself:
        return ending
    if surplus > 0 and not take_back_tokens(request, surplus):
        why = (
            f"stop_callback: {surplus} tokens are to be taken back, and the host's requests "
            f"have no take_back_tokens"
        )
        return Ending(number, FinishReason.ERROR, why)
    return Ending(number - surplus, FinishReason.STOP_WORDS)


def _has_no_token(ending: Ending) -> bool:
    """Whether the request fails because the step gave it no token."""
    return ending.reason is FinishReason.ERROR and ending.cause is None


def _truncated(result: StepResult, ending: Ending) -> StepResult:
    """Return ``result`` with only the tokens that ``ending`` keeps, and its finish reason."""
    logprobs = result.logprobs
    if logprobs is not None and ending.length < len(result.token_ids):
        logprobs = logprobs.first(ending.length)
    emitted = result.token_ids[: ending.length]
    return result._replace(token_ids=emitted, finish_reason=ending.reason, logprobs=logprobs)

"""Ends a step's runs as a user's own rule of stopping wishes."""

from __future__ import annotations

import logging

from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stop_callback import StopCallback, StopDecisions, call_stop_callback
from mtp_plugin.requests.stopping import Ending
from mtp_plugin.speculative.host import take_back_tokens
from mtp_plugin.speculative.pending_row import BEAM, PendingRow
from mtp_plugin.speculative.step import StepResult

_logger = logging.getLogger("mtp_plugin")


def apply_stop_callback(
    callback: StopCallback,
    rows: list[PendingRow],
    results: list[StepResult],
    endings: list[Ending],
) -> None:
    """Change a step's results and endings as a host's own rule of stopping wishes."""
    asked: dict[int, tuple[int, int]] = {}
    for row, result, ending in zip(rows, results, endings, strict=True):
        if not row.facts.is_dummy and (result.token_ids or ending.reason is None):
            now = row.request.get_num_tokens(BEAM) - row.facts.stop.prompt_len
            asked[result.request_id] = (now - len(result.token_ids), now)
    if not asked:
        return
    wishes = call_stop_callback(callback, asked)
    for why in wishes.unknown:
        _logger.error(why)
    for place, (row, result) in enumerate(zip(rows, results, strict=True)):
        if result.request_id in asked:
            endings[place] = _wished(row, result, endings[place], wishes)
            results[place] = _cut(result, endings[place])


def _wished(row: PendingRow, result: StepResult, ending: Ending, wishes: StopDecisions) -> Ending:
    """How the run of a request ends that a callback was asked about."""
    request, request_id = row.request, result.request_id
    number = len(result.token_ids)
    ends_itself = ending.reason is not None and not _has_no_token(ending)
    why = wishes.wrong.get(request_id)
    if why is not None and ends_itself:
        _logger.error("request %s, which has ended by itself: %s", request_id, why)
        return ending
    if why is not None:
        return Ending(number, FinishReason.ERROR, why)
    kept = wishes.keep.get(request_id)
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
    """Whether a run ends where no token follows, and not by its last one."""
    return ending.reason is FinishReason.ERROR and ending.cause is None


def _cut(result: StepResult, ending: Ending) -> StepResult:
    """What is left of a result whose run ends so."""
    logprobs = result.logprobs
    if logprobs is not None and ending.length < len(result.token_ids):
        logprobs = logprobs.first(ending.length)
    emitted = result.token_ids[: ending.length]
    return result._replace(token_ids=emitted, finish_reason=ending.reason, logprobs=logprobs)

"""Appends the tokens of a step to a request, up to its first stop."""

from __future__ import annotations

import torch

from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, STATUS_OK
from mtp_plugin.requests.logprobs import HostLogprobs, Logprobs
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.stopping import Ending
from mtp_plugin.speculative.host import RequestFacts, set_num_verified
from mtp_plugin.speculative.pending_row import BEAM, PendingRow
from mtp_plugin.speculative.step_output import StepResult
from mtp_plugin.speculative.verification import failure_of

NO_FINITE_LOGITS = "the target gave a row of logits without any finite value"
NO_TOKEN_IN_STEP = "the worker returned no token for the request: new_tokens_lens is 0"
NARROWING_OPTIONS = ("allowed_token_ids", "bad_words", "bad_token_ids")
"""Options that may disallow every token of a row although all logits are finite."""
NO_LOGPROBS = "logprobs: the step returned no log-probabilities"


def append_tokens(
    row: PendingRow,
    run: list[int],
    drafts: list[int],
    status: int,
    draft_len: int,
    entries: torch.Tensor | None,
) -> tuple[StepResult, Ending]:
    """Append accepted tokens to a request up to the first stop; the request is not finished yet.

    Args:
        run: the accepted tokens.
        drafts: the drafts of the next step.
        status: STATUS_OK, STATUS_NO_FINITE_LOGIT, or the code of a verification method or drafter
            that failed.
        draft_len: K of the step.
        entries: [K+1, ENTRY_WIDTH] int32, the log-probabilities of the tokens, on the host; None:
            the step returned none.
    """
    request, facts, is_context = row.request, row.facts, row.is_context
    # the rewind counts all accepted tokens, the statistics only output tokens
    has_bonus = status != STATUS_NO_FINITE_LOGIT or is_context
    num_matches = max(len(run) - has_bonus, 0)
    request.py_num_accepted_draft_tokens = num_matches
    request.py_rewind_len = 0 if is_context else draft_len - num_matches
    request.py_decoding_iter += 1
    set_num_verified(request, 0 if is_context else min(row.num_drafted, draft_len))
    refused = row.refused
    if refused is None and facts.num_logprobs is not None and entries is None:
        refused = NO_LOGPROBS
    if refused is None and run and min(run) < 0:
        refused = f"the worker returned token {min(run)} for the request: expected ids of 0 or more"
    if refused is not None:
        request.py_draft_tokens = []
        ending = Ending(0, FinishReason.ERROR, refused)
        return StepResult(request.request_id, [], 0, len(run), ending.reason), ending
    request.py_draft_tokens = drafts  # unused if the request stops
    length, stop = request.get_num_tokens(BEAM), facts.stop
    before = request.get_tokens(BEAM) if stop.words else ()
    ending = stop.check(run, length, num_drafts=num_matches, tokens=before)
    if ending.reason is None:
        if status != STATUS_OK:
            why = _no_token(facts) if status == STATUS_NO_FINITE_LOGIT else failure_of(status)
            ending = Ending(ending.length, FinishReason.ERROR, why)
        elif not run and not facts.is_dummy:
            ending = Ending(0, FinishReason.ERROR, NO_TOKEN_IN_STEP)
    emitted = run[: ending.length]
    for token in emitted:
        request.add_new_token(token, BEAM)
    logprobs = _logprobs_of_tokens(facts, entries, len(emitted))
    num_drafted = 0
    if not (is_context or facts.is_dummy):
        # no token follows the one that reaches the maximum length
        num_drafted = min(row.num_drafted, max(facts.full_length - length - 1, 0))
    result = StepResult(request.request_id, emitted, num_drafted, len(run), ending.reason, logprobs)
    return result, ending


def _no_token(facts: RequestFacts) -> str:
    """Return the error of a request whose logits left no token."""
    narrowing = [name for name in NARROWING_OPTIONS if name in facts.options]
    if not narrowing:
        return NO_FINITE_LOGITS
    return f"{NO_FINITE_LOGITS}, or {' and '.join(narrowing)} left none"


def _logprobs_of_tokens(
    facts: RequestFacts, entries: torch.Tensor | None, num_emitted: int
) -> Logprobs | None:
    """Return the log-probabilities of a request's tokens, or None if it wants none."""
    if facts.num_logprobs is None or entries is None:
        return None
    # copied, so that the request does not keep the tensor of the whole step alive
    return Logprobs([HostLogprobs(entries[:num_emitted].clone(), facts.num_logprobs)])

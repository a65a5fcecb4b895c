"""Runs a batch of prompts three ways: as configured, without drafts, and by plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.executor import LLM, LlmRequest, SamplingParams, StepEvent
from mtp_plugin.executor.text import RequestText, Tokenizer
from mtp_plugin.infer import greedy_decode
from mtp_plugin.models import LoadedModel
from mtp_plugin.protocols import FinishReason
from mtp_plugin.statistics import AcceptanceStats

WARM_UP_TOKENS = 4

OnStep = Callable[[list[tuple[int, StepEvent]]], None]
"""Called with a step's events, each with the number of its prompt, counted from 0."""


@dataclass(frozen=True)
class Decoded:
    """One prompt's result."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceStats


@dataclass(frozen=True)
class BatchRun:
    """A batch that ran to its end."""

    results: list[Decoded]
    num_steps: int
    """Forward passes of the target, prompts included."""
    seconds: float
    """Spent in those, without what the display took."""

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all prompts."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> AcceptanceStats:
        """Counts of all prompts."""
        total = AcceptanceStats(self.results[0].acceptance.max_draft_len)
        for result in self.results:
            total.merge(result.acceptance)
        return total


def run_batch(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, on_step: OnStep | None = None
) -> BatchRun:
    """Decode prompts as one batch, after a few untimed steps that warm the model up.

    Raises:
        RequestError: a prompt or an option that cannot be served; nothing was started.
        ExecutorError: a request failed.
    """
    requests = [llm.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        llm.executor.check_fits(request)
    few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    llm.generate(requests[0].get_tokens()[:WARM_UP_TOKENS], few)

    steps_before = llm.executor.num_steps
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    for request in requests:
        llm.executor.enqueue(request)
    seconds = 0.0
    while llm.executor.has_work:
        start = perf_counter()
        events = llm.executor.step()
        seconds += perf_counter() - start
        if events and on_step is not None:
            on_step([(numbers[event.request_id], event) for event in events])
    return BatchRun(
        [_decoded(request) for request in requests], llm.executor.num_steps - steps_before, seconds
    )


def _decoded(request: LlmRequest) -> Decoded:
    reason = request.finish_reason
    if reason is None or reason is FinishReason.ERROR:
        raise ExecutorError(
            f"request {request.request_id} failed after {len(request.output_token_ids)} tokens: "
            "the target gave a row of logits without any finite value"
        )
    length = request.py_orig_prompt_len
    return Decoded(
        prompt_token_ids=request.get_tokens()[:length],
        token_ids=request.output_token_ids,
        text="" if request.text is None else request.text.full_text,
        finish_reason=reason,
        acceptance=request.py_acceptance,
    )


# --- the comparison with plain decoding ---


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that plain decoding did not choose."""

    prompt: int
    """Counted from 1."""
    position: int
    """Of the emitted token, counted from 1."""
    token: int | None
    """What was emitted; None: the text had ended."""
    expected: int | None
    """What plain decoding chose; None: it had ended."""


@dataclass(frozen=True)
class Comparison:
    """A batch beside plain decoding of the same prompts."""

    differences: list[Difference]
    num_tokens: int
    """Compared tokens."""
    num_equal: int
    """Those before the first difference of their prompt."""
    num_ties: int
    """Tokens that differ by no more than half precision rounds; decoding went on from them."""


def compare_with_plain_decoding(
    model: LoadedModel,
    results: Sequence[Decoded],
    params: SamplingParams,
    *,
    max_seq_len: int,
    tokenizer: Tokenizer | None,
) -> Comparison:
    """Decode every prompt with the target alone, through none of the executor, and compare.

    The model must run with an attention of transformers' own.
    """
    differences: list[Difference] = []
    num_equal = num_ties = 0
    for number, result in enumerate(results, 1):
        limit = min(params.max_new_tokens, max_seq_len - len(result.prompt_token_ids))
        oracle = _Oracle(model, result, params, limit, tokenizer)
        position, ties = oracle.first_difference()
        num_ties += ties
        if position is None:
            num_equal += len(result.token_ids)
            continue
        num_equal += position
        expected = oracle.expected
        differences.append(
            Difference(
                number,
                position + 1,
                result.token_ids[position] if position < len(result.token_ids) else None,
                expected[position] if position < len(expected) else None,
            )
        )
    num_tokens = sum(len(result.token_ids) for result in results)
    return Comparison(differences, num_tokens, num_equal, num_ties)


class _Oracle:
    """What plain decoding says of one result."""

    def __init__(
        self,
        model: LoadedModel,
        result: Decoded,
        params: SamplingParams,
        limit: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._model = model
        self._result = result
        self._params = params
        self._limit = limit
        self._tokenizer = tokenizer
        ends = () if params.ignore_eos else model.facts.eos_token_ids
        self._end_ids = (*ends, *params.stop_token_ids)
        self.expected: list[int] = []

    def first_difference(self) -> tuple[int | None, int]:
        """(Index of the first emitted token that differs, None without one; ties before it)."""
        emitted = self._result.token_ids
        start = ties = 0
        while True:
            self.expected = self._continue(emitted[:start])
            position = _first_difference(emitted, self.expected, start)
            if position is None or not self._is_tie(position):
                return position, ties
            ties += 1
            start = position + 1

    def _continue(self, emitted: list[int]) -> list[int]:
        """``emitted`` and what plain decoding adds, up to where the text has to end."""
        if self._result.finish_reason is FinishReason.STOP_WORDS:
            # behind a stop string nothing counts: no need to decode on, if it is there
            tokens, stopped = self._decode(emitted, len(self._result.token_ids))
            if stopped:
                return tokens
        return self._decode(emitted, self._limit)[0]

    def _decode(self, emitted: list[int], limit: int) -> tuple[list[int], bool]:
        """(Tokens up to the limit or a stop, whether a stop string is there)."""
        params = self._params
        if emitted and emitted[-1] in self._end_ids and len(emitted) > params.min_tokens:
            return emitted, False
        tokens = emitted + greedy_decode(
            self._model.target,
            self._result.prompt_token_ids + emitted,
            limit - len(emitted),
            eos_token_ids=self._end_ids,
            min_tokens=max(0, params.min_tokens - len(emitted)),
        )
        if self._tokenizer is None or not params.stop:
            return tokens, False
        text = RequestText(self._tokenizer, params.stop, params.min_tokens)
        for count, token in enumerate(tokens, 1):
            text.push(token, from_draft=False)
            if text.stopped:
                return tokens[:count], True
        return tokens, False

    @torch.inference_mode()
    def _is_tie(self, position: int) -> bool:
        """Whether both tokens are equally good but for the rounding of half precision."""
        emitted, expected = self._result.token_ids, self.expected
        weight: torch.Tensor = self._model.embed_tokens.weight  # type: ignore[assignment]
        dtype = weight.dtype
        if position >= min(len(emitted), len(expected)) or dtype == torch.float32:
            return False
        ids = [*self._result.prompt_token_ids, *emitted[:position]]
        device = self._model.target.device
        logits = self._model.target(torch.tensor([ids], device=device)).logits[0, -1].float()
        best, ours = logits[expected[position]], logits[emitted[position]]
        rounding = 2 * torch.finfo(dtype).eps * best.abs()
        return bool((best - ours).abs() <= rounding)


def _first_difference(ours: list[int], theirs: list[int], start: int) -> int | None:
    for position in range(start, max(len(ours), len(theirs))):
        if ours[position : position + 1] != theirs[position : position + 1]:
            return position
    return None

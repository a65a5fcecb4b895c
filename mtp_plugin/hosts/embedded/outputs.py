"""Outputs of requests, with the fields of vLLM and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mtp_plugin.errors import ExecutorError, RequestError
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.requests.logprobs import Logprobs, PromptLogprobs
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, Label

FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}
"""The ``finish_reason`` of outputs, as in vLLM, for each reason of a `StepEvent`."""


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    """Index among the ``n`` sequences of the prompt."""
    text: str
    """Empty without a tokenizer or with ``detokenize=False``."""
    token_ids: list[int]
    finish_reason: str | None
    """``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None: the sequence is unfinished."""
    stop_reason: int | str | None = None
    """The id of ``stop_token_ids`` or the stop string that ended the sequence, else None."""
    logprobs: Logprobs | None = None
    """A mapping of ids to log-probabilities for each of ``token_ids``; None: not requested."""
    error: str | None = None
    """Why the sequence ended, if ``finish_reason`` is ``"error"``."""
    acceptance: AcceptanceStats = field(default_factory=lambda: AcceptanceStats(0))

    @classmethod
    def of(cls, request: LlmRequest) -> Self:
        """Return the output of a finished request.

        Raises:
            RequestError: the request has not finished.
        """
        if request.finish_reason is None:
            raise RequestError(f"request {request.request_id} has not finished")
        return cls(
            index=request.sample_index,
            text=request.text.full_text if request.text is not None else "",
            token_ids=request.output_token_ids,
            finish_reason=FINISH_REASONS[request.finish_reason],
            stop_reason=request.stop_reason,
            logprobs=request.logprobs,
            error=request.error,
            acceptance=request.py_acceptance,
        )

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of ``token_ids``; None: not requested."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=False)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic`; None: that did not happen."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its generated sequences, finished unless it is a partial output of a stream.

    The attributes of ``outputs[0]`` are also attributes of this object.
    """

    request_id: int
    """Id of the first sequence, as `LLM.abort` expects it."""
    prompt: str | None
    """None: the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: PromptLogprobs | None = None
    """A mapping for each of ``prompt_token_ids``, None for the first; None: not requested."""
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """None for several sequences."""
    finished: bool = True
    """False in partial outputs."""

    @classmethod
    def of(cls, *requests: LlmRequest) -> Self:
        """Return the output of the finished requests of one prompt.

        Raises:
            RequestError: a request has not finished.
        """
        first = requests[0]
        return cls(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.tokens[: first.py_orig_prompt_len],
            outputs=[CompletionOutput.of(request) for request in requests],
            prompt_logprobs=first.prompt_logprobs,
            metrics=None
            if len(requests) > 1
            else RequestMetrics(first.arrival_time, first.first_token_time, first.finished_time),
        )

    @classmethod
    def of_success(cls, *requests: LlmRequest) -> Self:
        """Return the output of requests that finished without an error.

        Raises:
            ExecutorError: a request ended with an error.
            RequestError: a request has not finished.
        """
        for request in requests:
            if request.error is not None:
                raise ExecutorError(f"request {request.request_id}: {request.error}")
        return cls.of(*requests)

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sequence."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first sequence."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Stop reason of the first sequence."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> Logprobs | None:
        """Log-probabilities of the first sequence."""
        return self.outputs[0].logprobs

    @property
    def error(self) -> str | None:
        """Error of the first sequence."""
        return self.outputs[0].error

    @property
    def acceptance(self) -> AcceptanceStats:
        """Acceptance statistics of the first sequence."""
        return self.outputs[0].acceptance

    @property
    def label(self) -> Label | None:
        """Marks output of verification that is not lossless; None: the target's own output."""
        return self.acceptance.label


@dataclass(frozen=True)
class PartialCompletion(CompletionOutput):
    """One sequence so far; ``acceptance`` is empty until its prompt has finished."""

    text_diff: str = ""
    """Text since the last partial output."""
    token_ids_diff: list[int] = field(default_factory=list)
    """Token ids since the last partial output."""

    def extended(self, events: Sequence[StepEvent]) -> PartialCompletion:
        """Return the sequence with further events."""
        text = "".join(event.text for event in events)
        tokens = [token for event in events for token in event.token_ids]
        extended = replace(
            self,
            text=self.text + text,
            token_ids=self.token_ids + tokens,
            logprobs=Logprobs.joined((self.logprobs, *(event.logprobs for event in events))),
            text_diff=text,
            token_ids_diff=tokens,
        )
        if not events or (reason := events[-1].finish_reason) is None:
            return extended
        return replace(
            extended,
            finish_reason=FINISH_REASONS[reason],
            stop_reason=events[-1].stop_reason,
            error=events[-1].error,
        )


def extended_output(
    last: RequestOutput | None, requests: Sequence[LlmRequest], events: Sequence[StepEvent]
) -> RequestOutput:
    """Return the partial output of a prompt's requests that follows ``last``, with new events.

    Raises:
        ExecutorError: all requests have finished, one of them with an error.
    """
    outputs: list[CompletionOutput] = []
    for index in range(len(requests)):
        before = None if last is None else last.outputs[index]
        if not isinstance(before, PartialCompletion):
            before = PartialCompletion(index, "", [], None)
        outputs.append(before.extended([e for e in events if e.sample_index == index]))
    if all(each.finish_reason is not None for each in outputs):
        ended = zip(outputs, requests, strict=True)
        outputs = [replace(own, acceptance=request.py_acceptance) for own, request in ended]
        return replace(RequestOutput.of_success(*requests), outputs=outputs)
    prompt_logprobs = None if last is None else last.prompt_logprobs
    for event in events:
        prompt_logprobs = event.prompt_logprobs or prompt_logprobs
    return RequestOutput(
        request_id=requests[0].request_id,
        prompt=requests[0].prompt,
        prompt_token_ids=requests[0].tokens[: requests[0].py_orig_prompt_len],
        outputs=outputs,
        prompt_logprobs=prompt_logprobs,
        finished=False,
    )

"""The output of a finished request."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from mtp_plugin.errors import ExecutorError, RequestError
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.requests.logprobs import Logprobs, PromptLogprobs
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, Label


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceStats
    error: str | None = None
    """The reason if ``finish_reason`` is ERROR."""
    logprobs: Logprobs | None = None
    """A mapping of ids to log-probabilities for each of ``token_ids``; None: not requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """The same for each of ``prompt_token_ids``, None for the first."""

    @classmethod
    def of(cls, request: LlmRequest) -> Self:
        """Return the output of a finished request.

        Raises:
            RequestError: the request has not finished.
        """
        if request.finish_reason is None:
            raise RequestError(f"request {request.request_id} has not finished")
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.tokens[: request.py_orig_prompt_len],
            token_ids=request.output_token_ids,
            text=request.text.full_text if request.text is not None else "",
            finish_reason=request.finish_reason,
            acceptance=request.py_acceptance,
            error=request.error,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    @classmethod
    def of_success(cls, request: LlmRequest) -> Self:
        """Return the output of a request that finished without an error.

        Raises:
            ExecutorError: the request ended with an error.
            RequestError: the request has not finished.
        """
        if request.error is not None:
            raise ExecutorError(f"request {request.request_id}: {request.error}")
        return cls.of(request)

    @property
    def label(self) -> Label | None:
        """Marks output of verification that is not lossless; None: the target's own output."""
        return self.acceptance.label

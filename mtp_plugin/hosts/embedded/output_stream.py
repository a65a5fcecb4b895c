"""Partial outputs of one prompt, as TensorRT-LLM's ``generate_async(..., streaming=True)``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_plugin.hosts.embedded.handle import RequestHandle
from mtp_plugin.hosts.embedded.outputs import FINISH_REASONS, CompletionOutput, RequestOutput
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.results import TimedEvent
from mtp_plugin.requests.logprobs import Logprobs, PromptLogprobs


@dataclass(frozen=True)
class PartialCompletion(CompletionOutput):
    """One sequence so far; ``acceptance`` is empty until its prompt has finished."""

    text_diff: str = ""
    """Text since the last partial output."""
    token_ids_diff: list[int] = field(default_factory=list)
    """Token ids since the last partial output."""


class OutputStream(AsyncIterator[RequestOutput]):
    """Returned by ``LLM.generate_async(..., streaming=True)``: ``async for`` or ``await`` it.

    The iteration yields a `RequestOutput` with the whole output so far whenever there are new
    tokens; one that lags gets the tokens of several steps at once. ``finished`` of the last one is
    True. ``await`` returns the final output; errors are those of `RequestHandle.result`. Garbage
    collection of the object aborts the request.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._num_read = 0
        self._completions: dict[int, PartialCompletion] = {}
        self._prompt_logprobs: PromptLogprobs | None = None

    @property
    def request_id(self) -> int:
        """The id that `LLM.abort` expects; with ``n`` > 1 that of the first sequence."""
        return self._handle.request_id

    def abort(self) -> bool:
        """Abort the request; see `LLM.abort`."""
        return self._handle.abort()

    def result(self) -> RequestOutput:
        """Wait for the final output outside of a coroutine; see `RequestHandle.result`."""
        return self._handle.result()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait for the final output."""
        return self._handle.__await__()

    async def __anext__(self) -> RequestOutput:
        """Return the output so far, once it has new tokens.

        A call that is cancelled, by ``asyncio.wait_for`` for example, loses no tokens: the next one
        returns them.
        """
        try:
            while True:
                start = self._num_read
                events, following = await self._handle.read_from(start)
                if start == self._num_read:  # else another reader got these events
                    self._num_read = following
                    break
            if not events:
                raise StopAsyncIteration
            return self._extend(events)
        finally:
            # an asyncio task keeps the exception that ended it, whose traceback keeps this frame
            del self

    def _extend(self, events: list[TimedEvent]) -> RequestOutput:
        """Return the output with further events."""
        new: dict[int, list[StepEvent]] = {}
        for _, event in events:
            new.setdefault(event.sample_index, []).append(event)
            self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        requests = self._handle.requests
        for index in range(len(requests)):
            last = self._completions.get(index) or PartialCompletion(index, "", [], None)
            self._completions[index] = _extended(last, new.get(index, []))
        completions: list[CompletionOutput] = [*self._completions.values()]
        if all(each.finish_reason is not None for each in completions):
            output = RequestOutput.of_success(*requests)
            final = zip(completions, output.outputs, strict=True)
            return replace(
                output, outputs=[replace(one, acceptance=own.acceptance) for one, own in final]
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=requests[0].prompt,
            prompt_token_ids=requests[0].tokens[: requests[0].py_orig_prompt_len],
            outputs=completions,
            prompt_logprobs=self._prompt_logprobs,
            finished=False,
        )


def _extended(last: PartialCompletion, events: list[StepEvent]) -> PartialCompletion:
    """Return a sequence with further events."""
    text = "".join(event.text for event in events)
    tokens = [token for event in events for token in event.token_ids]
    extended = replace(
        last,
        text=last.text + text,
        token_ids=last.token_ids + tokens,
        logprobs=Logprobs.joined((last.logprobs, *(event.logprobs for event in events))),
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

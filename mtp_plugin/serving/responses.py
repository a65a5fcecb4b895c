"""Responses of the completion endpoints, streamed and whole."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

from mtp_plugin.hosts.embedded import RequestOutput, StepEvent
from mtp_plugin.hosts.embedded.call import TimedEvent
from mtp_plugin.hosts.embedded.outputs import CompletionOutput
from mtp_plugin.requests.detokenizer import Segment
from mtp_plugin.requests.logprobs import Logprob, Logprobs, PromptLogprobs, TokenLogprobs
from mtp_plugin.serving.errors import APIError, encode_json
from mtp_plugin.serving.generation import Generation
from mtp_plugin.serving.protocol import ChatBody, CompletionBody
from mtp_plugin.serving.reasoning import THINKING, ReasoningSplit
from mtp_plugin.speculative.metrics.alarms import repeats_itself

T = TypeVar("T")
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of log-probabilities in OpenAI's older format."""
STEPS_PER_PART = 32
"""Number of tokens or steps whose log-probabilities are written at once."""
LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


class Writer:
    """Writes the response of one request; a subclass for each endpoint.

    Args:
        model: name of the model.
        prompts: texts of the prompts, for ``echo``.
        splits: splits the text of each sequence into thinking and answer.
        decode: token ids -> text.
    """

    chunk_object = whole_object = id_prefix = ""

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        generation: Generation,
        model: str,
        prompts: Sequence[str],
        splits: list[ReasoningSplit],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.body = body
        self.decode = decode
        self.generation = generation
        self.prompts = prompts
        self.splits = splits
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.offsets = [0] * len(splits)
        """Length of the text of each sequence so far, as its tokens' log-probabilities have it."""
        self._echoed: set[int] = set()
        """Indices of sequences whose prompt was echoed with its log-probabilities."""
        self._outputs: list[RequestOutput] = []
        self._num_tokens = 0

    # ---- streams ----------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[str]:
        """Yield the server-sent events of a stream."""
        options = self.body.stream_options
        try:
            for chunk in self.first_chunks():
                yield self._event([chunk])
            async for results in self.generation.results():
                for choice in self._choices(results):
                    yield self._event([choice])
                    if self.has_logprobs:
                        await asyncio.sleep(0)  # a chunk takes milliseconds
            if options is not None and options.include_usage:
                yield self._event([], usage=self._usage(), metrics=self._metrics())
        except APIError as error:
            yield f"data: {encode_json(error.body())}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices, **more}
        options = self.body.stream_options
        if options is not None and choices:
            continuous = options.continuous_usage_stats
            chunk["usage"] = self._counts() if continuous else None
        return f"data: {encode_json(chunk)}\n\n"

    def _choices(self, results: Iterable[tuple[int, Any]]) -> Iterable[dict[str, Any]]:
        """Yield one choice for each sequence with new tokens, and the last one of ended prompts."""
        events: dict[int, list[StepEvent]] = {}
        ended: list[tuple[int, RequestOutput]] = []
        for prompt_index, result in results:
            if isinstance(result, RequestOutput):
                ended.append((prompt_index, self._shown(result)))
            elif not self.body.is_echo_only:
                index = prompt_index * self.generation.num_samples + result.sample_index
                events.setdefault(index, []).append(result)
        for index, of_sequence in events.items():
            size = STEPS_PER_PART if self.has_logprobs else len(of_sequence)
            for event in of_sequence:
                if event.prompt_logprobs is not None:
                    yield from self.scored_prompt(index, event.prompt_logprobs)
            for start in range(0, len(of_sequence), size):
                part = of_sequence[start : start + size]
                self._num_tokens += sum(len(event.token_ids) for event in part)
                yield from self._progress(index, part)
        for prompt_index, output in ended:
            self._outputs.append(output)
            for completion in output.outputs:
                index = prompt_index * self.generation.num_samples + completion.index
                yield from self.scored_prompt(index, output.prompt_logprobs)
                reason = {
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                yield {**self.delta(index, [], [], None), **reason}

    def _progress(self, index: int, events: list[StepEvent]) -> Iterable[dict[str, Any]]:
        tokens = [token for event in events for token in event.token_ids]
        text = "".join(event.text for event in events)
        logprobs: list[TokenLogprobs] | None = None
        if events[0].logprobs is not None:
            logprobs = [each for event in events for each in event.logprobs or ()]
        pieces = self.splits[index].push(tokens, text, is_last=events[-1].finish_reason is not None)
        if not (tokens or text or pieces):
            return
        choice = self.delta(index, tokens, pieces, logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = tokens
        if self.body.return_draft_segments:
            choice["draft_segments"] = [
                _draft_segment(segment) for event in events for segment in event.segments
            ]
            choice.update(_step_counts(events))
        yield {**choice, "finish_reason": None}

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Yield choices that precede the output."""
        for index in range(len(self.splits)):
            choice = self.first_choice(index)
            if self.body.return_token_ids:
                prompt = index // self.generation.num_samples
                choice["prompt_token_ids"] = self.generation.prompts[prompt]
            yield {**choice, "finish_reason": None}

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return a choice that precedes the output."""
        raise NotImplementedError

    def scored_prompt(
        self,
        index: int,  # noqa: ARG002
        logprobs: PromptLogprobs | None,  # noqa: ARG002
    ) -> Iterable[dict[str, Any]]:
        """Yield choices with the echoed prompt, once its log-probabilities are known."""
        return ()

    def delta(
        self,
        index: int,
        tokens: list[int],
        pieces: list[tuple[str, str]],
        logprobs: list[TokenLogprobs] | None,
    ) -> dict[str, Any]:
        """Return a choice of a chunk."""
        raise NotImplementedError

    # ---- whole responses --------------------------------------------------------------------

    async def wait(self) -> list[RequestOutput]:
        """Wait for the outputs, which :meth:`whole` writes.

        Raises:
            APIError: the engine failed.
        """
        self._outputs = list(map(self._shown, await self.generation.outputs()))
        return self._outputs

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """Return an output as the response shows it."""
        if not self.body.is_echo_only:
            return output
        outputs = [
            replace(
                each,
                text="",
                token_ids=[],
                logprobs=None if each.logprobs is None else Logprobs(),
                finish_reason="length",
                stop_reason=None,
            )
            for each in output.outputs
        ]
        return replace(output, outputs=outputs)

    def whole(self) -> Iterator[str]:
        """Yield the JSON text of the whole response, in parts that take milliseconds."""
        yield _opened({**self._head, "object": self.whole_object}, "choices") + "["
        separator = ""
        for prompt_index, output in enumerate(self._outputs):
            for completion in output.outputs:
                index = prompt_index * self.generation.num_samples + completion.index
                choice = {
                    "index": index,
                    **self.choice(index, prompt_index, completion),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                if self.body.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                    choice["prompt_token_ids"] = output.prompt_token_ids
                if self.body.return_draft_segments and not self.body.is_echo_only:
                    choice.update(_timed_drafts(self.generation.arrived[prompt_index], completion))
                yield separator + _opened(choice, "logprobs")
                yield from self.logprobs_parts(prompt_index, output, completion)
                if self.body.prompt_logprobs is not None:
                    yield ',"prompt_logprobs":['
                    yield from _joined(map(_prompt_logprobs, _parts(output.prompt_logprobs or ())))
                    yield "]"
                yield "}"
                separator = ","
        numbers = {"usage": self._usage(), "metrics": self._metrics()}
        yield "]," + encode_json(numbers)[1:]

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities, which take most of the time of writing."""
        given = (self.body.logprobs, self.body.prompt_logprobs)
        return any(value is not None and value is not False for value in given)

    def choice(self, index: int, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Return the content of a choice of the whole response, without log-probabilities."""
        raise NotImplementedError

    def logprobs_parts(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[str]:
        """Yield the JSON text of the log-probabilities of a choice of the whole response."""
        raise NotImplementedError

    # ---- numbers ----------------------------------------------------------------------------

    def _counts(self) -> dict[str, Any]:
        prompt = sum(map(len, self.generation.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }

    def _usage(self) -> dict[str, Any]:
        completions = [completion for output in self._outputs for completion in output.outputs]
        self._num_tokens = sum(len(completion.token_ids) for completion in completions)
        accepted = sum(num_accepted(completion) for completion in completions)
        drafted = sum(completion.acceptance.num_drafted for completion in completions)
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(drafted - accepted, 0),
            "reasoning_tokens": self.generation.num_thinking,
        }
        return {**self._counts(), "completion_tokens_details": details}

    def _metrics(self) -> dict[str, Any] | None:
        """Return acceptance statistics with vLLM's names; None for several sequences."""
        completions = [completion for output in self._outputs for completion in output.outputs]
        if len(completions) != 1 or completions[0].acceptance.max_draft_len == 0:
            return None
        stats = completions[0].acceptance
        none, *histogram = stats.histogram
        histogram[0] += none
        return {
            "speculative_decoding": {
                "mean_acceptance_length": stats.acceptance_length,
                "draft_acceptance_rate": stats.acceptance_rate,
                "acceptance_histogram": histogram,
                "histogram": stats.histogram,
                "num_spec_steps": stats.steps,
                "num_accepted_draft_tokens": num_accepted(completions[0]),
                "num_draft_tokens": stats.num_drafted,
                "num_spec_tokens": stats.max_draft_len,
                "looping": stats.num_drafted > 0 and repeats_itself(completions[0].token_ids),
            }
        }


def _timed_drafts(arrived: Iterable[TimedEvent], completion: CompletionOutput) -> dict[str, Any]:
    """Return the segments of a sequence and when the engine produced them."""
    timed = [(when, e) for when, e in arrived if e.sample_index == completion.index]
    return {
        "draft_segments": [
            {**_draft_segment(segment), "seconds": round(when, 6)}
            for when, event in timed
            for segment in event.segments
        ],
        **_step_counts([event for _, event in timed]),
        "seconds": round(max((when for when, _ in timed), default=0.0), 6),
    }


def _draft_segment(segment: Segment) -> dict[str, Any]:
    return {
        "text": segment.text,
        "from_draft": segment.from_draft,
        "draft_position": segment.draft_position,
    }


def _step_counts(events: Sequence[StepEvent]) -> dict[str, int]:
    return {
        "num_tokens": sum(len(event.token_ids) for event in events),
        "num_steps": sum(bool(event.token_ids) for event in events),
    }


class CompletionWriter(Writer):
    """``/v1/completions``."""

    body: CompletionBody
    chunk_object = whole_object = "text_completion"
    id_prefix = "cmpl"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Yield the echoed prompts and their token ids."""
        is_echoed = self.body.echo and not self._scores_prompt
        return super().first_chunks() if is_echoed or self.body.return_token_ids else ()

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return a choice that precedes the output."""
        is_echoed = self.body.echo and not self._scores_prompt
        prompt = self.prompts[index // self.generation.num_samples]
        return {"index": index, "text": prompt if is_echoed else "", "logprobs": None}

    @property
    def _scores_prompt(self) -> bool:
        """Whether the echoed prompt has log-probabilities."""
        return self.body.echo and self.body.logprobs is not None

    def scored_prompt(
        self, index: int, logprobs: PromptLogprobs | None
    ) -> Iterable[dict[str, Any]]:
        """Yield choices with the echoed prompt, once its log-probabilities are known."""
        if not self._scores_prompt or index in self._echoed:
            return
        self._echoed.add(index)
        prompt = index // self.generation.num_samples
        text = self.prompts[prompt]
        pairs = zip(self.generation.prompts[prompt], logprobs or (), strict=False)
        for part in _parts(pairs):
            found = self._logprobs(part, self.offsets[index])
            self.offsets[index] += sum(map(len, found["tokens"]))
            yield {"index": index, "text": text, "logprobs": found, "finish_reason": None}
            text = ""
        if text:  # it ended before its prompt was scored
            yield {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def delta(
        self,
        index: int,
        tokens: list[int],
        pieces: list[tuple[str, str]],
        logprobs: list[TokenLogprobs] | None,
    ) -> dict[str, Any]:
        """Return a choice of a chunk."""
        found = None
        if logprobs is not None:
            pairs = list(zip(tokens, logprobs, strict=False))
            found = self._logprobs(pairs, self.offsets[index])
            self.offsets[index] += sum(len(token) for token in found["tokens"])
        return {
            "index": index,
            "text": "".join(text for _, text in pieces),
            "logprobs": found,
        }

    def choice(
        self,
        index: int,  # noqa: ARG002
        prompt_index: int,
        completion: CompletionOutput,
    ) -> dict[str, Any]:
        """Return the content of a choice of the whole response, without log-probabilities."""
        text = completion.text
        return {"text": self.prompts[prompt_index] + text if self.body.echo else text}

    def logprobs_parts(
        self,
        prompt_index: int,  # noqa: ARG002
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> Iterator[str]:
        """Yield the JSON text of the log-probabilities of a choice of the whole response."""
        if completion.logprobs is None:
            yield "null"
            return
        tokens: Iterable[int] = completion.token_ids
        logprobs: Iterable[TokenLogprobs | None] = completion.logprobs
        if self.body.echo:
            tokens = chain(output.prompt_token_ids, tokens)
            logprobs = chain(output.prompt_logprobs or (), logprobs)
        offset = 0
        columns: dict[str, list[str]] = {}
        for part in _parts(zip(tokens, logprobs, strict=False)):
            found = self._logprobs(part, offset)
            offset += sum(map(len, found["tokens"]))
            for name, values in found.items():
                columns.setdefault(name, []).append(encode_json(values)[1:-1])
            yield ""
        texts = (f'"{name}":[{",".join(columns.get(name, ()))}]' for name in COLUMNS)
        yield "{" + ",".join(texts) + "}"

    def _logprobs(
        self, pairs: Sequence[tuple[int, TokenLogprobs | None]], offset: int
    ) -> dict[str, Any]:
        """Return log-probabilities in OpenAI's older format."""
        texts, values, tops, offsets = [], [], [], []
        for token, known in pairs:
            # the first token of a prompt has no log-probability
            if known:
                text = token_text(token, known[token])
            else:
                text = self.decode([token]) or f"token_id:{token}"
            texts.append(text)
            values.append(clamped(known[token]) if known else None)
            top = {token_text(t, each): clamped(each) for t, each in (known or {}).items()}
            tops.append(top if known else None)
            offsets.append(offset)
            offset += len(text)
        return dict(zip(COLUMNS, (texts, values, tops, offsets), strict=True))


class ChatWriter(Writer):
    """``/v1/chat/completions``."""

    body: ChatBody
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl"

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return a choice with the role."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(
        self,
        index: int,
        tokens: list[int],
        pieces: list[tuple[str, str]],
        logprobs: list[TokenLogprobs] | None,
    ) -> dict[str, Any]:
        """Return a choice of a chunk."""
        found = None
        if logprobs is not None:
            found = {"content": self._entries(zip(tokens, logprobs, strict=False))}
        return {"index": index, "delta": _message(pieces), "logprobs": found}

    def choice(
        self,
        index: int,
        prompt_index: int,  # noqa: ARG002
        completion: CompletionOutput,
    ) -> dict[str, Any]:
        """Return the content of a choice of the whole response, without log-probabilities."""
        pieces = self.splits[index].push(completion.token_ids, completion.text, is_last=True)
        return {"message": {"role": "assistant", "content": "", **_message(pieces)}}

    def logprobs_parts(
        self,
        prompt_index: int,  # noqa: ARG002
        output: RequestOutput,  # noqa: ARG002
        completion: CompletionOutput,
    ) -> Iterator[str]:
        """Yield the JSON text of the log-probabilities of a choice of the whole response."""
        if completion.logprobs is None:
            yield "null"
            return
        yield '{"content":['
        pairs = zip(completion.token_ids, completion.logprobs, strict=False)
        yield from _joined(map(self._entries, _parts(pairs)))
        yield "]}"

    def _entries(self, pairs: Iterable[tuple[int, TokenLogprobs]]) -> list[dict[str, Any]]:
        """Return log-probabilities in OpenAI's chat format."""
        content = []
        for token, known in pairs:
            entry = _chat_entry(token, known[token])
            top = [
                _chat_entry(t, each)
                for t, each in known.items()
                if each.rank <= (self.body.top_logprobs or 0)
            ]
            entry["top_logprobs"] = sorted(top, key=lambda each: -each["logprob"])
            content.append(entry)
        return content


def num_accepted(completion: CompletionOutput) -> int:
    """Return the number of accepted draft tokens of a sequence."""
    histogram = completion.acceptance.histogram
    return sum(count * max(emitted - 1, 0) for emitted, count in enumerate(histogram))


def token_text(token: int, logprob: Logprob) -> str:
    """Return the text of a token."""
    text = logprob.decoded_token
    return f"token_id:{token}" if text is None else text


def clamped(logprob: Logprob) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob.logprob, LOWEST_LOGPROB)


def _message(pieces: list[tuple[str, str]]) -> dict[str, str]:
    message: dict[str, str] = {}
    for phase, text in pieces:
        name = "reasoning_content" if phase == THINKING else "content"
        message[name] = message.get(name, "") + text
    return message


def _chat_entry(token: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(token, logprob)
    return {
        "token": text,
        "bytes": list(text.encode("utf-8", "replace")),
        "logprob": clamped(logprob),
    }


def _opened(content: dict[str, Any], last: str) -> str:
    """Return the text of a JSON object up to the value of its ``last`` field."""
    return f'{encode_json(content)[:-1]},"{last}":'


def _parts(items: Iterable[T]) -> Iterator[list[T]]:
    """Split items into lists of `STEPS_PER_PART`."""
    iterator = iter(items)
    while part := list(islice(iterator, STEPS_PER_PART)):
        yield part


def _joined(parts: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the JSON text of the items of lists, without brackets."""
    separator = ""
    for part in parts:
        yield separator + encode_json(part)[1:-1]
        separator = ","


def _prompt_logprobs(
    logprobs: Iterable[TokenLogprobs | None],
) -> list[Mapping[int, Any] | None]:
    """Return log-probabilities of the prompt in vLLM's format."""
    return [
        None
        if known is None
        else {
            token: {
                "logprob": clamped(each),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in known.items()
        }
        for known in logprobs
    ]

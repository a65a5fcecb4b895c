"""Runs the prompts of one HTTP request in the engine and collects their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from mtp_plugin.errors import ExecutorError, MTPPluginError, RequestError, one_line
from mtp_plugin.hosts.embedded import LLM, RequestHandle, RequestOutput, SamplingParams, StepEvent
from mtp_plugin.hosts.embedded.call import TimedEvent
from mtp_plugin.requests.thinking import ThinkingEnd, resolve_thinking_end
from mtp_plugin.requests.tokenizer import encode, named_failures
from mtp_plugin.serving.errors import APIError, Problem, problem_of
from mtp_plugin.serving.metrics import SequenceClock, ServerMetrics
from mtp_plugin.serving.reasoning import ThinkingTracker
from mtp_plugin.serving.settings import ServerSettings

_logger = logging.getLogger(__name__)
T = TypeVar("T")

SECONDS_PER_STREAM = 0.0004
"""Minimum time between two chunks of a stream, times the number of unfinished sequences: under
load, chunks have the tokens of several steps."""
Result = tuple[int, "StepEvent | RequestOutput"]
"""Index of a prompt, and an event of it or its output."""


class Generation:
    """Submitted prompts of one HTTP request and their places in the server.

    A prompt's places are freed when the engine is done with it, whether or not its client has read
    the output; :meth:`close` aborts what is unfinished.
    """

    def __init__(
        self,
        service: EngineService,
        handles: list[RequestHandle],
        prompts: list[list[int]],
        num_samples: int,
    ) -> None:
        self.prompts = prompts
        """Token ids of each prompt."""
        self.num_samples = num_samples
        self.arrived: list[list[TimedEvent]] = []
        """After :meth:`outputs`: the events of each prompt, with seconds since its submission."""
        self._service = service
        self._handles = handles
        self._num_unfinished = len(handles)
        self._loop = asyncio.get_running_loop()
        self.clocks = [
            [
                SequenceClock(service.metrics, ThinkingTracker(service.thinking, prompt))
                for _ in range(num_samples)
            ]
            for prompt in prompts
        ]
        for handle in handles:
            handle.add_done_callback(self._end_soon)

    async def outputs(self) -> list[RequestOutput]:
        """Return the outputs of all prompts.

        Raises:
            APIError: the engine failed.
        """
        handles = self._handles
        readers = [asyncio.ensure_future(_wait(handle)) for handle in handles]
        try:
            outputs = list(await asyncio.gather(*readers))
        except Exception as error:
            raise self._service.failure(error) from None
        finally:
            for reader in readers:
                reader.cancel()
            for index, handle in enumerate(handles):
                self._observe(index, handle.arrived())
            self.close()
        for handle in handles:
            start = handle.requests[0].arrival_time
            self.arrived.append([(when - start, event) for when, event in handle.arrived()])
        for output in outputs:
            self._observe_output(output)
        return outputs

    async def results(self) -> AsyncIterator[list[Result]]:
        """Yield all results that arrived since the last ones; the output of a prompt comes last.

        Under load, the results of several steps come together.

        Raises:
            APIError: the engine failed.
        """
        found: list[Result | Exception] = []
        has_found = asyncio.Event()
        readers = [
            asyncio.ensure_future(self._read(index, handle, found, has_found))
            for index, handle in enumerate(self._handles)
        ]
        unfinished = len(readers)
        try:
            while unfinished:
                await has_found.wait()
                has_found.clear()
                results: list[Result] = []
                for result in found:
                    if isinstance(result, Exception):
                        raise self._service.failure(result)
                    unfinished -= isinstance(result[1], RequestOutput)
                    results.append(result)
                found.clear()
                yield results
        finally:
            for reader in readers:
                reader.cancel()
            self.close()

    async def _read(
        self,
        index: int,
        handle: RequestHandle,
        found: list[Result | Exception],
        has_found: asyncio.Event,
    ) -> None:
        """Append the results of a prompt as they arrive."""
        try:
            async for events in handle.read_arrived():
                self._observe(index, events)
                found += [(index, event) for _, event in events]
                has_found.set()
                if not handle.is_finished:
                    await asyncio.sleep(self._service.num_sequences * SECONDS_PER_STREAM)
            output = await handle
        except Exception as error:
            found.append(error)
        else:
            self._observe_output(output)
            found.append((index, output))
        has_found.set()

    def _observe(self, index: int, events: Iterable[TimedEvent]) -> None:
        clocks = self.clocks[index]
        for when, event in events:
            clocks[event.sample_index].observe(event, when)

    def _observe_output(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self._service.metrics.observe_output(completion)

    @property
    def num_thinking(self) -> int:
        """Number of thinking tokens of all sequences."""
        return sum(c.tracker.num_thinking for clocks in self.clocks for c in clocks)

    def abort(self) -> None:
        """Abort all sequences; their outputs have the finish reason ``abort``."""
        for handle in self._handles:
            handle.abort()

    def close(self) -> None:
        """Abort unfinished sequences and drop the others."""
        self.abort()
        self._handles = []  # they refer to this object

    def _end_soon(self) -> None:
        with suppress(RuntimeError):  # the event loop was closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Free the places of a prompt."""
        self._num_unfinished -= 1
        self._service.release(self.num_samples, None if self._num_unfinished else self)


async def _wait(handle: RequestHandle) -> RequestOutput:
    return await handle


class EngineService:
    """The engine, its tokenizer worker and the server's counters.

    All uses of the tokenizer's ``encode`` are in one thread.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.num_sequences = 0
        """Unfinished sequences of all requests."""
        self.is_draining = False
        self.metrics = ServerMetrics(llm, settings, lambda: self.num_sequences)
        self._generations: set[Generation] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mtp-serving")
        self.tokenizer = llm.get_tokenizer()
        self.thinking: ThinkingEnd | None = None
        if self.tokenizer is not None:
            self.thinking = resolve_thinking_end(llm.config.speculative_config, self._encode_tag)

    def _encode_tag(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, add_special_tokens=False)

    def decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        """Return the function that decodes a sequence of a request; no tokenizer: to no text."""

        def decode(tokens: list[int]) -> str:
            if self.tokenizer is None:
                return ""
            return str(
                self.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
            )

        return decode

    @property
    def is_healthy(self) -> bool:
        """Whether the engine accepts requests."""
        return self.llm.is_running

    def check_accepts(self) -> None:
        """Refuse requests while the server shuts down or after the engine's end.

        Raises:
            APIError: see above.
        """
        if self.is_draining:
            raise APIError(503, (None, "the server is shutting down"))
        if not self.is_healthy:
            raise APIError(503, (None, "the engine is not running"))

    async def run_tokenizer(self, work: Callable[[], T], field: str) -> T:
        """Run ``work``, which uses the tokenizer, in its thread and within the deadline.

        Raises:
            APIError: the request is invalid, or the deadline passed.
        """
        loop = asyncio.get_running_loop()
        seconds = self.settings.tokenizer_seconds
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._worker, work), seconds)
        except asyncio.TimeoutError:
            raise APIError(503, (field, f"{field}: not tokenized within {seconds} s")) from None
        except RequestError as error:
            raise APIError(400, problem_of(error, field)) from None
        except MTPPluginError as error:
            raise self.failure(error) from None

    async def tokenize(
        self, text: str, add_special_tokens: bool, *, with_texts: bool = False
    ) -> tuple[list[int], list[str] | None]:
        """Return the token ids of a text and, if requested and known, the text of each."""

        def work() -> tuple[list[int], list[str] | None]:
            tokenizer = self._expect_tokenizer()
            to_texts = getattr(tokenizer, "convert_ids_to_tokens", None) if with_texts else None
            try:
                tokens = encode(tokenizer, text, add_special_tokens=add_special_tokens)
                with named_failures(tokenizer, lambda: "cannot name tokens"):
                    return tokens, None if to_texts is None else to_texts(tokens)
            except RequestError:
                raise
            except MTPPluginError:
                raise RequestError("prompt: the tokenizer cannot encode it") from None

        return await self.run_tokenizer(work, "prompt")

    async def detokenize(self, tokens: list[int]) -> str:
        """Return the text of token ids."""

        def work() -> str:
            tokenizer = self._expect_tokenizer()
            vocab = self.llm.model.facts.vocab_size
            wrong = [token for token in tokens if token >= vocab]
            if wrong:
                raise RequestError(f"tokens: expected ids below {vocab}")
            try:
                with named_failures(tokenizer, lambda: "cannot decode"):
                    return str(tokenizer.decode(tokens, skip_special_tokens=False))
            except MTPPluginError:
                raise RequestError("tokens: the tokenizer cannot decode them") from None

        return await self.run_tokenizer(work, "tokens")

    def _expect_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("prompt: the model has no tokenizer")
        return self.tokenizer

    async def submit(
        self,
        prompts: Sequence[Any],
        params: SamplingParams,
        problems: Sequence[Problem],
        field: str,
    ) -> Generation:
        """Check prompts and options and submit them all, or none.

        Args:
            problems: known problems of other fields; the error has these and those found here.
            field: the field of the prompts.

        Raises:
            APIError: the request is invalid, or the server has too many unfinished sequences.
        """
        self.check_accepts()
        count, limit = len(prompts) * params.n, self.settings.max_sequences
        if count > limit:
            message = f"n: at most {limit} sequences (prompts times n) are served, got {count}"
            raise APIError(400, *problems, ("n", message))
        if self.num_sequences + count > self.settings.max_queued:
            message = f"at most {self.settings.max_queued} unfinished sequences are served"
            raise APIError(429, (None, message), headers={"Retry-After": "1"})
        self.num_sequences += count
        try:
            generation = await self._submit(prompts, params, problems, field)
        except BaseException:
            self.num_sequences -= count
            raise
        self._generations.add(generation)
        return generation

    async def _submit(
        self,
        prompts: Sequence[Any],
        params: SamplingParams,
        problems: Sequence[Problem],
        field: str,
    ) -> Generation:
        def work() -> tuple[list[RequestHandle], list[list[int]]]:
            requests = self.llm.make_requests(list(prompts), [params] * len(prompts))
            ids = [r.tokens[: r.py_orig_prompt_len] for r in requests if r.sample_index == 0]
            longest = max(map(len, ids))
            if longest >= self.llm.max_seq_len:
                raise RequestError(
                    f"{field}: {longest} tokens leave no room for output, the maximum is "
                    f"{self.llm.max_seq_len} tokens of prompt and output"
                )
            if problems:
                return [], ids
            return [self.llm.submit(each, params) for each in ids], ids

        try:
            handles, ids = await self.run_tokenizer(work, field)
        except APIError as error:
            if problems and error.status == 400:
                raise APIError(400, *problems, *error.problems) from None
            raise
        if problems:
            raise APIError(400, *problems)
        return Generation(self, handles, ids, params.n)

    def release(self, count: int, ended: Generation | None) -> None:
        """Free places, and forget a generation that has ended."""
        self.num_sequences -= count
        if ended is not None:
            self._generations.discard(ended)

    def abort_all(self) -> None:
        """Abort all sequences."""
        for generation in list(self._generations):
            generation.abort()

    def failure(self, error: Exception) -> APIError:
        """Return the error that clients see in place of an engine's error, which is logged."""
        if not self.is_healthy:
            return APIError(503, (None, "the engine is not running"))
        if not isinstance(error, ExecutorError):
            _logger.error("a request failed", exc_info=error)
        else:
            _logger.error("a request failed: %s", one_line(error))
        return APIError(500, (None, "the engine could not finish the request"))

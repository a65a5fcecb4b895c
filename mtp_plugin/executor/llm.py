"""The Python API: a model, a config, and prompts in; text, steps or a stream out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.executor import collector_freeze
from mtp_plugin.executor.admission import Admission
from mtp_plugin.executor.asked_config import asked_config
from mtp_plugin.executor.async_steps import AsyncSteps
from mtp_plugin.executor.build import Progress, build_executor
from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.handle import RequestHandle
from mtp_plugin.executor.models import LoadedModel
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.executor.scheduler import ChunkPolicy, whole_budget
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.prompts import Prompt
from mtp_plugin.requests.stop_callback import StopCallback
from mtp_plugin.requests.tokenizer import load_tokenizer
from mtp_plugin.speculative.plugin import SpeculativePieces


class LLM:
    """An embedded executor around one checkpoint.

    ``LLM("checkpoint")`` or ``LLM(model="checkpoint", max_batch_size=4)`` take a checkpoint's
    folder; without ``speculative_config`` beside it, drafts come of its MTP layers where it has
    some (`config_of_checkpoint`), and one line says so. ``speculative_config=None``: no drafts.

    Args:
        config: a checkpoint's folder, the path of a YAML file, a mapping with the keys of
            ``LLMConfig``, or one.
        model: a checkpoint's folder, before that of a config; or an already loaded model to share.
        tokenizer: with ``encode`` and ``decode``, or the folder of one; default: the checkpoint's,
            where it has one.
        on_progress: called with a line of text as loading goes on.
        chunk_policy: how long prompt chunks are; default: as long as the token budget allows.
        kv_fill: initial value of the KV pools (tests fill them with NaN).
        stop_callback: a rule of stopping of your own, as `MTPSampler` takes it: called once a step
            with ids of requests, whose tokens :meth:`find_request` has. Where it answers with ids
            alone, the text depends on how many drafts were accepted, hence on K; a mapping of ids
            to the tokens of the output to keep is exact. It runs within the step, and may ask this
            object for nothing else.
        options: beside a checkpoint's folder: keys of ``LLMConfig``, as its YAML file has them.

    Raises:
        ConfigError: an option that cannot be, or not on this checkpoint or device; of a YAML file
            with its path in front. A ``stop_callback`` that the plugin does not ask.
        CheckpointError, PluginError: before any weight is loaded.
        MTPPluginError: a tokenizer that does not load.
    """

    def __init__(
        self,
        config: LLMConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        model: LoadedModel | str | Path | None = None,
        tokenizer: Any = None,
        on_progress: Progress | None = None,
        chunk_policy: ChunkPolicy = whole_budget,
        kv_fill: float = 0.0,
        stop_callback: StopCallback | None = None,
        **options: Any,
    ) -> None:
        asked = asked_config(config, model, options, on_progress)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(str(tokenizer))
        try:
            built = build_executor(
                asked.config,
                model=asked.model,
                tokenizer=tokenizer,
                on_progress=on_progress,
                chunk_policy=chunk_policy,
                kv_fill=kv_fill,
            )
        except ConfigError as error:
            if asked.file is not None:
                raise ConfigError(f"{asked.file}: {error}") from error
            raise
        if stop_callback is not None:
            _set_stop_callback(built.pieces, stop_callback)
        self.executor = built.executor
        self.config = built.config
        self.device = built.device
        self.max_seq_len = built.max_seq_len
        self.model = built.model
        self.tokenizer = built.tokenizer
        self.attn_backend = built.attn_backend
        self.pieces = built.pieces
        self.blocks = built.blocks
        self.pools = built.pools
        self.seq_slots = built.seq_slots
        self._admission = Admission(
            built.executor,
            built.model.facts,
            built.pieces,
            tokenizer=built.tokenizer,
            max_seq_len=built.max_seq_len,
        )
        self._dispatcher = Dispatcher(built.executor)
        self._async_steps = AsyncSteps(self._dispatcher)
        self._thaw: Callable[[], Any] = lambda: None
        if built.device.type == "cuda":
            self._thaw = collector_freeze.of_process.hold(self)
        if on_progress is not None:
            on_progress("ready")

    # ---- use --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs come in the prompts' order.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
        """
        requests = self._admission.make_batch(prompts, sampling_params)
        for _ in self._run(requests):
            pass
        return [RequestOutput.of(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[list[StepEvent]]:
        """The events of every executor step; an event carries 0 to K+1 tokens of one request.

        ``prompt_index`` of an event is its prompt's place among these, from 0; request ids count
        on over the life of the object. Closing the
        iterator cancels what is unfinished and gives its resources back. Other calls may run
        between two steps; what they make this one's requests gain comes with its next steps.
        """
        return self._run(self._admission.make_batch(prompts, sampling_params))

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StepEvent]:
        """The events of one request; many may run at a time and share the batch.

        Leaving the iteration early cancels the request.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
        """
        (request,) = self._admission.make_batch([prompt], sampling_params)
        return self._async_steps.run(request, self)

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The output of one prompt, run beside others; cancelling the task ends its request.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the request ended with an error.
        """
        (request,) = self._admission.make_batch([prompt], sampling_params)
        async for _ in self._async_steps.run(request, self):
            pass
        return RequestOutput.of_success(request)

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestHandle:
        """Hand one prompt in, to be read, waited for or ended by its handle.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the executor was shut down.
        """
        (request,) = self._admission.make_batch([prompt], sampling_params)
        return RequestHandle(request, self._dispatcher, self._async_steps, self)

    def abort(self, request_id: int) -> bool:
        """End a request of any call, from any thread; never waits.

        Its last event or output says ``cancelled``, and its resources come back, with the next
        step. False: nothing of that id runs or waits.
        """
        return self._dispatcher.cancel_id(request_id)

    def shutdown(self) -> None:
        """Cancel everything and give every resource back, with the memory of KV cache and graphs;
        who waits for a request gets an error."""
        self._dispatcher.shutdown()
        self._thaw()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        # a step that runs is waited for, and the event loop goes on
        await asyncio.to_thread(self.shutdown)

    # ---- requests ---------------------------------------------------------------------------

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """A request that passed admission, not yet enqueued.

        Raises:
            RequestError: naming every reason.
        """
        return self._admission.make_request(prompt, params)

    def find_request(self, request_id: int) -> LlmRequest | None:
        """The request of that id while it runs or waits; None: there is none, or it has ended."""
        return self.executor.find(request_id)

    def make_requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Requests that passed admission and fit, not yet enqueued.

        Raises:
            RequestError: naming every reason, and among several the prompt's place.
        """
        return self._admission.make_requests(prompts, params)

    def _run(self, requests: list[LlmRequest]) -> Iterator[list[StepEvent]]:
        arrived: deque[StepResults] = deque()
        self._dispatcher.start(requests, arrived.append)
        try:
            while self._dispatcher.holds(requests) or arrived:
                if arrived:
                    yield events_of(arrived.popleft())
                else:
                    self._dispatcher.advance()
        finally:
            self._dispatcher.abort(requests)


def _set_stop_callback(pieces: SpeculativePieces, stop_callback: StopCallback) -> None:
    if pieces.set_stop_callback is None:
        raise ConfigError(
            f"stop_callback: expected None, the plugin's {type(pieces.sampler).__name__} asks none"
        )
    pieces.set_stop_callback(stop_callback)

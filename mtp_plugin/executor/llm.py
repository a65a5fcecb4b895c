"""The Python API: a model, a config, and prompts in; text, steps or a stream out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError, RequestError, expect_int, format_value
from mtp_plugin.executor import gc_freeze
from mtp_plugin.executor.admission import Admission
from mtp_plugin.executor.asked_config import asked_config, asked_tokenizer
from mtp_plugin.executor.async_steps import AsyncEventStream, AsyncSteps, is_in_a_loop
from mtp_plugin.executor.build import BuiltExecutor, build_executor
from mtp_plugin.executor.dispatcher import Dispatcher
from mtp_plugin.executor.event_stream import EventStream
from mtp_plugin.executor.handle import RequestHandle
from mtp_plugin.executor.models import LoadedModel
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.pending_request import PendingRequest
from mtp_plugin.executor.progress import Progress, batch_progress, loading_progress
from mtp_plugin.executor.request import LlmRequest
from mtp_plugin.executor.scheduler import ChunkPolicy, whole_budget
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.prompts import Prompt, params_of
from mtp_plugin.requests.stop_callback import StopCallback
from mtp_plugin.speculative.plugin import SpeculativePieces


class LLM:
    """An embedded executor around one checkpoint.

    ``LLM("checkpoint")`` or ``LLM(model="checkpoint", max_batch_size=4)`` take a checkpoint's
    folder; without ``speculative_config`` beside it, drafts come of its MTP layers where it has
    some (`config_of_checkpoint`), and one line says so. ``speculative_config=None``: no drafts.

    Args:
        config: a checkpoint's folder, the path of a YAML file, a mapping with the keys of
            ``LLMConfig``, or one.
        model: a checkpoint's folder, before that of a config; or an already loaded model to share
            with other executors. Its attention is theirs until the last :meth:`shutdown`.
        tokenizer: with ``encode`` and ``decode``, or the folder of one; default: the checkpoint's,
            where it has one. One thread at a time calls ``encode``, and the one that steps
            ``decode``; within them, as within a signal's handler, prompts may be token ids.
        on_progress: called with a line of text as loading goes on; None: standard error shows it
            where it is a terminal.
        chunk_policy: how long prompt chunks are; default: as long as the token budget allows.
        kv_fill: initial value of the KV pools (tests fill them with NaN).
        stop_callback: a rule of stopping of your own, as `MTPSampler` takes it: called once a step
            with ids of requests, whose tokens :meth:`find_request` has. Where it answers with ids
            alone, the text depends on how many drafts were accepted, hence on K; a mapping of ids
            to the tokens of the output to keep is exact. It runs within the step, where nothing
            can wait for another one: of this object it may use :meth:`find_request`,
            :meth:`submit`, :meth:`abort` and :meth:`shutdown`.
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
        tokenizer = asked_tokenizer(tokenizer)
        built: BuiltExecutor | None = None
        self._thaw: Callable[[], Any] = lambda: None
        try:
            try:
                with loading_progress(on_progress) as tell:
                    built = build_executor(
                        asked.config,
                        model=asked.model,
                        tokenizer=tokenizer,
                        on_progress=tell,
                        chunk_policy=chunk_policy,
                        kv_fill=kv_fill,
                    )
            except ConfigError as error:
                if asked.file is not None:
                    raise ConfigError(f"{asked.file}: {error}") from error
                raise
            if stop_callback is not None:
                _set_stop_callback(built.pieces, stop_callback)
            self._set_up(built)
            if on_progress is not None:
                on_progress("ready")
        except BaseException:
            # the model may be shared: release its attention, and all memory with it
            if built is not None:
                built.executor.shutdown()
            self._thaw()
            raise

    def _set_up(self, built: BuiltExecutor) -> None:
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
        self._dispatcher = dispatcher = Dispatcher(built.executor)
        self._admission = Admission(
            built.executor,
            built.model.facts,
            built.pieces,
            tokenizer=built.tokenizer,
            max_seq_len=built.max_seq_len,
            is_stepping_here=lambda: dispatcher.is_stepping_here,
        )
        self._async_steps = AsyncSteps(self._dispatcher)
        if built.device.type == "cuda":
            self._thaw = gc_freeze.of_process.hold(self)

    # ---- use --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs come in the prompts' order.

        Args:
            use_tqdm: for several prompts, show on standard error how many have ended; where that
                is no terminal, nothing is shown.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the executor was shut down, or a step runs in this thread.
        """
        self._dispatcher.expect_to_wait()
        requests = self._admission.make_batch(prompts, sampling_params)
        with batch_progress(len(requests), use_tqdm) as tell:
            for events in self._run(requests):
                tell(events)
        return [RequestOutput.of(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> EventStream:
        """The events of every executor step; an event carries 0 to K+1 tokens of one request.

        ``prompt_index`` of an event is its prompt's place among these, from 0; request ids count
        on over the life of the object. Closing the iterator cancels what is unfinished and gives
        its resources back, and so does letting go of it. Other calls may run between two steps;
        what they make this one's requests gain comes with its next steps.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: of the iterator: the executor was shut down, or a step runs in this
                thread.
        """
        return self._run(self._admission.make_batch(prompts, sampling_params))

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncEventStream:
        """The events of one request; many may run at a time and share the batch.

        Leaving the iteration early cancels the request. Texts are tokenised in a thread once the
        iteration starts; what can be refused before is refused here.

        Raises:
            RequestError: a prompt or option that cannot be served, of the iterator too; nothing
                was started.
            ExecutorError: of the iterator: the executor was shut down, or a step runs in this
                thread.
        """
        pending = self._admission.ask(prompt, sampling_params)
        return AsyncEventStream(pending, self._async_steps, self)

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The output of one prompt, run beside others; cancelling the task ends its request.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the request ended with an error, or a step runs in this thread.
        """
        pending = self._admission.ask(prompt, sampling_params)
        async for _ in self._async_steps.run(pending):
            pass
        return RequestOutput.of_success(pending.now())

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestHandle:
        """Hand one prompt in, to be read, waited for or ended by its handle.

        Where an event loop runs, texts are tokenised in a thread: what only that tells is raised by
        the handle.

        Raises:
            RequestError: a prompt or option that cannot be served; nothing was started.
            ExecutorError: the executor was shut down.
        """
        if is_in_a_loop():
            pending = self._admission.ask(prompt, sampling_params)
        else:
            (request,) = self._admission.make_batch([prompt], sampling_params)
            pending = PendingRequest.of(request)
        return RequestHandle(pending, self._dispatcher, self._async_steps, self)

    def abort(self, request_id: int) -> bool:
        """End a request of any call, from any thread; never waits.

        Its last event or output says ``cancelled``. Its resources come back at once, or at the end
        of a step that runs. False: nothing of that id runs or waits.

        Raises:
            RequestError: what is no id.
        """
        return self._dispatcher.cancel_id(expect_int("request_id", request_id, error=RequestError))

    def shutdown(self) -> None:
        """Cancel everything and give every resource back, with the memory of KV cache and graphs;
        who waits for a request gets an error.

        A step that runs is waited for. Within a step, as a tokenizer, a stop callback or a signal's
        handler may call it, it takes place at that step's end.
        """
        self._dispatcher.shutdown()
        self._thaw()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._dispatcher.is_stepping_here:
            self.shutdown()
        else:
            # a step that runs is waited for, and the event loop goes on
            await asyncio.to_thread(self.shutdown)

    # ---- requests ---------------------------------------------------------------------------

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """A request that passed admission, not yet enqueued.

        Raises:
            RequestError: naming every reason.
        """
        (params,) = params_of(params, 1)
        return self._admission.make_request(prompt, params)

    def find_request(self, request_id: int) -> LlmRequest | None:
        """Return the request of that id while it runs or waits, else None.

        Raises:
            RequestError: what is no id.
        """
        return self.executor.find(expect_int("request_id", request_id, error=RequestError))

    def make_requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Requests that passed admission and fit, not yet enqueued.

        Raises:
            RequestError: naming every reason, and among several the prompt's place.
        """
        return self._admission.make_batch(prompts, params)

    def _run(self, requests: list[LlmRequest]) -> EventStream:
        return EventStream(requests, self._dispatcher, self)


def _set_stop_callback(pieces: SpeculativePieces, stop_callback: StopCallback) -> None:
    if pieces.set_stop_callback is None:
        raise ConfigError(
            f"stop_callback: expected None, the plugin's {type(pieces.sampler).__name__} asks none"
        )
    if not callable(stop_callback):
        raise ConfigError(f"stop_callback: expected a function, got {format_value(stop_callback)}")
    pieces.set_stop_callback(stop_callback)

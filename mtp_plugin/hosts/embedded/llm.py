"""The Python API of the embedded executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError, RequestError, expect_int, format_value
from mtp_plugin.hosts.embedded import gc_freeze
from mtp_plugin.hosts.embedded.admission import Admission
from mtp_plugin.hosts.embedded.build import BuiltExecutor, build_executor
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.hosts.embedded.chat import Message, conversations_of, render_chat
from mtp_plugin.hosts.embedded.engine import EXIT_SECONDS, Engine
from mtp_plugin.hosts.embedded.foreign_names import OF_LLM, counterpart
from mtp_plugin.hosts.embedded.handle import (
    AsyncEventStream,
    GenerationHandle,
    RequestHandle,
)
from mtp_plugin.hosts.embedded.metrics import PREFIX, Metric, read_metrics
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.hosts.embedded.outputs import RequestOutput
from mtp_plugin.hosts.embedded.progress import Progress, batch_progress, loading_progress
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.requested_config import (
    load_requested_tokenizer,
    read_requested_config,
)
from mtp_plugin.hosts.embedded.scheduler import ChunkPolicy, whole_budget
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.prompts import Prompt, is_one_prompt, params_of
from mtp_plugin.requests.stop_callback import StopCallback
from mtp_plugin.speculative.plugin import SpeculativePieces


class LLM:
    """Loads one checkpoint and generates text with the embedded executor.

    ``LLM("checkpoint")`` and ``LLM(model="checkpoint", max_batch_size=4)`` take a checkpoint's
    folder. Without ``speculative_config``, the checkpoint's MTP layers draft if it has any, and
    without ``cuda_graph_config`` steps run in CUDA graphs on a GPU (see `config_of_checkpoint`); a
    line reports each choice, and None disables either.

    One thread runs all steps; every method may be called from any thread. The thread ends, and all
    memory is freed, with :meth:`shutdown` or when the last reference to the object is dropped.

    Args:
        config: a checkpoint's folder, the path of a YAML file, a mapping with the keys of
            ``LLMConfig``, or an ``LLMConfig``.
        model: a checkpoint's folder, which overrides that of the config; or a loaded model to share
            with other executors. Its attention modules stay replaced until the last
            :meth:`shutdown`.
        tokenizer: an object with ``encode`` and ``decode``, or the folder of a tokenizer; default:
            the checkpoint's tokenizer, if any. One thread at a time calls ``encode``; the engine
            thread, and readers of ``decoded_token``, call ``decode``. Within these methods,
            prompts must be token ids.
        on_progress: called with lines of text during loading; None: progress is shown on standard
            error if that is a terminal.
        chunk_policy: chooses the length of prompt chunks; default: the remaining token budget.
        kv_fill: initial value of the KV pools (tests fill them with NaN).
        stop_callback: your own stop rule, as `MTPSampler` takes it: called once per step with
            request ids, whose tokens :meth:`find_request` returns. If it returns only ids, the
            output depends on how many drafts were accepted, hence on K; a mapping of ids to the
            number of output tokens to keep is exact. It runs in the engine thread and must not
            wait for another step: it may call :meth:`find_request`, :meth:`submit`, :meth:`abort`
            and :meth:`shutdown`.
        options: keys of ``LLMConfig``, as in a YAML file; only with a checkpoint's folder.

    Raises:
        ConfigError: an option is invalid, or not supported by this checkpoint or device; errors of
            a YAML file start with its path. A ``stop_callback`` that the plugin does not support.
        CheckpointError, PluginError: raised before any weight is loaded.
        MTPPluginError: the tokenizer cannot be loaded.
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
        requested = read_requested_config(config, model, options, on_progress)
        tokenizer = load_requested_tokenizer(tokenizer)
        # the model may be shared: an error restores its attention modules and frees all memory
        with ExitStack() as undo:
            try:
                with loading_progress(on_progress) as report:
                    built = build_executor(
                        requested.config,
                        model=requested.model,
                        tokenizer=tokenizer,
                        on_progress=report,
                        chunk_policy=chunk_policy,
                        kv_fill=kv_fill,
                    )
            except ConfigError as error:
                if requested.file is None:
                    raise
                raise ConfigError(f"{requested.file}: {error}") from error
            undo.callback(built.executor.shutdown)
            if stop_callback is not None:
                _set_stop_callback(built.pieces, stop_callback)
            self._set_up(built)
            undo.callback(self._thaw)
            if on_progress is not None:
                on_progress("ready")
            undo.pop_all()

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
        self._engine = Engine(built.executor, built.device)
        self._admission = Admission(
            built.executor,
            built.model.facts,
            built.pieces,
            tokenizer=built.tokenizer,
            max_seq_len=built.max_seq_len,
        )
        self._thaw: Callable[[], object] = (
            gc_freeze.of_process.hold(self) if built.device.type == "cuda" else lambda: None
        )

    # ---- use --------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap] # a text is a sequence of texts
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Run prompts to completion; return the output of one, or a list in the order of several.

        Args:
            use_tqdm: for several prompts, show a progress bar on standard error if that is a
                terminal.

        Raises:
            RequestError: a prompt or option cannot be served; nothing was started.
            ExecutorError: the executor was shut down, or this is the engine thread.
        """
        self._engine.check_can_wait()
        requests = self._admission.make_requests(prompts, sampling_params)
        with batch_progress(len(requests), use_tqdm) as report:
            call = Call.of(requests, report)
            try:
                if requests:
                    self._engine.submit(call)
                    call.result()
            except BaseException:
                self._engine.drop(call)
                raise
        samples = groupby(requests, key=lambda request: request.prompt_index)
        outputs = [RequestOutput.of(*of_prompt) for _, of_prompt in samples]
        return outputs[0] if is_one_prompt(prompts) else outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Render one conversation, or several, and run them to completion.

        Args:
            messages: mappings with ``role`` and ``content``, or a list of such lists.
            template_options: see :meth:`apply_chat_template`.

        Raises:
            RequestError: see :meth:`apply_chat_template` and :meth:`generate`.
        """
        conversations = conversations_of(messages)
        texts = [self.apply_chat_template(one, **template_options) for one in conversations]
        params = params_of(sampling_params, len(texts))
        # the template writes the special tokens
        params = [replace(own, add_special_tokens=False) for own in params]
        return self.generate(texts, params, use_tqdm)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation; submit it with ``add_special_tokens=False``.

        Args:
            chat_template: a Jinja template; None: the tokenizer's.
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: leave the last message open, so that it is continued; needs
                ``add_generation_prompt=False``.
            tools: tool definitions for the template.
            chat_template_kwargs: further variables of the template.

        Raises:
            RequestError: the checkpoint has no chat template, or it raises an error.
        """
        return render_chat(
            self.tokenizer,
            messages,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None."""
        return self.tokenizer

    def get_metrics(self, prefix: str = PREFIX) -> list[Metric]:
        """Return counters and gauges of the executor; see `read_metrics`."""
        return read_metrics(self.executor, prefix)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[list[StepEvent]]:
        """Iterate over the events of every step; an event has 0 to K+1 tokens of one request.

        ``prompt_index`` of an event is the index of its prompt in ``prompts``; request ids
        increase over the life of the object. The requests start with the first ``next()``; closing
        or dropping the iterator, a generator, aborts unfinished ones and frees their resources.

        Raises:
            RequestError: a prompt or option cannot be served; nothing was started.
            ExecutorError: from the iterator: the executor was shut down, or this is the engine
                thread.
        """
        requests = self._admission.make_requests(prompts, sampling_params)
        return self._read(Call.of(requests))

    def _read(self, call: Call) -> Iterator[list[StepEvent]]:
        self._engine.check_can_wait()
        self._engine.submit(call)
        try:
            while steps := call.wait():
                for _, events in steps:
                    yield events
                    self._engine.check_can_wait()  # the next step may be requested within one
        finally:
            # not longer: the garbage collector may run this in a thread that the step waits for
            wait([self._engine.drop(call)], EXIT_SECONDS)

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncEventStream:
        """Iterate asynchronously over the events of one request; concurrent calls share the batch.

        Leaving the iteration early cancels the request, which starts with the iteration. The
        prompt is tokenised in a thread; checks that need no tokenizer are made here.

        Raises:
            RequestError, ExecutorError: see :meth:`stream`; of the tokenizer: from the iterator.
        """
        call = self._admission.make_call(prompt, sampling_params, in_thread=True)
        return AsyncEventStream(call.request_ids, self._read_async(call))

    async def _read_async(self, call: Call) -> AsyncGenerator[StepEvent, None]:
        self._engine.check_can_wait()
        self._engine.submit(call)
        call.is_abandoned = asyncio.get_running_loop().is_closed
        try:
            while steps := await call.wait_async(0):
                del call.steps[: len(steps)]
                for _, events in steps:
                    for event in events:
                        yield event
        finally:
            await asyncio.wrap_future(self._engine.drop(call))

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
    ) -> GenerationHandle:
        """Submit one prompt and return a handle to ``await``; concurrent calls share the batch.

        The handle is also a coroutine, for ``asyncio.run`` and ``create_task``; a cancelled task
        cancels its request.

        Args:
            streaming: ``async for`` over the handle yields partial outputs, not the final one only.

        Raises:
            RequestError, ExecutorError: see :meth:`submit`.
        """
        call = self._admission.make_call(prompt, sampling_params, in_thread=_is_in_event_loop())
        return GenerationHandle(call, self._engine, self, streaming=streaming)

    if not TYPE_CHECKING:  # a checker reports unknown names itself

        def __getattr__(self, name: str) -> Any:
            """Name the counterpart of an attribute of vLLM's and TensorRT-LLM's ``LLM``."""
            kind = type(self).__name__
            hint = counterpart(name, OF_LLM)
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}")

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestHandle:
        """Submit one prompt and return a handle to read, wait for or abort the request.

        In a running event loop the prompt is tokenised in a thread; the handle raises the errors of
        that.

        Raises:
            RequestError: a prompt or option cannot be served; nothing was started.
            ExecutorError: the executor was shut down.
        """
        call = self._admission.make_call(prompt, sampling_params, in_thread=_is_in_event_loop())
        return RequestHandle(call, self._engine, self)

    def abort(self, request_id: int) -> bool:
        """Cancel a request of any call, from any thread, without waiting.

        The reason of its last event is ``cancelled``, that of its output ``abort``. Its resources
        are freed when a running step ends. Returns False if no unfinished request has this id.

        Raises:
            RequestError: ``request_id`` is not an integer.
        """
        return self._engine.abort(expect_int("request_id", request_id, error=RequestError))

    def capture_when_idle(self) -> None:
        """Capture pending CUDA graphs while no request runs, not only in steps that need them.

        For a process in which no other thread uses the device: if one waits for the device during
        a capture (``torch.cuda.synchronize``), CUDA fails both. ``mtp-plugin serve`` calls it.
        """
        self._engine.captures_when_idle = True
        self._engine.wake()

    def shutdown(self) -> None:
        """End all requests with an error and free all memory of the KV cache and CUDA graphs.

        Waits for a running step. In the engine thread (called by a tokenizer or a stop callback)
        the shutdown happens when the step ends.
        """
        self._engine.shutdown()
        self._thaw()

    @property
    def is_running(self) -> bool:
        """Whether requests can be submitted: neither shut down nor failed."""
        return self._engine.is_running

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._engine.is_current_thread:
            self.shutdown()
        else:
            # wait for a running step without blocking the event loop
            await asyncio.to_thread(self.shutdown)

    # ---- requests ---------------------------------------------------------------------------

    def make_request(self, prompt: Prompt, params: SamplingParams) -> LlmRequest:
        """:meth:`make_requests` for one prompt; ``n`` must be 1."""
        (params,) = params_of(params, 1)
        if params.n > 1:
            raise RequestError(f"n={params.n}: expected 1 for one request")
        (request,) = self.make_requests([prompt], [params])
        return request

    def find_request(self, request_id: int) -> LlmRequest | None:
        """Return the unfinished request of that id, else None.

        Raises:
            RequestError: ``request_id`` is not an integer.
        """
        return self.executor.find(expect_int("request_id", request_id, error=RequestError))

    def make_requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[LlmRequest]:
        """Make requests without enqueueing them; see `Admission.make_requests`."""
        return self._admission.make_requests(prompts, params)


def _is_in_event_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _set_stop_callback(pieces: SpeculativePieces, stop_callback: StopCallback) -> None:
    if pieces.set_stop_callback is None:
        raise ConfigError(
            f"stop_callback: expected None, the plugin's {type(pieces.sampler).__name__} calls none"
        )
    if not callable(stop_callback):
        raise ConfigError(f"stop_callback: expected a function, got {format_value(stop_callback)}")
    pieces.set_stop_callback(stop_callback)

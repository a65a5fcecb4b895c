"""The embedded executor under the names of Megatron's inference context and wrapped model."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import Self

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import (
    ConfigError,
    ExecutorError,
    RequestError,
    expect,
    expect_int,
    format_value,
)
from mtp_plugin.hosts.embedded.admission import Admission
from mtp_plugin.hosts.embedded.build import BuiltExecutor, build_executor
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.hosts.embedded.model_engine import ModelEngine
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.requested_config import read_requested_config
from mtp_plugin.hosts.embedded.row_table import StepShape
from mtp_plugin.hosts.embedded.scheduler import ScheduledRequests, whole_budget
from mtp_plugin.hosts.megatron.sampling_params import expect_flag, range_problems
from mtp_plugin.hosts.megatron.snapshot import Snapshot
from mtp_plugin.requests import options
from mtp_plugin.requests.options.option import is_int, plain
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.requests.tokenizer import encode

DEFAULT_SAMPLING_SEED = 42
"""Default of Megatron's ``inference_sampling_seed``."""
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class StepRecord:
    """One step of the executor."""

    batch: ScheduledRequests
    events: list[StepEvent]
    graph_size: int | None
    """Number of requests of the CUDA graph that was replayed, with padding; None: the step ran
    eagerly."""


class InferenceContext:
    """The requests of an embedded executor.

    It has `add_request`, `has_unfinished_requests`, `reset` and the counts of Megatron's dynamic
    context, and nothing else of it. A request that is paused because KV blocks are short starts
    over when there is room; its prompt and output are prefilled again.
    """

    def __init__(
        self, built: BuiltExecutor, sampling_seed: int, first_chunks: dict[int, int]
    ) -> None:
        self.built = built
        self.sampling_seed = sampling_seed
        self.default_termination_id: int | None = None
        """Ends requests without ``termination_id``; set by the controller."""
        self.max_requests = built.config.max_batch_size
        self.max_tokens = built.config.max_num_tokens
        self.max_sequence_length = built.max_seq_len
        self.block_size_tokens = built.blocks.block_size
        self.num_speculative_tokens = built.pieces.plan.max_draft_len
        self._executor = built.executor
        self._admission = Admission(
            built.executor,
            built.model.facts,
            built.pieces,
            tokenizer=None,
            max_seq_len=built.max_seq_len,
        )
        self._first_chunks = first_chunks
        self._requests: dict[int, Any] = {}  # by the id in the executor
        self._ids: dict[int | str, LlmRequest] = {}  # by the caller's id
        self.lacks_bookkeeping = False
        """Whether the newest step was undone, see `undo_step`."""

    def is_dynamic_batching(self) -> bool:
        """True: requests may be added between two steps."""
        return True

    # ---- requests ---------------------------------------------------------------------------

    def add_request(self, request: Any, prefill_chunk_length: int | None = None) -> None:
        """Add a request, of any class with the fields of Megatron's requests.

        Args:
            prefill_chunk_length: length of the first chunk of the prompt; None: as much as fits.

        Raises:
            RequestError: the request is not valid, its id is in use, or it can never run here.
        """
        request_id: Any = getattr(request, "request_id", None)
        expect(
            isinstance(request_id, int) and not isinstance(request_id, bool),
            RequestError,
            f"add_request: expected a request with an integer request_id, got "
            f"{format_value(request)}",
        )
        # the ids of a step are an int64 tensor
        expect_int("request_id", request_id, -(2**63), 2**63 - 1, error=RequestError)
        expect(
            request_id not in self._ids,
            RequestError,
            f"request {request_id}: the id is in use; expected the id of no unfinished request",
        )
        params: Any = getattr(request, "sampling_params", None)
        check_params(request_id, params)
        prompt = prompt_tokens_of(request, request_id)
        if getattr(params, "stop_words", None):
            raise RequestError(
                f"request {request_id}: stop_words: expected None in a dynamic batch; compare "
                "tokens in set_stop_word_finished_ids_callback(), as Megatron's engine does"
            )
        if params.top_n_logprobs and not params.return_log_probs:
            raise RequestError(
                f"request {request_id}: top_n_logprobs: expected return_log_probs=True with it in "
                f"a dynamic batch"
            )
        if prefill_chunk_length is not None and (
            not isinstance(prefill_chunk_length, int)
            or not 1 <= prefill_chunk_length <= len(prompt)
        ):
            raise RequestError(
                f"request {request_id}: prefill_chunk_length: expected 1 to {len(prompt)}, the "
                f"length of the prompt, got {format_value(prefill_chunk_length)}"
            )
        own = _options_of(request_id, params, len(prompt), self)
        llm_request = self._enqueue(request_id, request, prompt, own)
        if prefill_chunk_length is not None:
            self._first_chunks[llm_request.request_id] = prefill_chunk_length

    def add_static_request(self, key: int | str, request: Any) -> LlmRequest:
        """Add a request of a static batch.

        Args:
            key: its id in the batch.

        Raises:
            RequestError: the request is not valid, or can never run here.
        """
        expect(
            isinstance(key, (int, str)),
            RequestError,
            f"active_requests: expected ids that are integers or texts, got {format_value(key)}",
        )
        params = getattr(request, "sampling_params", None)
        check_params(key, params, is_static=True)
        prompt = prompt_tokens_of(request, key)
        return self._enqueue(
            key, request, prompt, _options_of(key, params, len(prompt), self, is_static=True)
        )

    def _enqueue(
        self,
        request_id: int | str,
        request: Any,
        prompt: list[int],
        own: options.SamplingParams,
    ) -> LlmRequest:
        try:
            (made,) = self._admission.make_requests([prompt], own)
        except RequestError as error:
            why = str(error).split(": ", 1)[-1]
            raise RequestError(f"request {request_id}: {why}") from error
        self._executor.enqueue(made)
        self._requests[made.request_id] = request
        self._ids[request_id] = made
        return made

    def has_unfinished_requests(self) -> bool:
        """Whether a request has not finished."""
        return bool(self._ids)

    @property
    def total_request_count(self) -> int:
        """Number of unfinished requests."""
        return len(self._ids)

    @property
    def paused_request_count(self) -> int:
        """Number of requests that wait for KV blocks after they were preempted."""
        waiting = self._executor.scheduler.waiting
        return sum(request.num_preemptions > 0 for request in waiting)

    def get_active_request_count(self) -> int:
        """Return the number of requests that are not paused."""
        return self.total_request_count - self.paused_request_count

    def reset(self) -> None:
        """Drop all requests and free their resources."""
        for llm_request in self._ids.values():
            self._executor.cancel(llm_request.request_id)
        self._executor.end_cancelled()
        self._forget()

    def active_requests(self) -> list[Any]:
        """Return the unfinished requests in the order in which they were added."""
        return list(self._requests.values())

    def unpaused_requests(self) -> list[Any]:
        """Return the unfinished requests that are not paused."""
        waiting = self._executor.scheduler.waiting
        paused = {request.request_id for request in waiting if request.num_preemptions > 0}
        return [each for number, each in self._requests.items() if number not in paused]

    def request_of(self, llm_request_id: int) -> Any:
        """Return the caller's request of an id in the executor."""
        return self._requests[llm_request_id]

    def llm_request_of(self, request_id: int) -> LlmRequest:
        """Return the executor's request of the caller's id."""
        return self._ids[request_id]

    def finish(self, request_ids: Sequence[int | str]) -> None:
        """End unfinished requests and free their resources."""
        for request_id in request_ids:
            self._executor.cancel(self._ids[request_id].request_id)
        self._executor.end_cancelled()

    def forget_finished(self) -> None:
        """Forget the requests that the executor has finished."""
        gone = [
            request_id
            for request_id, llm_request in self._ids.items()
            if self._executor.find(llm_request.request_id) is None
        ]
        for request_id in gone:
            llm_request_id = self._ids.pop(request_id).request_id
            del self._requests[llm_request_id]
            self._first_chunks.pop(llm_request_id, None)

    def _forget(self) -> None:
        self.lacks_bookkeeping = False
        self._ids.clear()
        self._requests.clear()
        self._first_chunks.clear()

    # ---- steps ------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Run one step of the executor.

        Raises:
            Exception: an error of the step; all requests were dropped.
        """
        scheduler, captured = self._executor.scheduler, self._executor.engine.captured
        replays = 0 if captured is None else captured.num_replays
        self.lacks_bookkeeping = False
        # the executor returns events only; decode steps and paused requests are in the batch
        batches: list[ScheduledRequests] = []
        schedule = scheduler.schedule

        def recorded(in_flight: set[int]) -> ScheduledRequests:
            batches.append(schedule(in_flight))
            return batches[-1]

        scheduler.schedule = recorded  # type: ignore[method-assign]
        try:
            events = self._executor.step()
        except BaseException:
            self._forget()
            raise
        finally:
            del scheduler.schedule
        graph_size = None
        if captured is not None and captured.num_replays > replays:
            shape = cast(StepShape, captured.last_replayed)
            graph_size = shape.num_contexts + shape.num_generations
        return StepRecord(batches[-1], events, graph_size)

    def snapshot(self) -> Snapshot:
        """Save requests, slots, block tables and the sampler's store, without the KV cache.

        A step writes only KV rows after the last token, which the next step overwrites.
        """
        return Snapshot(self._executor, (nn.Module, ModelEngine, PagedKVPools))

    def undo_step(self, snapshot: Snapshot) -> None:
        """Restore the state before the newest step; the next one generates the same tokens."""
        snapshot.restore()
        self.lacks_bookkeeping = True

    @torch.inference_mode()
    def dummy_step(self, *, with_target: bool = True) -> None:
        """Run target, verification and K draft passes on one padding row, which reads and writes
        sentinel rows only.

        Args:
            with_target: False: the drafts start from hidden states of zeros.
        """
        engine = self._executor.engine
        states = None
        if not with_target:
            weight = cast(torch.Tensor, self.built.model.lm_head.weight)
            sizes = self.num_speculative_tokens + 1, self.built.model.facts.hidden_size
            states = torch.zeros(sizes, dtype=weight.dtype, device=engine.device)
        step = engine.make_table().upload([engine.padding_row()])
        shape = StepShape((), 1, self.num_speculative_tokens)
        engine.launch(shape, step, None, hidden_states=states)

    def shutdown(self) -> None:
        """Drop all requests and free the memory of the executor."""
        self._executor.shutdown()
        self._forget()


class InferenceWrappedModel:
    """A checkpoint in the embedded executor, in place of Megatron's ``GPTInferenceWrapper``."""

    def __init__(self, built: BuiltExecutor, context: InferenceContext) -> None:
        self.model = built.model
        self.inference_context = context
        self.tokenizer = None if built.tokenizer is None else CheckpointTokenizer(built)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: LLMConfig | Mapping[str, Any] | None = None,
        *,
        inference_sampling_seed: int = DEFAULT_SAMPLING_SEED,
    ) -> Self:
        """Load a checkpoint's folder; ``config`` has the keys of ``LLMConfig``.

        The overlap scheduler is always off.

        Raises:
            ConfigError, CheckpointError: see `mtp_plugin.hosts.embedded.LLM`.
        """
        if isinstance(inference_sampling_seed, bool) or not isinstance(
            inference_sampling_seed, int
        ):
            raise ConfigError(
                f"inference_sampling_seed: expected an integer, got "
                f"{format_value(inference_sampling_seed)}"
            )
        if isinstance(config, LLMConfig):
            given = {name: getattr(config, name) for name in config.model_fields_set}
            given.pop("model", None)
        elif config is None or isinstance(config, Mapping):
            given = dict(config or {})
        else:
            raise ConfigError(
                f"config: expected a mapping with the keys of LLMConfig, got {format_value(config)}"
            )
        if "model" in given:
            raise ConfigError(
                f"config: expected no model next to the path {path}, got "
                f"{format_value(given['model'])}"
            )
        if given.get("disable_overlap_scheduler", True) is not True:
            raise ConfigError(
                "disable_overlap_scheduler: expected True, since a step returns its tokens, got "
                f"{format_value(given['disable_overlap_scheduler'])}"
            )
        given["disable_overlap_scheduler"] = True
        requested = read_requested_config(str(path), None, given, None)
        first_chunks: dict[int, int] = {}

        def chunk_length(request: LlmRequest, limit: int) -> int:
            length = min(request.context_remaining_length, limit)
            if request.context_current_position == 0 and request.num_preemptions == 0:
                length = min(length, first_chunks.get(request.request_id, length))
            return length

        is_chunked = requested.config.enable_chunked_prefill
        built = build_executor(
            requested.config, chunk_policy=chunk_length if is_chunked else whole_budget
        )
        return cls(built, InferenceContext(built, inference_sampling_seed, first_chunks))

    def prep_inference_input(self, prompts_tokens: torch.Tensor) -> dict[str, Any]:
        """Return the tokens [B, S] and their positions; attention needs no mask."""
        positions = torch.arange(prompts_tokens.shape[1], device=prompts_tokens.device)
        return {
            "tokens": prompts_tokens,
            "attention_mask": None,
            "position_ids": positions.unsqueeze(0).expand_as(prompts_tokens),
        }


class CheckpointTokenizer:
    """A checkpoint's tokenizer with the methods that Megatron calls."""

    def __init__(self, built: BuiltExecutor) -> None:
        self._tokenizer = built.tokenizer
        self.vocab_size = built.model.facts.vocab_size
        ends = built.model.facts.eos_token_ids
        self.eod = ends[0] if ends else None
        self.bos = getattr(built.tokenizer, "bos_token_id", None)

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens of the tokenizer's own."""
        return encode(self._tokenizer, text, add_special_tokens=False)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the index in ``text`` at which the text of each token begins."""
        return [min(len(self.detokenize(ids[:count])), len(text)) for count in range(len(ids))]


_RANGED = ("num_tokens_to_generate", "num_tokens_total", "top_k", "top_p", "top_n_logprobs")
_FLAGS = ("return_log_probs", "skip_prompt_log_probs", "return_segments")


def check_params(request_id: int | str, params: Any, *, is_static: bool = False) -> None:
    """Check the types and ranges of sampling parameters.

    Raises:
        RequestError: lists those that are missing or wrong, or names the first wrong flag.
    """
    of_request = f"request {request_id}: "
    top_k = plain(getattr(params, "top_k", None))
    is_greedy = is_int(top_k) and top_k == 1  # needs no temperature
    ranged = [*_RANGED, *([] if is_greedy else ["temperature"])]
    required = [*ranged, *(_FLAGS if is_static else _FLAGS[:2])]
    expect_fields(f"{of_request}sampling_params", params, required)
    values = {name: plain(getattr(params, name)) for name in ranged}
    count = values["num_tokens_to_generate"]
    if is_static and is_int(count) and count == 0:  # generates one token, which is dropped
        del values["num_tokens_to_generate"]
    problems = range_problems(values, required=("top_n_logprobs",))
    end = plain(getattr(params, "termination_id", None))
    if not (end is None or is_int(end)):
        problems.append(f"termination_id: expected an integer, got {format_value(end)}")
    words = getattr(params, "stop_words", None)
    is_list = isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words)
    if words is not None and not is_list:
        problems.append(f"stop_words: expected a list of texts, got {format_value(words)}")
    if problems:
        raise RequestError(of_request + "; ".join(problems))
    for name in _FLAGS:
        expect_flag(of_request + name, getattr(params, name, None))


def expect_fields(where: str, params: Any, names: Sequence[str]) -> None:
    """Check that parameters, of any class, have these fields.

    Raises:
        RequestError: lists the missing ones.
    """
    expected = f"{where}: expected SamplingParams, got {format_value(params)}"
    expect(params is not None, RequestError, expected)
    missing = [name for name in names if not hasattr(params, name)]
    expect(not missing, RequestError, f"{expected} without {', '.join(missing)}; set them")


def prompt_tokens_of(request: Any, request_id: int | str) -> list[int]:
    """Return the prompt's ids, which may be a list or a tensor.

    Raises:
        RequestError: there are none.
    """
    tokens = getattr(request, "prompt_tokens", None)
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.tolist()
    if not isinstance(tokens, list):
        raise RequestError(
            f"request {request_id}: prompt_tokens: expected a list of token ids, got "
            f"{format_value(tokens)}; tokenize the prompt with tokenize_prompt()"
        )
    return tokens


def request_seed(sampling_seed: int, request_id: int | str) -> int:
    """Return the 64-bit seed of a request, as `install(sampling=True)` keys it.

    Of an id that is a text, which Megatron's static batches may have, the CRC-32 is the id.
    """
    number = (
        zlib.crc32(request_id.encode("utf-8", "replace"))
        if isinstance(request_id, str)
        else request_id
    )
    low, high = seed_words(None, number & _WORD, sampling_seed)
    return (low & _WORD) | (high & _WORD) << 32


def _options_of(
    request_id: int | str,
    params: Any,
    prompt_len: int,
    context: InferenceContext,
    *,
    is_static: bool = False,
) -> options.SamplingParams:
    """Return the executor's options of Megatron's parameters.

    Args:
        is_static: the request of a static batch: too many tokens are refused, not limited, and
            log-probabilities include those of the prompt.

    Raises:
        RequestError: lists every problem.
    """
    problems = []
    if (params.top_k or 0) > 0 and params.top_p:
        problems.append(
            f"expected top_k or top_p, got top_k={format_value(params.top_k)} and "
            f"top_p={format_value(params.top_p)}"
        )
    count = params.num_tokens_to_generate
    if count is not None and params.num_tokens_total is not None:
        problems.append("expected num_tokens_to_generate or num_tokens_total, got both")
    if problems:
        raise RequestError(f"request {request_id}: {'; '.join(problems)}")
    longest = context.max_sequence_length
    room = longest - prompt_len
    if params.num_tokens_total is not None:
        count = params.num_tokens_total - prompt_len
        expect(
            count > 0,
            RequestError,
            f"request {request_id}: num_tokens_total: expected more than the {prompt_len} tokens "
            f"of the prompt, got {params.num_tokens_total}",
        )
    count = max(room, 1) if count is None else count
    if count > room > 0 and is_static:
        raise RequestError(
            f"request {request_id}: expected at most {room} tokens to generate, since the prompt "
            f"has {prompt_len} and the maximum sequence length is {longest}, got {count}; lower "
            "num_tokens_to_generate, or load the model with a larger max_seq_len"
        )
    if count > room > 0:
        warnings.warn(
            f"request {request_id}: num_tokens_to_generate {count} is limited to {room} by the "
            f"maximum sequence length {longest}",
            stacklevel=4,
        )
        count = room
    if is_static and params.num_tokens_to_generate == 0:
        count = 1  # it is dropped
    end = getattr(params, "termination_id", None)
    if is_static and getattr(params, "no_early_termination", False):
        end = -1
    end = context.default_termination_id if end is None else end
    is_scored = params.return_log_probs or params.top_n_logprobs > 0
    num_top = params.top_n_logprobs if is_scored else None
    skips_prompt = params.skip_prompt_log_probs and not (is_static and params.return_log_probs)
    return options.SamplingParams(
        max_new_tokens=count,
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=params.top_k or None,
        top_p=params.top_p or None,
        seed=request_seed(context.sampling_seed, request_id),
        ignore_eos=True,
        stop_token_ids=() if end is None or end < 0 else (end,),
        logprobs=num_top,
        prompt_logprobs=None if skips_prompt else num_top,
    )


def expect_one_executor(context: Any, where: str) -> InferenceContext:
    """Return ``context`` if it belongs to the embedded executor.

    Raises:
        ExecutorError: it is another one, such as Megatron's.
    """
    if not isinstance(context, InferenceContext):
        raise ExecutorError(
            f"{where}: expected InferenceWrappedModel.from_checkpoint(path), got "
            f"{format_value(context)}; install() serves Megatron's own models"
        )
    return context

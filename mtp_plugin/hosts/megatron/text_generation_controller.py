"""Megatron-Core's ``TextGenerationController`` over the embedded executor.

A script written for Megatron's class runs after its import lines and the construction of the model
are changed. Public methods have the names, arguments and results of Megatron-Core 0.19.2; see
`mtp_plugin/hosts/megatron/README.md` for the differences.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
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
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.megatron import mtp_utils_pytorch
from mtp_plugin.hosts.megatron.async_stream import AsyncStream, running_loop
from mtp_plugin.hosts.megatron.embedded_context import (
    DEFAULT_SAMPLING_SEED,
    InferenceWrappedModel,
    StepRecord,
    expect_fields,
    expect_one_executor,
)
from mtp_plugin.hosts.megatron.inference_request import InferenceRequest, Status
from mtp_plugin.hosts.megatron.sampling_params import SamplingParams, expect_flag
from mtp_plugin.hosts.megatron.tensor_functions import (
    Bucket,
    check_truncation,
    make_buckets,
    sample,
    sample_buckets,
)
from mtp_plugin.requests.logprobs import TokenLogprobs
from mtp_plugin.requests.states import FinishReason

__all__ = [
    "AsyncStream",
    "DecodeOnly",
    "DynamicBatchControllerStepResult",
    "InferenceRequest",
    "InferenceWrappedModel",
    "SamplingParams",
    "Status",
    "TextGenerationController",
]

TopNLogprobs = dict[int, list[dict[str, float]]]

_PHASES = (
    "_apply_stop_word_finished_ids",
    "_compute_serial_mtp_and_sample",
    "_prepare_speculative_tokens_for_next_forward_pass",
    "_rewind_kv_cache",
    "_run_legacy_step",
    "_transfer_samples_to_cpu",
)
"""Megatron's phases of a step, in addition to those that begin with `_PHASE`."""
_PHASE = "_dynamic_step_"
_UNCALLED = (
    "pad_input_prompt_tokens",
    "prep_inference_input",
    "sample_from_logits",
    "unpad_input_prompt_tokens",
    "update_generation_status",
    "_dummy_serial_mtp_forward",
    "_get_mtp_num_heads",
    "_get_required_logit_indices",
    "_init_dynamic_sampling_tensors",
    "_init_mtp_sampling_tensor",
    "_init_mtp_sampling_tensors",
    "_router_record_bookkeeping",
    "_run_dummy_serial_mtp_forward",
    "_sample_from_logits_2d",
    "_sample_speculative_logits",
    "_torch_sampling_func",
    "_update_top_n_logprobs_dict",
    "_verify_speculative_tokens",
)
"""Methods that no step calls, but scripts may."""
_COUNTS = ("num_decode_requests", "num_prefill_requests", "active_request_count")
"""Arguments of ``_verify_speculative_tokens``."""
_OLDER_COUNTS = ("request_in_prefill_status_tensor", "repeats", *_COUNTS)


def _is_phase(name: str) -> bool:
    return name in _PHASES or name.startswith(_PHASE)


@dataclass(frozen=True)
class DecodeOnly:
    """Whether the forward passes of a step had no prompts; None: there was no such pass."""

    consumed: bool | None
    launched: bool | None

    def __bool__(self) -> bool:
        if self.consumed is None or self.consumed != self.launched:
            raise ValueError(
                f"decode_only: expected one step, got consumed={self.consumed}, "
                f"launched={self.launched}"
            )
        return self.consumed


@dataclass(frozen=True)
class DynamicBatchControllerStepResult:
    """Result of one step of a dynamic batch; ``result[key]`` reads ``output[key]``."""

    decode_only: DecodeOnly
    output: dict[str, Any] | None = None
    """None: there was no request."""
    primer_only: bool = False

    def __getitem__(self, key: str) -> Any:
        if self.output is None:
            raise KeyError(f"{key}: the step had no requests")
        return self.output[key]


class TextGenerationController:
    """Tokenizes, generates and detokenizes with the embedded executor.

    Args:
        inference_wrapped_model: of `InferenceWrappedModel.from_checkpoint`.
        tokenizer: with ``tokenize``, ``detokenize``, ``eod`` and ``bos``, as Megatron's, and
            ``offsets`` for segments.

    Raises:
        ExecutorError: a wrapped model of Megatron.
        ConfigError: a tokenizer without these methods.
    """

    def __init__(self, inference_wrapped_model: InferenceWrappedModel, tokenizer: Any) -> None:
        context = getattr(inference_wrapped_model, "inference_context", inference_wrapped_model)
        self._context = expect_one_executor(context, "TextGenerationController")
        missing = [
            name
            for name in ("tokenize", "detokenize")
            if not callable(getattr(tokenizer, name, None))
        ]
        expect(
            not missing,
            ConfigError,
            f"tokenizer: expected one with tokenize and detokenize, got {format_value(tokenizer)}",
        )
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer
        self.vocab_size: int = self._context.built.model.facts.vocab_size
        self.sampling_rng = torch.Generator(self._context.built.device)
        self.sampling_rng.manual_seed(self._context.sampling_seed)
        self._torch_sampling_buckets: list[Bucket] | None = None
        """For the functions of tensors; None: those of the unfinished requests."""
        self._context.default_termination_id = getattr(tokenizer, "eod", None)
        self._stop_word_callback: Callable[[list[int]], Collection[int]] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass with methods that Megatron's steps call and steps here do not.

        Raises:
            ConfigError: names the methods.
        """
        super().__init_subclass__(**options)
        added = [base for base in cls.__mro__ if base not in TextGenerationController.__mro__]
        overridden = sorted(
            name
            for name in {name for base in added for name in vars(base)}
            if name in _UNCALLED or _is_phase(name)
        )
        expect(
            not overridden,
            ConfigError,
            f"{cls.__name__}: overrides {', '.join(overridden)}, which no step calls, since the "
            "phases of a step run in one CUDA graph here; use SamplingParams and "
            "set_stop_word_finished_ids_callback(), or Megatron's own controller with "
            "mtp_plugin.hosts.megatron.install()",
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        config: LLMConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        inference_sampling_seed: int = DEFAULT_SAMPLING_SEED,
    ) -> Self:
        """Load a checkpoint's folder.

        Args:
            config: keys of ``LLMConfig``; the overlap scheduler is always off.
            tokenizer: default: the checkpoint's.
            inference_sampling_seed: with the request id and the token index the key of sampling.

        Raises:
            ConfigError: an invalid option, or no tokenizer.
            CheckpointError: the checkpoint cannot be read.
        """
        wrapped = InferenceWrappedModel.from_checkpoint(
            path, config, inference_sampling_seed=inference_sampling_seed
        )
        try:
            tokenizer = wrapped.tokenizer if tokenizer is None else tokenizer
            expect(
                tokenizer is not None,
                ConfigError,
                f"tokenizer: {path} has none; expected one as an argument",
            )
            return cls(wrapped, tokenizer)
        except BaseException:
            wrapped.inference_context.shutdown()
            raise

    def shutdown(self) -> None:
        """Drop all requests and free the memory of the executor."""
        self._context.shutdown()

    @property
    def num_speculative_tokens(self) -> int:
        """The draft length K, which is fixed when the model is loaded."""
        return self._context.num_speculative_tokens

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, value: object) -> None:
        self._expect_draft_len("num_speculative_tokens", value)

    @property
    def num_mtp_depths(self) -> int:
        """The number of draft passes of a step, which is K."""
        return self._context.num_speculative_tokens

    @num_mtp_depths.setter
    def num_mtp_depths(self, value: object) -> None:
        self._expect_draft_len("num_mtp_depths", value)

    def _expect_draft_len(self, name: str, value: object) -> None:
        value = expect_int(name, value, 0, error=ConfigError)
        expect(
            value == self.num_speculative_tokens,
            ConfigError,
            f"{name}: expected {self.num_speculative_tokens}, with which the model was loaded, got "
            f"{value}; load it with speculative_config={{'decoding_type': 'MTP', "
            f"'max_draft_len': {value}}}",
        )

    def __getattr__(self, name: str) -> Any:
        why = ""
        if _is_phase(name):
            why = (
                "; the phases of a step run in one CUDA graph here, use "
                "generate_output_tokens_dynamic_batch()"
            )
        raise AttributeError(f"TextGenerationController has no attribute {name!r}{why}")

    # ---- text -------------------------------------------------------------------------------

    @staticmethod
    def tokenize_prompt(
        tokenizer: Any,
        prompt: str,
        add_BOS: bool = False,  # noqa: N803 - Megatron's name
    ) -> list[int]:
        """Return the ids of a prompt, with exactly one BOS if ``add_BOS``, else none in front.

        Raises:
            RequestError: no text, or ``add_BOS`` with a tokenizer that has no BOS.
        """
        if not isinstance(prompt, str):
            raise RequestError(f"prompt: expected text, got {format_value(prompt)}")
        bos: Any = getattr(tokenizer, "bos", None)
        if add_BOS and bos is None:
            raise RequestError("add_BOS: expected a tokenizer with bos, got one without")
        tokens = list(tokenizer.tokenize(prompt))
        while tokens and tokens[0] == bos:
            tokens.pop(0)
        return [bos, *tokens] if add_BOS else tokens

    @staticmethod
    def detokenize(
        tokenizer: Any,
        tokens: Sequence[int],
        remove_EOD: bool = True,  # noqa: N803 - Megatron's name
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of token ids, without EOD tokens at the end if ``remove_EOD``."""
        tokens = list(tokens)
        eod = getattr(tokenizer, "eod", None)
        while remove_EOD and eod is not None and tokens and tokens[-1] == eod:
            tokens.pop()
        if _takes_special_tokens(tokenizer.detokenize):
            return str(tokenizer.detokenize(tokens, skip_special_tokens=skip_special_tokens))
        return str(tokenizer.detokenize(tokens))

    def detokenize_generations(
        self,
        tokens_gpu_tensor: torch.Tensor,
        lengths_gpu_tensor: torch.Tensor,
        detokenize_segments: bool,
        skip_special_tokens: bool = True,
    ) -> tuple[str, list[list[str]] | None]:
        """Return the text of tokens [S], and its segments, one per token, in a list; else None.

        Args:
            lengths_gpu_tensor: [1] number of tokens that the segments are of.
        """
        tokens = tokens_gpu_tensor.tolist()
        text = self.detokenize(self.tokenizer, tokens, skip_special_tokens=skip_special_tokens)
        if not detokenize_segments:
            return text, None
        segments = []
        for length in torch.as_tensor(lengths_gpu_tensor).reshape(-1).tolist():
            part = tokens[:length]
            whole = self.detokenize(self.tokenizer, part)
            offsets = list(self.tokenizer.offsets(part, whole))
            ends = [*offsets[1:], len(whole)]
            segments.append([whole[start:end] for start, end in zip(offsets, ends, strict=False)])
        return text, segments

    def pad_input_prompt_tokens(
        self,
        batch_prompt_tokens_list: Sequence[Sequence[int]],
        padded_batch_size: int,
        padded_sequence_length: int,
    ) -> torch.Tensor:
        """Return prompts as [padded_batch_size, padded_sequence_length] int64, padded with EOD.

        Raises:
            RequestError: more or longer prompts than that.
        """
        longest = max(map(len, batch_prompt_tokens_list), default=0)
        if len(batch_prompt_tokens_list) > padded_batch_size or longest > padded_sequence_length:
            raise RequestError(
                f"pad_input_prompt_tokens: expected at most {padded_batch_size} prompts of at most "
                f"{padded_sequence_length} tokens, got {len(batch_prompt_tokens_list)} of up to "
                f"{longest}"
            )
        shape = (padded_batch_size, int(padded_sequence_length))
        tokens = torch.full(shape, self.tokenizer.eod, dtype=torch.int64)
        for row, prompt in enumerate(batch_prompt_tokens_list):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
        return tokens.to(self._context.built.device)

    def unpad_input_prompt_tokens(
        self, padded_batch_prompt_tokens: torch.Tensor, original_batch_size: int
    ) -> torch.Tensor:
        """Return the first ``original_batch_size`` rows."""
        return padded_batch_prompt_tokens[:original_batch_size]

    def prep_inference_input(
        self,
        prompts_tokens: torch.Tensor,
        active_requests: OrderedDict[int, InferenceRequest],  # noqa: ARG002
        use_attention_mask: bool = False,
    ) -> dict[str, Any]:
        """Return tokens and positions of prompts [B, S], and a causal mask if it is requested."""
        inputs = self.inference_wrapped_model.prep_inference_input(prompts_tokens)
        if use_attention_mask and inputs["attention_mask"] is None:
            length = prompts_tokens.shape[1]
            ones = torch.ones(1, 1, length, length, device=prompts_tokens.device)
            inputs["attention_mask"] = ones.tril() < 0.5  # True: masked
        return inputs

    # ---- functions of tensors ---------------------------------------------------------------

    def sample_from_logits(
        self,
        last_token_logits: torch.Tensor,
        sampling_params: Any = None,
        vocab_size: int | None = None,
        generation_started: torch.Tensor | None = None,
        top_n_logprobs_dict: TopNLogprobs | None = None,
        logits: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Sample one token per row of logits [B, V], and record top-n log-probabilities.

        Args:
            generation_started: [B] bool: rows that are recorded if prompts are skipped.
            top_n_logprobs_dict: row -> one mapping of texts to log-probabilities per token,
                appended to if ``top_n_logprobs`` > 0.
            logits: [B, S, V] of whole prompts, which are recorded instead of the last token.

        Returns:
            [B] int64.

        Raises:
            RequestError: missing or wrong parameters.
        """
        params = kwargs.pop("common_inference_params", None) or sampling_params
        if kwargs:
            raise RequestError(f"sample_from_logits: unknown arguments {', '.join(kwargs)}")
        expect_fields(
            "sampling_params", params, ("temperature", "top_k", "top_p", "top_n_logprobs")
        )
        check_truncation(params.temperature, params.top_k, params.top_p)
        num_top = expect_int("top_n_logprobs", params.top_n_logprobs, 0, error=RequestError)
        if not isinstance(last_token_logits, torch.Tensor):
            raise RequestError(
                f"last_token_logits: expected a tensor [B, V], got "
                f"{format_value(last_token_logits)}"
            )
        if num_top > 0:
            expect_fields("sampling_params", params, ("skip_prompt_log_probs",))
            expect_flag("skip_prompt_log_probs", params.skip_prompt_log_probs)
            self._record_top_n(
                last_token_logits, params, generation_started, top_n_logprobs_dict, logits
            )
        return self._torch_sampling_func(
            last_token_logits, params.temperature, params.top_k, params.top_p, vocab_size
        )

    def _record_top_n(
        self,
        last_token_logits: torch.Tensor,
        params: Any,
        generation_started: torch.Tensor | None,
        recorded: TopNLogprobs | None,
        logits: torch.Tensor | None,
    ) -> None:
        if generation_started is None or recorded is None:
            raise RequestError(
                "top_n_logprobs: expected generation_started and top_n_logprobs_dict with it"
            )
        everything = torch.ones(last_token_logits.shape[0], dtype=torch.bool)
        if logits is None:
            steps = last_token_logits.unsqueeze(1)
            mask = generation_started.cpu() if params.skip_prompt_log_probs else everything
        elif params.skip_prompt_log_probs:
            raise RequestError("logits: expected None with skip_prompt_log_probs=True")
        else:
            steps, mask = logits, everything
        top = steps.float().log_softmax(-1).topk(params.top_n_logprobs)
        for values, ids in zip(top.values.unbind(1), top.indices.unbind(1), strict=True):
            self._update_top_n_logprobs_dict(values.cpu(), ids.cpu(), mask, recorded)

    def _update_top_n_logprobs_dict(
        self,
        top_n_logprobs_this_step: torch.Tensor,
        top_n_logprobs_indices: torch.Tensor,
        mask: torch.Tensor,
        top_n_logprobs_dict: TopNLogprobs,
    ) -> None:
        """Append one mapping of texts to log-probabilities to every row that ``mask`` selects.

        With values ``[[-0.1, -2.5]]`` of the ids ``[[7, 9]]``, ``{0: []}`` becomes
        ``{0: [{"seven": -0.1, "nine": -2.5}]}``.
        """
        rows = zip(top_n_logprobs_this_step, top_n_logprobs_indices, strict=True)
        for row, (values, ids) in enumerate(rows):
            if mask[row]:
                texts = [self.tokenizer.detokenize([token]) for token in ids.tolist()]
                found = dict(zip(texts, values.tolist(), strict=True))
                top_n_logprobs_dict.setdefault(row, []).append(found)

    def _torch_sampling_func(
        self,
        last_token_logits: torch.Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """Sample one token per row of logits [B, V]; ``top_k=1``: the argmax."""
        return sample(
            last_token_logits,
            temperature,
            top_k,
            top_p,
            rng=self.sampling_rng,
            vocab_size=vocab_size,
        )

    def _sample_from_logits_2d(self, logits_2d: torch.Tensor) -> torch.Tensor:
        """Sample one token per request from logits [R, V], with the sampling buckets."""
        requests = torch.arange(logits_2d.shape[0], device=logits_2d.device)
        return sample_buckets(logits_2d, requests, self._buckets(), self.sampling_rng)

    def _sample_speculative_logits(
        self, required_logits: torch.Tensor, request_in_prefill_status_tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample all rows that are verified, with the sampling buckets.

        With 3 decode requests and 2 drafts each, then 2 prompts, the rows belong to the requests
        ``0 0 0 | 1 1 1 | 2 2 2 | 3 | 4``; buckets ``[([0, 2], ...), ([1], ...), ([3, 4], ...)]``
        are sampled one by one and written in the order of the rows.

        Args:
            required_logits: [N, V]. request_in_prefill_status_tensor: [R], 0 for a decode request.

        Returns:
            Tokens [N], and the number of rows of every request [R].
        """
        status = request_in_prefill_status_tensor
        repeats = torch.where(status == 0, 1 + self.num_speculative_tokens, 1)
        requests = torch.arange(len(status), device=status.device).repeat_interleave(repeats)
        tokens = sample_buckets(required_logits, requests, self._buckets(), self.sampling_rng)
        return tokens, repeats

    def _buckets(self) -> list[Bucket]:
        if self._torch_sampling_buckets is not None:
            return self._torch_sampling_buckets
        params = [request.sampling_params for request in self._context.active_requests()]
        return make_buckets(
            [(getattr(each, "temperature", 1.0), each.top_k, each.top_p) for each in params]
        )

    @staticmethod
    def _get_required_logit_indices(
        request_in_prefill_status_tensor: torch.Tensor,
        request_query_lengths: torch.Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return the rows whose logits a step needs: all of a decode request, a prompt's last one.

        Two decode requests of 3 rows and a prompt of 2: ``0 1 2 | 3 4 5 | 7``.
        """
        indices = mtp_utils_pytorch.required_logit_indices(
            request_in_prefill_status_tensor.cpu(),
            request_query_lengths.cpu(),
            num_decode_requests,
            num_prefill_requests,
        )
        return indices.to(device or request_query_lengths.device)

    def _verify_speculative_tokens(
        self,
        output_tokens: torch.Tensor,
        input_tokens_required: torch.Tensor,
        *counts: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accept the drafts that the target generated itself.

        With 2 drafts, inputs ``a5 a6s a7s | b3 b4s b5s | c6 c7s c8s | d2 | e4`` of which 1, 2 and 0
        drafts equal the outputs: the mask is ``1 1 0 | 1 1 1 | 1 0 0 | 1 | 1``, the last accepted
        rows are ``1 5 6 9 10``.

        Args:
            counts, named: ``num_decode_requests, num_prefill_requests, active_request_count``; in
                the older form ``request_in_prefill_status_tensor, repeats`` precede them.

        Returns:
            ``(last_one_indices, accepted_tokens_mask, input_tokens_required)``.
        """
        is_older = len(counts) + len(named) == len(_OLDER_COUNTS)
        names = _OLDER_COUNTS if is_older else _COUNTS
        given = dict(zip(names, counts, strict=False)) | named
        if given.keys() != set(names) or len(counts) + len(named) != len(names):
            raise RequestError(
                f"_verify_speculative_tokens: expected {', '.join(names)}, got {len(counts)} "
                f"values and the names {', '.join(named) or 'none'}"
            )
        decode, prefill, active = (given[name] for name in _COUNTS)
        if decode + prefill != active:
            raise RequestError(
                f"active_request_count: expected {decode} + {prefill} requests, got {active}"
            )
        return mtp_utils_pytorch.verify_speculative_tokens(
            input_tokens_required, output_tokens, decode, prefill, self.num_speculative_tokens
        )

    def _init_dynamic_sampling_tensors(self) -> None:
        """Do nothing: the executor has allocated its tensors, of fixed addresses."""

    _init_mtp_sampling_tensor = _init_mtp_sampling_tensors = _init_dynamic_sampling_tensors

    def _get_mtp_num_heads(self) -> int:
        """Return the number of MTP layers of the checkpoint."""
        return self._context.built.model.facts.num_mtp_layers

    def update_generation_status(
        self,
        updated_prompts_tokens: torch.Tensor,
        generation_started: torch.Tensor,
        current_context_end_position: int,
        is_generation_done_tensor: torch.Tensor,
        generated_sequence_lengths: torch.Tensor,
        termination_id: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the rows [B] whose token at a position ends them, and count tokens of the others.

        Args:
            updated_prompts_tokens: [B, S]. generation_started: [B] bool.
            generated_sequence_lengths: [B], increased in place.
            termination_id: default: the tokenizer's ``eod``.

        Returns:
            ``is_generation_done_tensor`` [B] bool, ``generated_sequence_lengths`` [B] int32.
        """
        end = self.tokenizer.eod if termination_id is None else termination_id
        latest = updated_prompts_tokens[:, current_context_end_position]
        is_done = is_generation_done_tensor | ((latest == end) & generation_started)
        generated_sequence_lengths += ~is_done & generation_started
        return is_done, generated_sequence_lengths.int()

    # ---- dynamic batches --------------------------------------------------------------------

    def set_stop_word_finished_ids_callback(
        self, callback: Callable[[list[int]], Collection[int]] | None
    ) -> None:
        """Call ``callback`` after each step with the ids of its requests; those that it returns are
        finished by this step.

        Raises:
            ConfigError: neither a function nor None.
        """
        expect(
            callback is None or callable(callback),
            ConfigError,
            f"callback: expected a function of request ids, got {format_value(callback)}",
        )
        self._stop_word_callback = callback

    async def async_generate_output_tokens_dynamic_batch(
        self, skip_bookkeeping: bool = False
    ) -> DynamicBatchControllerStepResult:
        """Run one step of the requests of ``inference_wrapped_model.inference_context``.

        Args:
            skip_bookkeeping: leave requests, slots and KV lengths as before the step; the result
                has no ids, and the next step generates the same tokens.
        """
        await asyncio.sleep(0)
        return self._step(skip_bookkeeping)

    def _step(self, skip_bookkeeping: bool) -> DynamicBatchControllerStepResult:
        if not self._context.has_unfinished_requests():
            return DynamicBatchControllerStepResult(DecodeOnly(None, None))
        snapshot = self._context.snapshot() if skip_bookkeeping else None
        record = self._context.step()
        output = self._output(record)
        if snapshot is not None:
            self._context.undo_step(snapshot)
        else:
            output |= self._bookkeeping(record)
        is_decode_only = not record.batch.context_requests
        return DynamicBatchControllerStepResult(DecodeOnly(is_decode_only, is_decode_only), output)

    def generate_output_tokens_dynamic_batch(
        self, loop: asyncio.AbstractEventLoop | None = None
    ) -> dict[str, Any] | None:
        """Run one step and return its output, or None if there is no request.

        The output's keys, for the R requests that got tokens, decode requests first:

        - ``active_request_ids`` [R], ``finished_request_ids``, ``newly_paused_request_ids`` (None:
          none): int64 on the host. Finished ones include requests that failed.
        - ``sample`` [R] int64: the last token of each; ``accepted_tokens`` [max_requests, K]: the
          accepted drafts before it, then -1; None without decode requests or drafts.
        - ``log_probs``: a list per request, with those of the prompt first; ``top_n_logprobs``:
          index of the request -> (values, ids) per token. None: not requested.
        - ``cuda_graph_request_count``: number of requests of the replayed graph, with padding;
          None: the step ran eagerly.

        Raises:
            ExecutorError: an event loop runs in this thread.
        """
        if loop is not None and not loop.is_running():
            step = self.async_generate_output_tokens_dynamic_batch()
            return loop.run_until_complete(step).output
        if running_loop() is not None:
            raise ExecutorError(
                "generate_output_tokens_dynamic_batch: expected no running event loop; await "
                "async_generate_output_tokens_dynamic_batch() in one"
            )
        return self._step(skip_bookkeeping=False).output

    def dummy_forward(self) -> None:
        """Run a step of target and K draft passes that changes no request, slot or KV row."""
        self._context.dummy_step()

    def _dummy_serial_mtp_forward(self) -> None:
        """Run the draft passes of `dummy_forward` alone, from hidden states of zeros."""
        if self.num_speculative_tokens > 0:
            self._context.dummy_step(with_target=False)

    _run_dummy_serial_mtp_forward = _dummy_serial_mtp_forward

    def _dynamic_step_log_probs_bookkeeping(self) -> tuple[bool, bool]:
        """Return whether a request that is not paused has ``return_log_probs``, and whether one has
        ``top_n_logprobs``."""
        params = [request.sampling_params for request in self._context.unpaused_requests()]
        return (
            any(each.return_log_probs for each in params),
            any(each.top_n_logprobs > 0 for each in params),
        )

    def _dynamic_step_context_bookkeeping(self) -> dict[str, Any]:
        """Complete the step that ``skip_bookkeeping`` undid: run it again, for its tokens and ids.

        Raises:
            ExecutorError: the newest step was not undone.
        """
        if not self._context.lacks_bookkeeping:
            idle = not self._context.has_unfinished_requests()
            raise ExecutorError(
                "_dynamic_step_context_bookkeeping: expected a step without bookkeeping before it; "
                f"{'there are no requests: call add_request(), then ' if idle else ''}"
                "await async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True)"
            )
        record = self._context.step()
        tokens = [event.token_ids[-1] for _, event in self._rows(record)]
        return {"sample": torch.tensor(tokens, dtype=torch.int64), **self._bookkeeping(record)}

    @staticmethod
    def _router_record_bookkeeping() -> None:
        """Return None, as Megatron's without routing replay: experts are not recorded."""

    def _output(self, record: StepRecord) -> dict[str, Any]:
        """Return what a step generated, decode requests first."""
        batch, drafts = record.batch, self.num_speculative_tokens
        found = self._rows(record)
        accepted = None
        if drafts > 0 and batch.generation_requests:
            accepted = torch.full((self._context.max_requests, drafts), -1, dtype=torch.int64)
            for row, (_, event) in enumerate(found):
                before = event.token_ids[:-1]
                accepted[row, : len(before)] = torch.tensor(before, dtype=torch.int64)
        scores = [_scores(request, event) for request, event in found]
        tops = {
            row: [_top(each, request.params.logprobs) for each in mappings]
            for row, ((request, _), (mappings, _)) in enumerate(zip(found, scores, strict=True))
            if request.params.logprobs and mappings
        }
        return {
            "sample": torch.tensor([event.token_ids[-1] for _, event in found], dtype=torch.int64),
            "accepted_tokens": accepted,
            "log_probs": [own for _, own in scores] if any(own for _, own in scores) else None,
            "top_n_logprobs": tops or None,
            "cuda_graph_request_count": record.graph_size,
        }

    def _bookkeeping(self, record: StepRecord) -> dict[str, Any]:
        """Apply the stop-word callback and forget finished requests; return the ids of a step."""
        context = self._context
        active = [
            context.request_of(request.request_id).request_id for request, _ in self._rows(record)
        ]
        paused = [
            context.request_of(request.request_id).request_id
            for request in record.batch.paused_requests
        ]
        finished = []
        for event in record.events:
            if event.finish_reason is not None:
                request = context.request_of(event.request_id)
                finished.append(request.request_id)
                _set_status(request, is_failed=event.finish_reason is FinishReason.ERROR)
        if self._stop_word_callback is not None and active:
            stopped = _stopped_ids(self._stop_word_callback(list(active)), active)
            stopped = [each for each in stopped if each not in finished]
            for each in stopped:
                request = context.request_of(context.llm_request_of(each).request_id)
                _set_status(request, is_failed=False)
            context.finish(stopped)
            finished += stopped
        context.forget_finished()
        return {
            "active_request_ids": torch.tensor(active, dtype=torch.int64),
            "newly_paused_request_ids": torch.tensor(paused, dtype=torch.int64) if paused else None,
            "finished_request_ids": torch.tensor(finished, dtype=torch.int64),
            "evict_request_ids": None,
            "finished_routing_block_ids": {},
        }

    @staticmethod
    def _rows(record: StepRecord) -> list[tuple[LlmRequest, StepEvent]]:
        """Return the requests that got tokens, decode requests first."""
        events = {event.request_id: event for event in record.events if event.token_ids}
        batch = record.batch
        return [
            (request, events[request.request_id])
            for request in [*batch.generation_requests, *batch.context_requests]
            if request.request_id in events
        ]

    # ---- static batches ---------------------------------------------------------------------

    def generate_all_output_tokens_static_batch(
        self,
        active_requests: OrderedDict[int, InferenceRequest],
        active_streams: Mapping[Any, AsyncStream] | None = None,
    ) -> OrderedDict[int, InferenceRequest]:
        """Run requests to the end, each with its own parameters, and return them.

        Args:
            active_requests: request id -> request with ``prompt_tokens`` and ``sampling_params``.
            active_streams: request id -> stream of its partial results.

        Raises:
            RequestError: a request is not valid, or a dynamic batch is unfinished; nothing was
                started.
        """
        context = self._context
        streams = dict(active_streams or {})
        if not isinstance(active_requests, Mapping):
            raise RequestError(
                "active_requests: expected an OrderedDict of requests by id, got "
                f"{format_value(active_requests)}"
            )
        if context.has_unfinished_requests():
            raise RequestError(
                f"static batch: expected no unfinished requests in the inference context, got "
                f"{context.total_request_count}; finish them or call reset()"
            )
        unknown = [each for each in streams if each not in active_requests]
        if unknown:
            raise RequestError(f"active_streams: no request has the ids {unknown}")
        rows = []
        try:
            for key, request in active_requests.items():
                rows.append(self._add_static(key, request))
            self._run_static(rows, streams)
        finally:
            context.reset()
            for stream in streams.values():
                stream.finish()
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int32)
        for row in rows:
            row.request.generated_sequence_lengths = lengths
            self._finish_static(row)
        return active_requests

    def _add_static(self, key: int | str, request: Any) -> _StaticRow:
        llm_request = self._context.add_static_request(key, request)
        if request.sampling_params.return_segments and not hasattr(self.tokenizer, "offsets"):
            raise RequestError(
                f"request {key}: return_segments: expected False, since the tokenizer has no "
                "offsets(ids, text)"
            )
        prompt = llm_request.get_tokens()[: llm_request.py_orig_prompt_len]
        words = getattr(request.sampling_params, "stop_words", None) or ()
        words = [self.tokenize_prompt(self.tokenizer, word) for word in words]
        request.tpot = []
        return _StaticRow(key, request, prompt, llm_request, words)

    def _run_static(self, rows: Sequence[_StaticRow], streams: Mapping[Any, AsyncStream]) -> None:
        by_id = {row.llm_request.request_id: row for row in rows}
        last = time.perf_counter()
        while any(row.llm_request.finish_reason is None for row in rows):
            events = self._context.step().events
            now = time.perf_counter()
            for event in events:
                row = by_id[event.request_id]
                row.add(event, now - last)
                if row.is_stopped and event.finish_reason is None:
                    self._context.finish([row.key])
                stream = streams.get(row.key)
                if stream is not None:
                    self._stream_row(row, stream, is_done=row.is_finished)
            last = now

    def _stream_row(self, row: _StaticRow, stream: AsyncStream, *, is_done: bool) -> None:
        scores = row.scores(len(row.tokens))
        self.stream_tokens(
            row.request.sampling_params,
            [row.key],
            [row.request],
            [stream],
            [True],
            [is_done],
            torch.tensor([[*row.prompt, *row.tokens]]),
            [len(row.prompt)],
            [len(row.tokens)],
            [None if scores is None else torch.tensor([0.0] * (len(row.prompt) - 1) + scores)],
        )

    def _finish_static(self, row: _StaticRow) -> None:
        """Fill the results of a request."""
        request, params = row.request, row.request.sampling_params
        count = len(row.tokens)
        request.generated_length = count
        request.generated_tokens = torch.tensor(row.tokens, dtype=torch.int64)
        request.tpot = row.seconds[:count]
        known = row.llm_request.prompt_logprobs
        if params.return_log_probs:
            request.generated_log_probs = row.scores(count)
            if known is not None:
                request.prompt_log_probs = _own_scores(list(known)[1:], row.prompt[1:])
        if params.top_n_logprobs > 0:
            mappings = list(row.llm_request.logprobs or ())[:count]
            request.generated_top_n_logprobs = self._texts_of(mappings, params.top_n_logprobs)
            if known is not None and not params.skip_prompt_log_probs:
                request.prompt_top_n_logprobs = self._texts_of(
                    list(known)[1:], params.top_n_logprobs
                )
        tokens = torch.tensor([*row.prompt, *row.tokens], dtype=torch.int64)
        text, segments = self.detokenize_generations(
            tokens, torch.tensor([len(tokens)]), params.return_segments
        )
        request.text = text
        if segments is not None:
            request.segments = segments[0]
        # request.prompt may have special tokens, or be None
        prompt = self.detokenize(self.tokenizer, row.prompt, remove_EOD=False)
        request.generated_text = text[_common_length(prompt, text) :]
        _set_status(request, is_failed=row.llm_request.error is not None)

    def _texts_of(
        self, mappings: Sequence[TokenLogprobs | None], num_top: int
    ) -> list[dict[str, float]]:
        result = []
        for mapping in mappings:
            values, ids = _top(mapping or {}, num_top)
            texts = [self.tokenizer.detokenize([token]) for token in ids.tolist()]
            result.append(dict(zip(texts, values.tolist(), strict=True)))
        return result

    def stream_tokens(
        self,
        sampling_params: Any,
        request_ids: Sequence[int | str],
        requests: Sequence[InferenceRequest],
        streams: Sequence[AsyncStream],
        generation_started: Sequence[Any],
        is_generation_done: Sequence[Any],
        tokens: torch.Tensor,
        prompt_lengths: Sequence[Any],
        generated_lengths: Sequence[Any],
        output_log_probs: Any,
    ) -> None:
        """Put a partial result of each request on its stream; finish the streams of finished ones.

        Args:
            tokens: [B, S] prompts and outputs. output_log_probs: [B, S-1], or None per request.
        """
        each_has = zip(
            request_ids,
            requests,
            streams,
            generation_started,
            is_generation_done,
            tokens,
            prompt_lengths,
            generated_lengths,
            output_log_probs,
            strict=True,
        )
        for request_id, request, stream, started, done, row, prompt_len, count, scores in each_has:
            if not started or stream.finished or sampling_params.num_tokens_to_generate == 0:
                continue
            start, length = int(prompt_len), int(count)
            generated = row[start : start + length]
            text: str = ""
            segments: list[list[str]] | None = []
            if not getattr(sampling_params, "no_detokenize_streaming_text", False):
                text, segments = self.detokenize_generations(
                    generated, torch.tensor([length]), sampling_params.return_segments
                )
            result = type(request) if isinstance(request, InferenceRequest) else InferenceRequest
            stream.put(
                result(
                    request_id=request_id,
                    prompt=request.prompt,
                    sampling_params=request.sampling_params,
                    prompt_tokens=request.prompt_tokens,
                    arrival_time=request.arrival_time,
                    status=request.status,
                    encoder_prompt=request.encoder_prompt,
                    generated_text=text,
                    generated_segments=segments,  # type: ignore[arg-type]
                    generated_tokens=generated,
                    generated_log_probs=(
                        None if scores is None else scores[start - 1 : start + length - 1].tolist()
                    ),
                    generated_length=length,
                )
            )
            if done or length == sampling_params.num_tokens_to_generate:
                stream.finish()


class _StaticRow:
    """A request of a static batch and its output so far.

    Args:
        key: the request's id in the batch. words: token ids of the stop words.
    """

    def __init__(
        self,
        key: int | str,
        request: Any,
        prompt: list[int],
        llm_request: LlmRequest,
        words: list[list[int]],
    ) -> None:
        self.key = key
        self.request = request
        self.prompt = prompt
        self.llm_request = llm_request
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self.is_stopped = request.sampling_params.num_tokens_to_generate == 0
        self._words = words
        self._ends = llm_request.params.stop_token_ids  # not part of the output

    @property
    def is_finished(self) -> bool:
        return self.is_stopped or self.llm_request.finish_reason is not None

    def add(self, event: StepEvent, seconds: float) -> None:
        for token in event.token_ids:
            if self.is_stopped or token in self._ends:
                break
            self.tokens.append(token)
            self.seconds.append(seconds / len(event.token_ids))
            for word in self._words:
                if word and self.tokens[-len(word) :] == word:
                    self.is_stopped = True
                    params = self.request.sampling_params
                    if not getattr(params, "detokenize_stop_sequence", False):
                        del self.tokens[-len(word) :]
                    break

    def scores(self, count: int) -> list[float] | None:
        """Return the log-probabilities of the first ``count`` tokens, if they were requested."""
        if not self.request.sampling_params.return_log_probs:
            return None
        return _own_scores(list(self.llm_request.logprobs or ())[:count], self.tokens[:count])


def _own_scores(mappings: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> list[float]:
    pairs = zip(mappings, tokens, strict=False)
    return [mapping[token].logprob for mapping, token in pairs if mapping is not None]


def _scores(request: LlmRequest, event: StepEvent) -> tuple[list[TokenLogprobs], list[float]]:
    """Return the mappings of a step's tokens, those of the prompt first, and their own values."""
    if event.logprobs is None:
        return [], []
    mappings, tokens = list(event.logprobs), list(event.token_ids)
    if event.prompt_logprobs is not None:
        scored = [each for each in event.prompt_logprobs if each is not None]
        mappings = scored + mappings
        tokens = request.get_tokens()[1 : 1 + len(scored)] + tokens
    return mappings, _own_scores(mappings, tokens)


def _top(mapping: TokenLogprobs, num_top: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids of the ``num_top`` most probable tokens."""
    ranked = sorted(mapping.items(), key=lambda item: item[1].rank)[: num_top or 0]
    return (
        torch.tensor([each.logprob for _, each in ranked], dtype=torch.float32),
        torch.tensor([token for token, _ in ranked], dtype=torch.int64),
    )


def _set_status(request: Any, *, is_failed: bool) -> None:
    """Set the status of a finished request, of the enumeration that its class uses."""
    status = getattr(request, "status", None)
    kind = type(status) if isinstance(status, Enum) else Status
    request.status = kind["FAILED" if is_failed else "COMPLETED"]


def _common_length(text: str, other: str) -> int:
    """Return the length of the beginning that two texts have in common."""
    pairs = enumerate(zip(text, other, strict=False))
    shorter = min(len(text), len(other))
    return next((index for index, (one, two) in pairs if one != two), shorter)


def _stopped_ids(returned: Any, active: Sequence[int]) -> list[int]:
    if not returned:
        return []
    if not isinstance(returned, Collection) or isinstance(returned, (str, bytes)):
        raise RequestError(
            "stop-word callback: expected a set of request ids, got " + format_value(returned)
        )
    return [each for each in active if each in returned]


def _takes_special_tokens(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(
        each.name == "skip_special_tokens" or each.kind is each.VAR_KEYWORD for each in parameters
    )

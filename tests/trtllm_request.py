"""Requests, batches and enums shaped as TensorRT-LLM's, of its lines 1.2, 1.3a and 1.3b.

Names, containers and defaults follow the public text of ``llm_request.py``, ``sampling_params.py``
and ``scheduler.py``; what only kernels or other features read is left out. Nothing here is a double
of ours: a request has no facts; its options are where TensorRT-LLM has them.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import torch

LINES = ("1.2", "1.3a", "1.3b")


class LlmRequestState(IntEnum):
    """States, by TensorRT-LLM's names and numbers."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_TO_COMPLETE = 4
    GENERATION_COMPLETE = 5


class FinishReason(Enum):
    """Why a request ended; there is none for errors."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass
class Logprob:
    """How likely a token was."""

    logprob: float
    rank: int | None = None


class LogprobMode(str, Enum):
    """Which distribution log-probabilities are of."""

    RAW = "raw"
    PROCESSED = "processed"


class SamplingConfig:
    """Options as the bindings hold them: lists of one, None where nothing was given."""

    LISTS = (
        "temperature",
        "top_k",
        "top_p",
        "top_p_min",
        "top_p_decay",
        "top_p_reset_ids",
        "min_p",
        "random_seed",
        "min_length",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_ignore_length",
        "length_penalty",
        "early_stopping",
        "no_repeat_ngram_size",
        "beam_search_diversity_rate",
    )

    def __init__(self, **given: Any) -> None:
        self.beam_width = given.pop("beam_width", 1)
        self.num_return_sequences = given.pop("num_return_sequences", None)
        self.beam_width_array = given.pop("beam_width_array", None)
        for name in self.LISTS:
            value = given.pop(name, None)
            setattr(self, name, None if value is None else [value])
        if given:
            raise TypeError(f"SamplingConfig: no {', '.join(given)}")


class PyResult:
    """Keeps what samplers append."""

    def __init__(self, return_log_probs: bool) -> None:
        self._logprobs: list[Any] | None = [] if return_log_probs else None
        self.cum_log_probs = 0.0

    def append_log_probs(self, log_probs: list[Any], cum_log_probs: Any = None) -> None:
        """[beams][tokens]: of each a mapping of ids, the token itself first, or a number."""
        assert cum_log_probs is None
        if self._logprobs is None:
            return
        (beam,) = log_probs
        self._logprobs += beam
        for one in beam:
            value = next(iter(one.values())).logprob if isinstance(one, dict) else one
            self.cum_log_probs += value

    @property
    def log_probs(self) -> list[Any] | None:
        return None if self._logprobs is None else [self._logprobs]


def word_list(words: list[list[int]]) -> list[list[int]]:
    """The pair that TensorRT-LLM makes of words: all tokens, and where each word ends."""
    tokens = [token for word in words for token in word]
    ends = [sum(map(len, words[: place + 1])) for place in range(len(words))]
    return [tokens, ends + [-1] * (len(tokens) - len(ends))]


class LlmRequest:
    """A request of one line.

    Args:
        sampling: fields of its `SamplingConfig`. stop_words, bad_words: as ids.
        embedding_bias: [V], held as [1, V].
        chunk: tokens of the prompt that a step reads; None: all.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        *,
        line: str = "1.3b",
        sampling: dict[str, Any] | None = None,
        max_new_tokens: int = 16,
        end_id: int = -1,
        stop_words: list[list[int]] | None = None,
        bad_words: list[list[int]] | None = None,
        embedding_bias: torch.Tensor | None = None,
        return_log_probs: bool = False,
        num_logprobs: int | None = None,
        return_context_logits: bool = False,
        return_generation_logits: bool = False,
        chunk: int | None = None,
    ) -> None:
        assert line in LINES
        self.line = line
        self.request_id = self.py_request_id = request_id
        self.state = LlmRequestState.CONTEXT_INIT
        self.sampling_config = SamplingConfig(**(sampling or {}))
        self.end_id = self.py_end_id = end_id
        self.py_orig_prompt_len = self.py_prompt_len = len(prompt)
        self.py_max_new_tokens = max_new_tokens
        self.py_min_length = self.sampling_config.min_length
        pair = word_list(stop_words) if stop_words else None
        self.py_stop_words_list = pair
        self.stop_words_list = None if pair is None else torch.tensor([pair], dtype=torch.int32)
        pair = word_list(bad_words) if bad_words else None
        self.bad_words_list = None if pair is None else torch.tensor([pair], dtype=torch.int32)
        self.embedding_bias = None if embedding_bias is None else embedding_bias.unsqueeze(0)
        self.py_seq_slot: int | None = None
        self.py_batch_idx: int | None = None
        self.py_draft_tokens: list[int] = []
        self.py_rewind_len = 0
        self.py_num_accepted_draft_tokens = 0
        self.py_decoding_iter = 0
        self.py_return_log_probs = return_log_probs
        self.py_num_logprobs = num_logprobs
        self.py_return_context_logits = return_context_logits
        self.py_return_generation_logits = return_generation_logits
        self.py_additional_outputs = None
        self.py_logits_post_processors = None
        self.guided_decoding_params = None
        self.py_result = PyResult(return_log_probs)
        self.is_attention_dp_dummy = self.is_cuda_graph_dummy = False
        self.context_current_position = 0
        self.context_chunk_size = min(chunk or len(prompt), len(prompt))
        self.finish_reason = FinishReason.NOT_FINISHED
        if line != "1.2":
            self.py_beam_width = self.sampling_config.beam_width
            self.py_num_draft_tokens_verified = 0
            self.py_draft_tokens_effective_len: int | None = None
            self.py_disable_speculative_decoding = False
        if line == "1.3b":
            self.py_bad_words = [list(word) for word in bad_words] if bad_words else None
            self.py_no_repeat_ngram_size = None
            self.py_logprobs_mode = LogprobMode.RAW
            self.py_logprobs_simple_format = False
        self._tokens = list(prompt)

    @property
    def is_dummy(self) -> bool:
        return self.is_attention_dp_dummy or self.is_cuda_graph_dummy

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size == self.py_prompt_len

    @property
    def context_remaining_length(self) -> int:
        return self.py_prompt_len - self.context_current_position

    def move_to_next_context_chunk(self) -> None:
        """What the executor does after `sample_async`."""
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = min(self.context_chunk_size, self.context_remaining_length)
        if self.context_remaining_length == 0:
            self.state = LlmRequestState.GENERATION_IN_PROGRESS

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self._tokens)

    def get_token(self, beam: int, position: int) -> int:
        assert beam == 0
        return self._tokens[position]

    def get_num_tokens(self, beam: int) -> int:
        assert beam == 0
        return len(self._tokens)

    def add_new_token(self, token: int, beam: int) -> int:
        assert beam == 0
        assert type(token) is int
        assert self.state != LlmRequestState.GENERATION_COMPLETE, "a token after the end"
        self._tokens.append(token)
        return len(self._tokens)

    def finish_by(self, reason: FinishReason, beam: int) -> None:
        assert beam == 0
        assert isinstance(reason, FinishReason)
        self.state = LlmRequestState.GENERATION_COMPLETE
        self.finish_reason = reason

    @property
    def output(self) -> list[int]:
        return self._tokens[self.py_orig_prompt_len :]

    def create_child_request(self, child_id: int) -> LlmRequest:
        """A further sample: the parent's ``py_`` attributes, an id and a seed of its own."""
        child = deepcopy(self)
        child.request_id = child.py_request_id = child_id
        child.py_seq_slot = child.py_batch_idx = None
        seed = child.sampling_config.random_seed or [0]
        child.sampling_config.random_seed = [seed[0] + 1]
        return child


class OlderBatch:
    """What a step of line 1.2 runs: plain lists."""

    def __init__(self, contexts: list[Any], generations: list[Any]) -> None:
        self.context_requests = list(contexts)
        self.generation_requests = list(generations)
        self.paused_requests: list[Any] = []

    def all_requests(self) -> list[Any]:
        return self.context_requests + self.generation_requests


class NewerBatch:
    """What a step of line 1.3 runs: chunks that go on are listed by themselves, and first."""

    def __init__(self, contexts: list[Any], generations: list[Any]) -> None:
        self.context_requests_chunking = [r for r in contexts if not r.is_last_context_chunk]
        self.context_requests_last_chunk = [r for r in contexts if r.is_last_context_chunk]
        self.generation_requests = list(generations)
        self.paused_requests: list[Any] = []

    @property
    def context_requests(self) -> list[Any]:
        return self.context_requests_chunking + self.context_requests_last_chunk

    def all_requests(self) -> list[Any]:
        return self.context_requests + self.generation_requests


def make_batch(line: str, contexts: list[Any], generations: list[Any]) -> Any:
    """The batch of a line."""
    kind = OlderBatch if line == "1.2" else NewerBatch
    return kind(contexts, generations)

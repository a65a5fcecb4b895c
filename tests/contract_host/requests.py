"""Requests and scheduled batches with the host's fields and habits."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.contract_host.behaviours import FinishReason, LlmRequestState
from tests.contract_host.line_rules import Line


class LlmRequest:
    """A request as the host holds it: no epoch, no facts, no look-ahead."""

    def __init__(
        self,
        request_id: int,
        input_tokens: list[int],
        max_new_tokens: int,
        *,
        end_id: int | None = None,
        stop_words: list[list[int]] | None = None,
        sampling_config: Any = None,
        return_log_probs: bool = False,
    ) -> None:
        self.request_id = self.py_request_id = request_id
        self._tokens = list(input_tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.finish_reason = FinishReason.NOT_FINISHED
        self.prompt_len = self.py_prompt_len = self.py_orig_prompt_len = len(input_tokens)
        self.py_max_new_tokens = max_new_tokens
        self.py_end_id = -1 if end_id is None else end_id
        self.py_stop_words_list = _flat(stop_words)
        self.py_seq_slot: int | None = None
        self.py_batch_idx: int | None = None
        self.py_draft_tokens: list[int] = []
        self.py_draft_tokens_effective_len: int | None = None
        self.py_num_draft_tokens_verified = 0
        self.py_rewind_len = 0
        self.py_num_accepted_draft_tokens = 0
        self.py_decoding_iter = 0
        self.py_result = Result()
        self.py_return_log_probs = return_log_probs
        self.py_return_context_logits = False
        self.py_return_generation_logits = False
        self.py_disable_speculative_decoding = False
        self.sampling_config = sampling_config or SimpleNamespace(beam_width=1)
        self.is_attention_dp_dummy = False
        self.is_cuda_graph_dummy = False
        self.context_current_position = 0
        self.context_chunk_size = len(input_tokens)
        self.prepopulated_prompt_len = 0

    @property
    def is_dummy(self) -> bool:
        return self.is_attention_dp_dummy or self.is_cuda_graph_dummy

    # ---- tokens ----

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self._tokens)

    def get_last_tokens(self, beam: int) -> int:
        assert beam == 0
        return self._tokens[-1]

    def get_num_tokens(self, beam: int) -> int:
        assert beam == 0
        return len(self._tokens)

    @property
    def max_beam_num_tokens(self) -> int:
        return len(self._tokens)

    def add_new_token(self, token: int, beam: int) -> int:
        assert beam == 0
        assert isinstance(token, int)
        assert token >= 0, f"request {self.request_id} got {token}"
        assert not self.is_finished, f"request {self.request_id} has ended and got {token}"
        self._tokens.append(token)
        return len(self._tokens)

    @property
    def output(self) -> list[int]:
        return self._tokens[self.py_orig_prompt_len :]

    # ---- life ----

    @property
    def is_finished(self) -> bool:
        return self.state is LlmRequestState.GENERATION_COMPLETE

    def finish_by(self, reason: Any, beam: int) -> None:
        """Any enum with the host's names does: packages bring their own."""
        assert beam == 0
        self.state = LlmRequestState.GENERATION_COMPLETE
        self.finish_reason = FinishReason[reason.name]

    def pause(self) -> None:
        """What was generated counts as prompt; drafts and placement are stale from here on."""
        self.state = LlmRequestState.CONTEXT_INIT
        self.prompt_len = self.py_prompt_len = len(self._tokens)
        self.context_current_position = 0
        self.context_chunk_size = self.prompt_len
        self.prepopulated_prompt_len = 0
        self.py_seq_slot = None

    # ---- chunks ----

    @property
    def is_first_context_chunk(self) -> bool:
        """Also where the first chunk begins after tokens that were found in the cache."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size == self.prompt_len

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0


class Result:
    """``py_result``: what is handed out besides tokens."""

    def __init__(self) -> None:
        self.log_probs: list[Any] = []

    def append_log_probs(self, log_probs: list[Any]) -> None:
        self.log_probs.append(log_probs)


def draft_length(request: LlmRequest) -> int:
    """``get_draft_token_length``."""
    return len(request.py_draft_tokens or ())


def _flat(words: list[list[int]] | None) -> list[list[int]] | None:
    """All ids concatenated, and where words end, padded with -1."""
    if not words:
        return None
    ids = [token for word in words for token in word]
    ends = [sum(len(word) for word in words[: i + 1]) for i in range(len(words))]
    return [ids, ends + [-1] * (len(ids) - len(ends))]


@dataclass
class ScheduledRequests:
    """Line 1.2: plain lists."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    paused_requests: list[LlmRequest] = field(default_factory=list)

    def all_requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]

    @property
    def batch_size(self) -> int:
        return len(self.all_requests())

    @property
    def can_run_cuda_graph(self) -> bool:
        return not self.context_requests


@dataclass
class SplitScheduledRequests:
    """Lines 1.3: contexts by whether their prompt ends; ``context_requests`` cannot be set."""

    context_requests_chunking: list[LlmRequest] = field(default_factory=list)
    context_requests_last_chunk: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    paused_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def context_requests(self) -> list[LlmRequest]:
        return [*self.context_requests_chunking, *self.context_requests_last_chunk]

    @property
    def num_context_requests(self) -> int:
        return len(self.context_requests)

    def all_requests(self) -> list[LlmRequest]:
        return [*self.context_requests, *self.generation_requests]

    @property
    def batch_size(self) -> int:
        return len(self.all_requests())

    @property
    def can_run_cuda_graph(self) -> bool:
        return not self.context_requests


Batch = ScheduledRequests | SplitScheduledRequests


def batch_of(
    line: Line,
    contexts: list[LlmRequest],
    generations: list[LlmRequest],
    paused: list[LlmRequest] | None = None,
) -> Batch:
    """A scheduled batch of the line's kind."""
    if not line.is_newer:
        return ScheduledRequests(contexts, generations, paused or [])
    return SplitScheduledRequests(
        [r for r in contexts if not r.is_last_context_chunk],
        [r for r in contexts if r.is_last_context_chunk],
        generations,
        paused or [],
    )

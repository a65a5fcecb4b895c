"""Request, batch and attention metadata for host engines without classes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from numbers import Integral
from typing import Any, ClassVar

import torch

from mtp_plugin.errors import ExecutorError, MetadataError, RequestError, format_value
from mtp_plugin.ops.step import to_device
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stopping import TextWatch
from mtp_plugin.speculative.host.request import RequestFacts, StepStats

LOOP_OPTIONS = frozenset({"max_draft_len", "prompt_logprobs", "speculate"})
"""Options that the host engine's loop implements, not a component of the plugin."""


class PlainRequest:
    """A request with every field that manager and sampler read or write.

    Args:
        request_id: 0 or more, unique among running requests.
        prompt_token_ids: at least one token.
        params: the request options.
        max_seq_len: maximum number of tokens of any request.
        vocab_size: V, to check the prompt's token ids; None: the loop has checked them.
        end_ids: EOS token ids of the model.
        watch: finds stop strings.
        stats: records the number of tokens per step.

    Raises:
        RequestError: the prompt is empty, fills ``max_seq_len`` or has a token id outside the
            vocabulary, ``stop`` is set without a watch, bad words are not token ids, or an option
            is in `LOOP_OPTIONS` but not in ``loop_options``.
    """

    loop_options: ClassVar[frozenset[str]] = frozenset()
    """The `LOOP_OPTIONS` that the loop using this class implements."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_seq_len: int,
        vocab_size: int | None = None,
        end_ids: Iterable[int] = (),
        watch: TextWatch | None = None,
        stats: StepStats | None = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
        if vocab_size is not None:
            self._refuse_tokens(vocab_size)
        self._refuse(params, watch, max_seq_len)
        self.facts = RequestFacts.of(
            request_id,
            params,
            prompt_len=len(self.tokens),
            max_seq_len=max_seq_len,
            end_ids=end_ids,
            watch=watch,
            stats=stats,
        )
        self.state = RequestState.CONTEXT_INIT
        self.finish_reason: FinishReason | None = None
        self.py_error: str | None = None
        self.py_orig_prompt_len = len(self.tokens)
        self.py_seq_slot: int | None = None
        self.py_draft_tokens: list[int] = []
        self.py_rewind_len = 0
        self.py_num_accepted_draft_tokens = 0
        self.py_decoding_iter = 0
        self.context_length = len(self.tokens)
        self.context_current_position = 0
        self.context_chunk_size = len(self.tokens)
        """Prompt tokens of the current step; a loop with chunked prefill sets it."""

    def _refuse_tokens(self, vocab_size: int) -> None:
        tokens: list[Any] = self.tokens
        for position, token in enumerate(tokens):
            if not (isinstance(token, Integral) and 0 <= int(token) < vocab_size):
                raise RequestError(
                    f"request {self.request_id}: prompt token {position}: expected an id from 0 to "
                    f"{vocab_size - 1}, got {format_value(token)}"
                )

    def _refuse(self, params: SamplingParams, watch: TextWatch | None, max_seq_len: int) -> None:
        if not self.tokens:
            raise RequestError(
                f"request {self.request_id}: expected at least one prompt token, got none"
            )
        if len(self.tokens) >= max_seq_len:
            raise RequestError(
                f"request {self.request_id}: the prompt has {len(self.tokens)} tokens, max_seq_len "
                f"is {max_seq_len} and one token must fit after it"
            )
        requested, lacking = params.requested_options(), LOOP_OPTIONS - self.loop_options
        named = [f"{name}={value!r}" for name, value in requested.items() if name in lacking]
        if named:
            raise RequestError(
                f"request {self.request_id}: the loop of {type(self).__name__} does not support "
                f"{', '.join(named)}"
            )
        words = [word for word in params.bad_words if isinstance(word, str)]
        if words:
            raise RequestError(
                f"request {self.request_id}: {params.spelled('bad_words')}="
                f"{format_value(words[0])}: expected its token ids"
            )
        if "stop" in requested and watch is None:
            raise RequestError(
                f"request {self.request_id}: stop={requested['stop']!r} needs a watch, got None"
            )

    # ---- tokens -----------------------------------------------------------------------------

    def get_tokens(self, beam: int = 0) -> list[int]:  # noqa: ARG002
        """Return the prompt and output tokens."""
        return self.tokens

    def get_num_tokens(self, beam: int = 0) -> int:  # noqa: ARG002
        """Return the number of prompt and output tokens."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens."""
        return self.tokens[self.py_orig_prompt_len :]

    def add_new_token(self, token: int, beam: int = 0) -> None:  # noqa: ARG002
        """Append an output token.

        Raises:
            ExecutorError: the request has finished.
        """
        if self.is_finished:
            raise ExecutorError(f"request {self.request_id} has finished; token {token} came late")
        self.tokens.append(token)

    # ---- rows -------------------------------------------------------------------------------

    @property
    def step_positions(self) -> range:
        """Positions of the tokens that the next step reads."""
        if self.context_remaining_length == 0:
            start = len(self.tokens) - 1
            return range(start, start + 1 + len(self.py_draft_tokens))
        start = self.context_current_position
        return range(start, start + self.context_chunk_size)

    @property
    def step_tokens(self) -> list[int]:
        """The tokens that the next step reads: a prompt chunk, or the last token and its drafts."""
        positions = self.step_positions
        drafts = [max(token, 0) for token in self.py_draft_tokens]  # -1: absent
        return [*self.tokens, *drafts][positions.start : positions.stop]

    # ---- state -------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether the request has finished."""
        return self.state is RequestState.GENERATION_COMPLETE

    def finish_by(self, reason: FinishReason, beam: int = 0) -> None:  # noqa: ARG002
        """Finish the request; later calls keep the first reason."""
        if self.is_finished:
            return
        self.state = RequestState.GENERATION_COMPLETE
        self.finish_reason = reason
        self.py_draft_tokens = []

    # ---- prompt chunks ------------------------------------------------------------------------

    @property
    def context_remaining_length(self) -> int:
        """Number of prompt tokens not yet processed."""
        return self.context_length - self.context_current_position

    @property
    def is_first_context_chunk(self) -> bool:
        """Whether the scheduled chunk starts the prompt."""
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        """Whether the scheduled chunk ends the prompt."""
        return self.context_chunk_size == self.context_remaining_length

    def move_to_next_context_chunk(self) -> None:
        """Count the scheduled chunk as processed; after the last one generation starts."""
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0
        if self.context_remaining_length == 0 and not self.is_finished:
            self.state = RequestState.GENERATION_IN_PROGRESS


@dataclass(frozen=True)
class PlainBatch:
    """The requests of one step and their query rows: contexts first, then generations.

    Raises:
        MetadataError: the chunk of a context is empty or longer than the rest of its prompt, or the
            prompt of a generation is not finished.
    """

    context_requests: Sequence[PlainRequest]
    generation_requests: Sequence[PlainRequest]

    def __post_init__(self) -> None:
        for request in self.context_requests:
            left, chunk = request.context_remaining_length, request.context_chunk_size
            if not 1 <= chunk <= left:
                raise MetadataError(
                    f"request {request.request_id}: expected a context_chunk_size from 1 to the "
                    f"{left} tokens that are left of its prompt, got {chunk}"
                )
        for request in self.generation_requests:
            if request.context_remaining_length:
                raise MetadataError(
                    f"request {request.request_id}: {request.context_remaining_length} tokens of "
                    f"its prompt are left, so it is none of the generations"
                )

    def all_requests(self) -> list[PlainRequest]:
        """Return all requests in batch order."""
        return [*self.context_requests, *self.generation_requests]

    @property
    def request_ids(self) -> list[int]:
        """Ids of all requests [R], in batch order."""
        return [request.request_id for request in self.all_requests()]

    @property
    def seq_lens(self) -> list[int]:
        """Query rows of each request; they sum to T."""
        return [len(request.step_positions) for request in self.all_requests()]

    def input_ids(self, device: torch.device | str) -> torch.Tensor:
        """Return the input token ids [T] int32."""
        return _flat((request.step_tokens for request in self.all_requests()), torch.int32, device)

    def position_ids(self, device: torch.device | str) -> torch.Tensor:
        """Return the position ids [1, T] int64."""
        positions = (request.step_positions for request in self.all_requests())
        return _flat(positions, torch.int64, device).unsqueeze(0)

    def draft_tokens(self, device: torch.device | str) -> torch.Tensor:
        """Return the draft tokens of the generations [G*K] int32."""
        drafts = (request.py_draft_tokens for request in self.generation_requests)
        return _flat(drafts, torch.int32, device)

    def logit_rows(self, device: torch.device | str) -> torch.Tensor:
        """Return the rows whose logits the worker needs [C + G*(K+1)] int64: the last row of each
        context and all rows of generations."""
        lens = self.seq_lens
        ends = list(accumulate(lens))
        num_contexts = len(self.context_requests)
        generations = range(sum(lens[:num_contexts]), sum(lens))
        return _flat(([end - 1 for end in ends[:num_contexts]], generations), torch.int64, device)


def _flat(
    rows: Iterable[Iterable[int]], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    return to_device(list(chain.from_iterable(rows)), dtype, device)


class PlainAttentionMetadata:
    """Query and KV lengths of a step, with the fields that workers change and restore.

    The lengths are those of the current pass, target or draft layer: the query rows of each
    request, and its KV length including them. The pass overwrites the cache from
    ``kv_len - seq_len`` on. Rows of a draft window that starts before the first token are counted,
    but never read.

    Args:
        batch: the requests of the step.
        device: the device of the step.
    """

    is_cuda_graph = False

    def __init__(self, batch: PlainBatch, device: torch.device | str) -> None:
        lens = batch.seq_lens
        ends = [request.step_positions.stop for request in batch.all_requests()]
        self._seq_lens = torch.tensor(lens, dtype=torch.int32)
        self._seq_lens_cuda = torch.tensor(lens, dtype=torch.int32, device=device)
        self.kv_lens_cuda = torch.tensor(ends, dtype=torch.int32, device=device)
        self.num_contexts = len(batch.context_requests)
        self.request_ids = batch.request_ids

    @property
    def seq_lens(self) -> torch.Tensor:
        """Query rows of each request [R] int32, on the CPU."""
        return self._seq_lens

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """Query rows of each request [R] int32, on the device."""
        return self._seq_lens_cuda

    @property
    def num_seqs(self) -> int:
        """R: number of requests."""
        return len(self._seq_lens)

    @property
    def num_generations(self) -> int:
        """G: number of generation requests."""
        return self.num_seqs - self.num_contexts

    @property
    def num_ctx_tokens(self) -> int:
        """Total number of query rows of contexts."""
        return int(self._seq_lens[: self.num_contexts].sum())

    def on_update(self) -> None:
        """Do nothing: no field is derived from the lengths."""

"""Parcels for hosts without classes of their own: a request, a batch, the lengths of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

import torch

from mtp_plugin.errors import ExecutorError, MetadataError, RequestError, format_value
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.requests.stopping import TextWatch
from mtp_plugin.speculative.host.request import RequestFacts, StepStats
from mtp_plugin.speculative.step import to_device

LOOP_OPTIONS = frozenset({"max_draft_len", "prompt_logprobs", "speculate"})
"""Options that a host's loop gives, and none of the pieces."""


class PlainRequest:
    """A request with every field that manager and sampler read or write.

    Args:
        request_id: 0 or more, of no other request that runs.
        prompt_token_ids: at least one.
        params: what it asks for. max_seq_len: tokens that any request can hold.
        end_ids: of the model. watch: finds stop strings. stats: takes the counts of its steps.

    Raises:
        RequestError: a prompt that is empty or fills ``max_seq_len``, ``stop`` without a watch, bad
            words that are no ids, or an option of a loop that the class does not list.
    """

    loop_options: ClassVar[frozenset[str]] = frozenset()
    """Those of `LOOP_OPTIONS` that the loop of this class gives."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_seq_len: int,
        end_ids: Iterable[int] = (),
        watch: TextWatch | None = None,
        stats: StepStats | None = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
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
        """Prompt tokens of the step at hand: a host that cuts prompts sets it."""

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
        asked, lacking = params.requested_options(), LOOP_OPTIONS - self.loop_options
        named = [f"{name}={value!r}" for name, value in asked.items() if name in lacking]
        if named:
            raise RequestError(
                f"request {self.request_id}: the loop of {type(self).__name__} does not give "
                f"{', '.join(named)}"
            )
        words = [word for word in params.bad_words if isinstance(word, str)]
        if words:
            raise RequestError(
                f"request {self.request_id}: {params.spelled('bad_words')}="
                f"{format_value(words[0])}: expected its token ids"
            )
        if "stop" in asked and watch is None:
            raise RequestError(
                f"request {self.request_id}: stop={asked['stop']!r} needs a watch, got None"
            )

    # ---- tokens -----------------------------------------------------------------------------

    def get_tokens(self, beam: int = 0) -> list[int]:  # noqa: ARG002
        """Prompt and output so far."""
        return self.tokens

    def get_num_tokens(self, beam: int = 0) -> int:  # noqa: ARG002
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.py_orig_prompt_len :]

    def add_new_token(self, token: int, beam: int = 0) -> None:  # noqa: ARG002
        """Append an emitted token.

        Raises:
            ExecutorError: the request has finished.
        """
        if self.is_finished:
            raise ExecutorError(f"request {self.request_id} has finished; token {token} came late")
        self.tokens.append(token)

    # ---- rows -------------------------------------------------------------------------------

    @property
    def step_positions(self) -> range:
        """Of the tokens that its next step reads."""
        if self.context_remaining_length == 0:
            start = len(self.tokens) - 1
            return range(start, start + 1 + len(self.py_draft_tokens))
        start = self.context_current_position
        return range(start, start + self.context_chunk_size)

    @property
    def step_tokens(self) -> list[int]:
        """Those: of a prompt, or the newest and its drafts."""
        places = self.step_positions
        return [*self.tokens, *self.py_draft_tokens][places.start : places.stop]

    # ---- life -------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self.state is RequestState.GENERATION_COMPLETE

    def finish_by(self, reason: FinishReason, beam: int = 0) -> None:  # noqa: ARG002
        """End the request; the first reason stays."""
        if self.is_finished:
            return
        self.state = RequestState.GENERATION_COMPLETE
        self.finish_reason = reason
        self.py_draft_tokens = []

    # ---- prompt chunks ------------------------------------------------------------------------

    @property
    def context_remaining_length(self) -> int:
        """Prompt tokens not yet read."""
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
        """Count the scheduled chunk as read; the last one starts generation."""
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0
        if self.context_remaining_length == 0 and not self.is_finished:
            self.state = RequestState.GENERATION_IN_PROGRESS


@dataclass(frozen=True)
class PlainBatch:
    """The requests of one step, and the rows that they feed: contexts first, then generations.

    Raises:
        MetadataError: a context whose chunk is not of what is left of its prompt, or a generation
            with some of it left.
    """

    context_requests: Sequence[PlainRequest]
    """Whose prompts are read."""
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
        """In the order of every row of the step."""
        return [*self.context_requests, *self.generation_requests]

    @property
    def request_ids(self) -> list[int]:
        """R of them."""
        return [request.request_id for request in self.all_requests()]

    @property
    def seq_lens(self) -> list[int]:
        """Rows of each request: T together."""
        return [len(request.step_positions) for request in self.all_requests()]

    def input_ids(self, device: torch.device | str) -> torch.Tensor:
        """[T] int32."""
        return _flat((request.step_tokens for request in self.all_requests()), torch.int32, device)

    def position_ids(self, device: torch.device | str) -> torch.Tensor:
        """[1, T] int64."""
        places = (request.step_positions for request in self.all_requests())
        return _flat(places, torch.int64, device).unsqueeze(0)

    def draft_tokens(self, device: torch.device | str) -> torch.Tensor:
        """[G*K] int32."""
        drafts = (request.py_draft_tokens for request in self.generation_requests)
        return _flat(drafts, torch.int32, device)

    def logit_rows(self, device: torch.device | str) -> torch.Tensor:
        """Which of the T rows the worker wants logits of: the last of each context, and all of
        generations [C + G*(K+1)] int64."""
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
    """The lengths of a step, under the names that workers change them by and put them back.

    Of the pass at hand, be it the target's or a draft layer's: the rows that each request feeds,
    and the tokens that its cache holds with them. What the cache held from ``kv_len - seq_len`` on
    is overwritten. Rows of a window that begins before the text count too, and nobody reads them.

    Args:
        batch: of the step. device: where it runs.
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
        """[R] int32 on the host: rows of each request."""
        return self._seq_lens

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        """[R] int32 on the device."""
        return self._seq_lens_cuda

    @property
    def num_seqs(self) -> int:
        """R."""
        return len(self._seq_lens)

    @property
    def num_generations(self) -> int:
        """G."""
        return self.num_seqs - self.num_contexts

    @property
    def num_ctx_tokens(self) -> int:
        """Rows of all contexts together."""
        return int(self._seq_lens[: self.num_contexts].sum())

    def on_update(self) -> None:
        """Nothing is kept that follows of the lengths."""

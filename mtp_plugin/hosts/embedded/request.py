"""A request of the embedded executor: its tokens, and its state."""

from __future__ import annotations

import time
from collections.abc import Callable

from mtp_plugin.errors import ExecutorError
from mtp_plugin.requests.detokenizer import RequestText
from mtp_plugin.requests.logprobs import Logprobs, PromptLogprobs
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason, RequestState
from mtp_plugin.speculative.draft_length.controller import DraftState
from mtp_plugin.speculative.host import LOOP_OPTIONS, PlainRequest
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, Label


class LlmRequest(PlainRequest):
    """One request, with TensorRT-LLM's names.

    ``py_epoch`` is incremented by every preemption: results of an older epoch are dropped.

    Args:
        prompt: the prompt's text; None: it was given as token ids.
        sample_index: index among the ``n`` sequences of the prompt.
        decode_token: returns the text of a token, for log-probabilities.
    """

    loop_options = LOOP_OPTIONS

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        end_ids: tuple[int, ...] = (),
        text: RequestText | None = None,
        prompt: str | None = None,
        sample_index: int = 0,
        decode_token: Callable[[int], str | None] | None = None,
        max_draft_len: int = 0,
        max_seq_len: int,
        label: Label | None = None,
    ) -> None:
        self.py_acceptance = AcceptanceStats(max_draft_len, label=label)
        super().__init__(
            request_id,
            prompt_token_ids,
            params,
            max_seq_len=max_seq_len,
            end_ids=end_ids,
            watch=None if text is None else text.push,
            stats=self.py_acceptance,
        )
        self.py_request_id = request_id
        self.prompt_index = 0
        """Index of the prompt in its call."""
        self.sample_index = sample_index
        self.prompt = prompt
        self.params = params
        self.text = text
        self.decode_token = decode_token
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self._eos_ids = frozenset(() if params.ignore_eos else end_ids)
        self.py_batch_idx: int | None = None
        self.py_epoch = 0
        self.py_num_drafted = 0
        most = max_draft_len if params.max_draft_len is None else params.max_draft_len
        self.py_disable_speculative_decoding = not params.speculate or most == 0
        self.py_draft_state = DraftState.fresh(max_draft_len, most)
        self.num_preemptions = 0
        self.logprobs = None if params.logprobs is None else Logprobs(decode=decode_token)
        """Log-probabilities of the tokens generated so far; None: not requested."""
        self.prompt_logprobs = (
            None if params.prompt_logprobs is None else PromptLogprobs(decode_token)
        )
        """Log-probabilities of the prompt tokens scored so far; None: not requested."""
        self._unreported = self.prompt_logprobs
        self.sampling_kind = self.facts.sampling_kind
        self.max_length = self.facts.stop.max_length
        """Maximum number of tokens, prompt included; no KV row past it is ever needed."""
        self.context_chunk_size = 0

    # ---- tokens -----------------------------------------------------------------------------

    def first_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return `prompt_logprobs` for the first event, then None."""
        logprobs, self._unreported = self._unreported, None
        return logprobs

    def take_back_tokens(self, count: int) -> None:
        """Drop the last output tokens, whose text has not been returned yet, and their text.

        Raises:
            ExecutorError: more tokens than were generated, or the request has finished.
        """
        num_emitted = len(self.tokens) - self.py_orig_prompt_len
        if self.is_finished or not 0 <= count <= num_emitted:
            state = "finished" if self.is_finished else "running"
            raise ExecutorError(
                f"request {self.request_id}: expected 0 to {num_emitted} tokens of a running "
                f"request to take back, got {count} of a {state} one"
            )
        del self.tokens[len(self.tokens) - count :]
        if self.text is not None:
            self.text.keep(self.output_token_ids)

    # ---- state ------------------------------------------------------------------------------

    @property
    def is_generating(self) -> bool:
        """Whether prefill is complete."""
        return self.state is RequestState.GENERATION_IN_PROGRESS

    @property
    def error(self) -> str | None:
        """The error of a failed request, else None."""
        if self.finish_reason is not FinishReason.ERROR:
            return None
        return self.py_error or "the sampler ended it without a reason"

    @property
    def stop_reason(self) -> int | str | None:
        """The id of ``stop_token_ids`` or the stop string that ended the request, else None."""
        if self.finish_reason not in (FinishReason.STOP_WORDS, FinishReason.END_ID):
            return None
        if self.text is not None and self.text.stop_string is not None:
            return self.text.stop_string
        if self.finish_reason is FinishReason.STOP_WORDS:
            return None
        token = self.tokens[-1]
        is_stop_id = token in self.params.stop_token_ids and token not in self._eos_ids
        return token if is_stop_id else None

    def fail(self, why: str) -> None:
        """End the request with an error, unless it has finished."""
        if not self.is_finished:
            self.py_error = why
            self.finish_by(FinishReason.ERROR)

    def pause(self) -> None:
        """Preempt: prompt and output will be prefilled again, results in flight are dropped.

        Raises:
            ExecutorError: the request has finished.
        """
        if self.is_finished:
            raise ExecutorError(f"request {self.request_id} has finished and cannot be paused")
        self.state = RequestState.CONTEXT_INIT
        self.py_epoch += 1
        self.num_preemptions += 1
        self.py_draft_tokens = []
        self.py_batch_idx = None
        self.context_length = len(self.tokens)
        self.context_current_position = 0
        self.context_chunk_size = 0

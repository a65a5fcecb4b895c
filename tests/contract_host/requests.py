"""Requests and batches as the executor holds them: preemption and reused prefixes."""

from __future__ import annotations

from typing import Any

from tests.trtllm_request import FinishReason, LlmRequestState, make_batch
from tests.trtllm_request import LlmRequest as BaseRequest

CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
COMPLETE = LlmRequestState.GENERATION_COMPLETE


class LlmRequest(BaseRequest):
    """A request that can start over, and whose prompt may begin in reused blocks."""

    def __init__(
        self, request_id: int, prompt: list[int], max_new_tokens: int, **options: Any
    ) -> None:
        super().__init__(request_id, prompt, max_new_tokens=max_new_tokens, **options)
        self.prepopulated_prompt_len = 0

    @property
    def is_finished(self) -> bool:
        return self.state is COMPLETE

    @property
    def is_first_context_chunk(self) -> bool:
        """Also where the first chunk begins after tokens that were found in the cache."""
        return self.context_current_position == self.prepopulated_prompt_len

    def add_new_token(self, token: int, beam: int) -> int:
        assert token >= 0, f"request {self.request_id} got {token}"
        return super().add_new_token(token, beam)

    def finish_by(self, reason: Any, beam: int) -> None:
        """Any enum with the host's names does: packages bring their own."""
        super().finish_by(FinishReason[reason.name], beam)

    def pause(self) -> None:
        """What was generated counts as prompt; drafts and placement are stale from here on."""
        self.state = CONTEXT_INIT
        self.py_prompt_len = self.context_chunk_size = len(self._tokens)
        self.context_current_position = self.prepopulated_prompt_len = 0
        self.py_seq_slot = None


__all__ = ["FinishReason", "LlmRequest", "make_batch"]

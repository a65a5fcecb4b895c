"""Requests that are tokenised later, by one thread at a time; waits that would deadlock raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from typing_extensions import Self

from mtp_plugin.errors import RequestError
from mtp_plugin.hosts.embedded.request import LlmRequest

T = TypeVar("T")


class TokenizerLock:
    """Lets one thread at a time use a tokenizer, which need not be thread-safe.

    A tokenizer's methods may call the executor again: a re-entrant use raises an error.

    Args:
        is_stepping_here: whether this thread runs a step. A step never waits for the lock, because
            the thread that holds it may be waiting for steps.
    """

    def __init__(self, is_stepping_here: Callable[[], bool]) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mtp-tokenising")
        """Tokenises for event loops."""
        self._is_stepping_here = is_stepping_here
        self._lock = threading.RLock()
        self._holder: int | None = None

    def run(self, request_id: int, work: Callable[[], T]) -> T:
        """Call ``work``, which uses the tokenizer for a request, with the lock held.

        Raises:
            RequestError: this thread already holds the lock, or it runs a step while another
                thread holds it.
        """
        self.check_not_held(request_id)
        may_wait = not self._is_stepping_here()
        taken: list[bool] = []
        try:
            # one operation: a signal handler that raises between two would leave the lock held
            taken.extend(map(self._lock.acquire, (may_wait,)))
            if True not in taken:
                raise RequestError(
                    f"request {request_id}: another thread tokenises, a step cannot wait for it: "
                    f"expected token ids"
                )
            self._holder = threading.get_ident()
            return work()
        finally:
            if True in taken:
                self._holder = None
                self._lock.release()

    def check_not_held(self, request_id: int) -> None:
        """Refuse to use the tokenizer within one of its methods.

        Raises:
            RequestError: this thread already holds the lock.
        """
        if self._holder == threading.get_ident():
            raise RequestError(
                f"request {request_id}: this thread tokenises already: expected token ids of a "
                f"tokenizer's own methods, or of a signal's handler"
            )


class Submission:
    """Requests that enter the executor together, once they are made."""

    def __init__(self, request_ids: Sequence[int]) -> None:
        self.request_ids = tuple(request_ids)
        self.made: Future[list[LlmRequest]] = Future()
        self._makers: dict[None, tuple[int, object]] = {}

    @classmethod
    def of(cls, requests: Sequence[LlmRequest]) -> Self:
        """Return the submission of requests that are made."""
        submission = cls([request.request_id for request in requests])
        submission.made.set_result(list(requests))
        return submission

    def claim(self) -> bool:
        """Keep other threads from making the requests; False: one has begun to."""
        claim = (threading.get_ident(), object())
        return self._makers.setdefault(None, claim) is claim  # atomic, also for signal handlers

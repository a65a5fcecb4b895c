"""Serialises calls to a tokenizer's ``encode``; calls that would deadlock raise an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mtp_plugin.errors import RequestError

T = TypeVar("T")


class TokenizerLock:
    """Lets one thread at a time use a tokenizer, which need not be thread-safe.

    A tokenizer's methods may call the executor again: a re-entrant use raises an error.

    Args:
        is_stepping_here: whether this thread runs a step. A step never waits for the lock, because
            the thread that holds it may be waiting for steps.
    """

    def __init__(self, is_stepping_here: Callable[[], bool]) -> None:
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
        # a step must not wait: the thread that tokenises may be waiting for it
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

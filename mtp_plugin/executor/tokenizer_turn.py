"""One thread at a time asks a tokenizer to encode; who cannot wait for its turn is told so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mtp_plugin.errors import RequestError

T = TypeVar("T")


class TokenizerTurn:
    """Tokenizers need not bear several threads, and their methods may call the executor again.

    Args:
        is_stepping_here: whether this thread runs a step, which must not wait for a tokenizer that
            may be waiting for steps.
    """

    def __init__(self, is_stepping_here: Callable[[], bool]) -> None:
        self._is_stepping_here = is_stepping_here
        self._lock = threading.RLock()
        self._holder: int | None = None

    def take(self, request_id: int, work: Callable[[], T]) -> T:
        """Do what asks the tokenizer for a request when nobody else does.

        Raises:
            RequestError: this thread asks it already, or runs a step while another one asks it.
        """
        self.expect_outside(request_id)
        # a step may not wait: who tokenises may wait for it
        may_wait = not self._is_stepping_here()
        taken: list[bool] = []
        try:
            # one operation: a signal's handler that raises between two would leave the lock taken
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

    def expect_outside(self, request_id: int) -> None:
        """Refuse to ask the tokenizer within one of its methods.

        Raises:
            RequestError: this thread asks it already.
        """
        if self._holder == threading.get_ident():
            raise RequestError(
                f"request {request_id}: this thread tokenises already: expected token ids of a "
                f"tokenizer's own methods, or of a signal's handler"
            )

"""Requests of a submitted prompt that is tokenised later, possibly in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.request import LlmRequest


class PendingRequest:
    """The requests of a prompt, made once by the first thread that needs them; others wait.

    Args:
        request_ids: their ids.
        make: returns the requests or raises `RequestError`.
        check_not_held: see `TokenizerLock.check_not_held`.
    """

    def __init__(
        self,
        request_ids: Sequence[int],
        make: Callable[[], list[LlmRequest]],
        check_not_held: Callable[[], None],
    ) -> None:
        self.request_ids = tuple(request_ids)
        self._make = make
        self._check_not_held = check_not_held
        self._made: Future[list[LlmRequest]] = Future()
        self._makers: dict[None, tuple[int, object]] = {}

    @classmethod
    def of(cls, requests: list[LlmRequest]) -> PendingRequest:
        """Wrap requests that exist already."""
        ids = [request.request_id for request in requests]
        pending = cls(ids, lambda: requests, lambda: None)
        pending.result()
        return pending

    @property
    def request_id(self) -> int:
        """Id of the first request."""
        return self.request_ids[0]

    @property
    def is_made(self) -> bool:
        """Whether there is a request or an error."""
        return self._made.done()

    def make(self) -> None:
        """Make the request in this thread, unless a thread has begun to."""
        if not self._claim():
            return
        try:
            requests = self._make()
        except BaseException as error:
            is_error = isinstance(error, Exception)
            message = f"request {self.request_id}: its tokenising was interrupted"
            self._made.set_exception(error if is_error else ExecutorError(message))
            if not is_error:
                raise
            del self  # the error refers to this frame
        else:
            self._made.set_result(requests)

    def on_made(self, call: Callable[[Future[list[LlmRequest]]], object]) -> None:
        """Call ``call`` when there is a request or an error, in the thread that made it; at once if
        there is one already."""
        self._made.add_done_callback(call)

    def abandon(self) -> bool:
        """Prevent the request from being made; False: a thread has begun to make it."""
        return self._claim()

    def result(self) -> list[LlmRequest]:
        """Return the requests: make them in this thread, or wait for the thread that makes it.

        Raises:
            RequestError: the request cannot be served, or this thread tokenises and cannot wait.
        """
        if not self.is_made:
            self._check_not_held()
            self._expect_another_maker()
            self.make()
        return self._made.result()

    async def result_async(self, pool: Executor) -> list[LlmRequest]:
        """Return the requests, made by a thread of ``pool`` without blocking the event loop.

        Raises:
            RequestError: see :meth:`result`.
        """
        if not self.is_made:
            self._check_not_held()
            loop = asyncio.get_running_loop()
            arrived = asyncio.Event()

            def wake(_: object) -> None:
                with suppress(RuntimeError):  # the loop was closed, with all readers
                    loop.call_soon_threadsafe(arrived.set)

            pool.submit(self.make)
            self.on_made(wake)
            await arrived.wait()
        return self._made.result()

    def _claim(self) -> bool:
        """Whether this call makes the request; atomic for threads and signal handlers."""
        claim = (threading.get_ident(), object())
        return self._makers.setdefault(None, claim) is claim

    def _expect_another_maker(self) -> None:
        maker = self._makers.get(None)
        if maker is not None and maker[0] == threading.get_ident() and not self.is_made:
            raise ExecutorError(
                f"request {self.request_id}: this thread is making it, nothing can wait for it "
                f"within that"
            )

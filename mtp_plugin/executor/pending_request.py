"""A request that is asked for, while its texts wait for the tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

from mtp_plugin.errors import ExecutorError
from mtp_plugin.executor.request import LlmRequest


class PendingRequest:
    """Made once, by whichever thread comes first; others wait for it.

    Args:
        request_id: that it will have.
        make: the request, or `RequestError`.
        expect_outside: see `TokenizerTurn.expect_outside`.
    """

    def __init__(
        self,
        request_id: int,
        make: Callable[[], LlmRequest],
        expect_outside: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self._make = make
        self._expect_outside = expect_outside
        self._made: Future[LlmRequest] = Future()
        self._makers: dict[None, tuple[int, object]] = {}

    @classmethod
    def of(cls, request: LlmRequest) -> PendingRequest:
        """One that is made already."""
        pending = cls(request.request_id, lambda: request, lambda: None)
        pending.now()
        return pending

    @property
    def is_made(self) -> bool:
        """Whether there is a request, or an error in its place."""
        return self._made.done()

    def make(self) -> None:
        """Make it in this thread, unless a thread has begun to."""
        if not self._claim():
            return
        try:
            request = self._make()
        except BaseException as error:
            is_error = isinstance(error, Exception)
            told = f"request {self.request_id}: its tokenising was interrupted"
            self._made.set_exception(error if is_error else ExecutorError(told))
            if not is_error:
                raise
            del self  # the error refers to this frame
        else:
            self._made.set_result(request)

    def on_made(self, call: Callable[[Future[LlmRequest]], object]) -> None:
        """Call it once there is a request or an error, in the thread that made it; at once where
        there is."""
        self._made.add_done_callback(call)

    def give_up(self) -> bool:
        """Have nobody make it; False: it was begun."""
        return self._claim()

    def now(self) -> LlmRequest:
        """The request, made here or waited for.

        Raises:
            RequestError: why there is none, or this thread tokenises and cannot wait.
        """
        if not self.is_made:
            self._expect_outside()
            self._expect_another_maker()
            self.make()
        return self._made.result()

    async def soon(self, pool: Executor) -> LlmRequest:
        """The request, made by a thread of ``pool``; the event loop goes on.

        Raises:
            RequestError: as :meth:`now`.
        """
        if not self.is_made:
            self._expect_outside()
            loop = asyncio.get_running_loop()
            arrived = asyncio.Event()

            def tell(_: object) -> None:
                with suppress(RuntimeError):  # the loop was closed: nobody waits there
                    loop.call_soon_threadsafe(arrived.set)

            pool.submit(self.make)
            self.on_made(tell)
            await arrived.wait()
        return self._made.result()

    def _claim(self) -> bool:
        """Whether this call may make it: one step for threads and signals' handlers."""
        claim = (threading.get_ident(), object())
        return self._makers.setdefault(None, claim) is claim

    def _expect_another_maker(self) -> None:
        maker = self._makers.get(None)
        if maker is not None and maker[0] == threading.get_ident() and not self.is_made:
            raise ExecutorError(
                f"request {self.request_id}: this thread is making it, nothing can wait for it "
                f"within that"
            )

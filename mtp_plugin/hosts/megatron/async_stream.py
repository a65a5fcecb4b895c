"""Megatron-Core's ``AsyncStream``: results of one request for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

STOP_ITERATION = Exception()


class AsyncStream:
    """A queue of results, written by any thread and read in an event loop.

    Args:
        cancel: called without arguments when the reader stops early.
        loop: of the reader; None: the running loop, else a new one, which becomes the thread's.
    """

    def __init__(
        self,
        request_id: int,
        cancel: Callable[..., object],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._finished = False
        self._loop = _current_loop() if loop is None else loop

    def put(self, item: Any) -> None:
        """Add a result; does nothing after `finish`."""
        if not self._finished:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream; ``exception`` is raised in the reader."""
        if not self._finished:
            self._finished = True
            last = exception if _is_raisable(exception) else STOP_ITERATION
            self._loop.call_soon_threadsafe(self._queue.put_nowait, last)

    @property
    def finished(self) -> bool:
        """Whether `finish` was called."""
        return self._finished

    async def generator(self) -> AsyncGenerator[Any, None]:
        """Iterate over the results."""
        try:
            while True:
                result = await self._queue.get()
                if _is_raisable(result):
                    if result is STOP_ITERATION:
                        return
                    raise result
                yield result
        except GeneratorExit:
            self._cancel()
            raise asyncio.CancelledError from None


def _current_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set__current_loop() if loop is None else loop
        return loop


def _is_raisable(value: object) -> bool:
    return isinstance(value, BaseException) or (
        isinstance(value, type) and issubclass(value, BaseException)
    )

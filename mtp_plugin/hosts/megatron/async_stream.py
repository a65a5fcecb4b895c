"""Megatron-Core's ``AsyncStream``: results of one request for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

STOP_ITERATION = Exception()


class AsyncStream:
    """A queue of results, written by any thread and read in an event loop.

    Args:
        cancel: called without arguments when the reader stops early.
        loop: of the reader; None: the running loop, else the one in which `generator` is iterated.
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
        self._loop = running_loop() if loop is None else loop
        self._lock = threading.Lock()  # an item may be added while the loop becomes known

    def put(self, item: Any) -> None:
        """Add a result; does nothing after `finish` or after the reader's loop was closed."""
        if not self._finished:
            self._add(item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream; ``exception`` is raised in the reader."""
        if not self._finished:
            self._finished = True
            last = exception if _is_raisable(exception) else STOP_ITERATION
            self._add(last)

    def _add(self, item: Any) -> None:
        with self._lock:
            if self._loop is None:  # nothing waits for the queue yet
                self._queue.put_nowait(item)
            else:
                try:
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
                except RuntimeError:
                    if not self._loop.is_closed():
                        raise
                    self._finished = True  # no reader is left

    @property
    def finished(self) -> bool:
        """Whether `finish` was called, or the reader's loop was closed before a result."""
        return self._finished

    async def generator(self) -> AsyncGenerator[Any, None]:
        """Iterate over the results."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
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


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_raisable(value: object) -> bool:
    return isinstance(value, BaseException) or (
        isinstance(value, type) and issubclass(value, BaseException)
    )

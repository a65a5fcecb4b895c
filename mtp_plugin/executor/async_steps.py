"""Asynchronous iteration over requests: one task per event loop runs the steps in a thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.pending_request import PendingRequest
from mtp_plugin.executor.py_executor import StepEvent


def is_in_a_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class ResultLog:
    """All results of a request, kept for any number of readers."""

    def __init__(self) -> None:
        self.results: list[StepResults] = []
        self.wakes: list[Callable[[], None]] = []
        """Called after every result, in the thread that runs the step."""

    def put(self, results: StepResults) -> None:
        """Append results and wake the readers."""
        self.results.append(results)
        for wake in self.wakes.copy():
            wake()


class AsyncEventStream(AsyncIterator[StepEvent]):
    """Asynchronous iterator over the events of one request, as `LLM.stream_async` returns.

    The request is cancelled when the iteration is left early, its task is cancelled, the event loop
    ends, or the iterator is garbage-collected.
    """

    def __init__(self, pending: PendingRequest, steps: AsyncSteps, owner: object) -> None:
        self._pending = pending
        self._steps = steps
        self._owner = owner  # kept alive by the iteration
        self._events = steps.run(pending)

    async def __anext__(self) -> StepEvent:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Cancel the request and wait until its resources are freed."""
        await self._events.aclose()
        if self._pending.is_made:
            await self._steps.cancel_and_wait(self._pending)

    def __del__(self) -> None:
        self._steps.drop(self._pending)


class AsyncSteps:
    """Runs requests of coroutines, in any number of event loops, through one dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            weakref.WeakKeyDictionary()
        )
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="mtp-tokenising")
        """Separate from the event loop's default threads, which run the steps."""

    async def run(self, pending: PendingRequest) -> AsyncGenerator[StepEvent, None]:
        """Start a request and yield its events; leaving the iteration early cancels it.

        Raises:
            RequestError: the prompt or an option cannot be served.
            ExecutorError: the executor was shut down, or a step runs in this thread.
        """
        self._dispatcher.check_can_wait()
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()

        def on_result(results: StepResults) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, results)
            except RuntimeError:  # the loop was closed, with all readers
                self._cancel(pending)

        try:
            requests = await pending.result_async(self._tokenising)
            self._dispatcher.start(requests, on_result)
            unfinished = len(requests)
            while unfinished:
                for event in events_of(await self._next_results(arrived)):
                    unfinished -= event.finish_reason is not None
                    yield event
        finally:
            # without waiting, for which a closing loop leaves no time
            self.drop(pending)

    async def cancel_and_wait(self, pending: PendingRequest) -> None:
        """Cancel requests and wait until their resources are freed."""
        self._cancel(pending)
        is_held = any(map(self._dispatcher.holds_id, pending.request_ids))
        if is_held and not self._dispatcher.is_stepping_here:
            await asyncio.to_thread(self._dispatcher.wait_for_step)

    def drop(self, pending: PendingRequest) -> None:
        """Cancel a request without readers, without waiting."""
        if pending.abandon():
            for request_id in pending.request_ids:
                self._dispatcher.forget(request_id)
        else:
            self._cancel(pending)

    def _cancel(self, pending: PendingRequest) -> None:
        for request_id in pending.request_ids:
            self._dispatcher.cancel_id(request_id)

    async def read(
        self,
        log: ResultLog,
        pending: PendingRequest,
        owner: object,
    ) -> AsyncIterator[StepEvent]:
        """Yield all events of a request from the first; leaving early does not cancel it.

        Args:
            owner: an object kept alive by the iteration.
        """
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, with all readers
                loop.call_soon_threadsafe(arrived.put_nowait, [])

        try:
            self._dispatcher.check_can_wait()
            requests = await pending.result_async(self._tokenising)
            log.wakes.append(wake)
            number, unfinished = 0, len(requests)
            while unfinished:
                while number == len(log.results):
                    await self._next_results(arrived)
                for event in events_of(log.results[number]):
                    unfinished -= event.finish_reason is not None
                    yield event
                number += 1
        finally:
            if wake in log.wakes:
                log.wakes.remove(wake)
            del owner  # a kept exception keeps this frame, see RequestHandle._read_to_its_end

    def start_soon(self, pending: PendingRequest) -> None:
        """In a running event loop, schedule tokenising and steps; elsewhere do nothing, because the
        thread that waits for the result runs them."""
        if not is_in_a_loop():
            return
        loop = asyncio.get_running_loop()
        # in a signal handler, submitting to the pool here could deadlock on the pool's own lock
        loop.call_soon_threadsafe(self._start_in, loop, pending)

    def _start_in(self, loop: asyncio.AbstractEventLoop, pending: PendingRequest) -> None:
        if pending.is_made:
            self._step_in(loop)
        else:
            pending.on_made(partial(self._step_soon_in, loop))
            self._tokenising.submit(pending.make)

    def _step_soon_in(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: the thread that waits runs the steps
            loop.call_soon_threadsafe(self._step_in, loop)

    def _step_in(self, loop: asyncio.AbstractEventLoop) -> None:
        # a loop that runs within a step would wait, at its end, for a step in another thread
        if not self._dispatcher.is_stepping_here:
            self._driver_of(loop)

    async def _next_results(self, arrived: asyncio.Queue[StepResults | None]) -> StepResults:
        """Wait for the next results, while a task of the event loop runs the steps.

        Raises:
            ExecutorError: a step runs in this thread.
        """
        self._dispatcher.check_can_wait()
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            arrived.put_nowait(None)

        while True:
            driver = self._driver_of(loop)
            driver.add_done_callback(wake)
            try:
                results = await arrived.get()
            finally:
                driver.remove_done_callback(wake)
            if results is not None:
                return results

    def _driver_of(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        driver = self._drivers.get(loop)
        if driver is None or driver.done():
            driver = loop.create_task(self._drive())
            driver.add_done_callback(self._forget_driver)
            self._drivers[loop] = driver
        return driver

    def _forget_driver(self, driver: asyncio.Task[None]) -> None:
        """Drop the task, which would keep its event loop alive."""
        loop = driver.get_loop()
        if self._drivers.get(loop) is driver:
            del self._drivers[loop]

    async def _drive(self) -> None:
        """Run steps while there is work, each in a thread, without blocking the event loop."""
        while self._dispatcher.has_work:
            await asyncio.to_thread(self._dispatcher.advance_and_drain)

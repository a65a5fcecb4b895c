"""Steps for coroutines: one task of their event loop runs them, each in a thread."""

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


class Told:
    """All that steps gave a request, kept for any number of readers."""

    def __init__(self) -> None:
        self.results: list[StepResults] = []
        self.wakes: list[Callable[[], None]] = []
        """Called behind every result, in the thread that steps."""

    def put(self, results: StepResults) -> None:
        """Keep results, and wake who waits for some."""
        self.results.append(results)
        for wake in self.wakes.copy():
            wake()


class AsyncEventStream(AsyncIterator[StepEvent]):
    """What `LLM.stream_async` gives: the events of one request.

    Its end is that of its request, whichever way it comes: leaving the iteration, a cancelled task,
    the end of the event loop, or that nobody holds it any more.
    """

    def __init__(self, pending: PendingRequest, steps: AsyncSteps, owner: object) -> None:
        self._pending = pending
        self._steps = steps
        self._owner = owner  # it lives as long as the iteration
        self._events = steps.run(pending)

    async def __anext__(self) -> StepEvent:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Cancel the request, and wait for a running step until nothing of it is left."""
        await self._events.aclose()
        if self._pending.is_made:
            await self._steps.give_back(self._pending.request_id)

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
        """Apart from the event loop's own threads, which step meanwhile."""

    async def run(self, pending: PendingRequest) -> AsyncGenerator[StepEvent, None]:
        """Start a request and give its events; leaving the iteration early cancels it.

        Raises:
            RequestError: its texts cannot be served.
            ExecutorError: the executor was shut down, or a step runs in this thread.
        """
        self._dispatcher.expect_to_wait()
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()

        def on_result(results: StepResults) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, results)
            except RuntimeError:  # the loop was closed: nobody waits
                self._dispatcher.cancel_id(pending.request_id)

        try:
            request = await pending.soon(self._tokenising)
            self._dispatcher.start([request], on_result)
            finished = False
            while not finished:
                for event in events_of(await self._driven(arrived)):
                    finished = event.finish_reason is not None
                    yield event
        finally:
            # without waiting: a loop that ends gives nobody time for that
            self.drop(pending)

    async def give_back(self, request_id: int) -> None:
        """Cancel a request, and wait for a running step until nothing of it is left."""
        self._dispatcher.cancel_id(request_id)
        if self._dispatcher.holds_id(request_id) and not self._dispatcher.is_stepping_here:
            await asyncio.to_thread(self._dispatcher.wait_for_the_step)

    def drop(self, pending: PendingRequest) -> None:
        """Cancel a request that nobody can hear of any more, without waiting."""
        if pending.give_up():
            self._dispatcher.forget(pending.request_id)
        else:
            self._dispatcher.cancel_id(pending.request_id)

    async def read(
        self,
        told: Told,
        pending: PendingRequest,
        owner: object,
    ) -> AsyncIterator[StepEvent]:
        """Yield all events of a request, from the first to the last; leaving early ends nothing.

        Args:
            owner: an object that must live as long as the iteration.
        """
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, with every reader in it
                loop.call_soon_threadsafe(arrived.put_nowait, [])

        try:
            self._dispatcher.expect_to_wait()
            await pending.soon(self._tokenising)
            told.wakes.append(wake)
            number, finished = 0, False
            while not finished:
                while number == len(told.results):
                    await self._driven(arrived)
                for event in events_of(told.results[number]):
                    finished = event.finish_reason is not None
                    yield event
                number += 1
        finally:
            if wake in told.wakes:
                told.wakes.remove(wake)
            del owner  # a kept exception keeps this frame, see RequestHandle._read_to_its_end

    def begin(self, pending: PendingRequest) -> None:
        """Tokenise and step what was handed in, where an event loop runs; elsewhere who waits for
        it does."""
        if not is_in_a_loop():
            return
        loop = asyncio.get_running_loop()
        # a signal's handler wakes no loop, and its thread may stand in the pool's own lines
        loop.call_soon_threadsafe(self._begin_in, loop, pending)

    def _begin_in(self, loop: asyncio.AbstractEventLoop, pending: PendingRequest) -> None:
        if pending.is_made:
            self._step_in(loop)
        else:
            pending.on_made(partial(self._step_soon_in, loop))
            self._tokenising.submit(pending.make)

    def _step_soon_in(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: who waits for it steps
            loop.call_soon_threadsafe(self._step_in, loop)

    def _step_in(self, loop: asyncio.AbstractEventLoop) -> None:
        # a loop within a step would wait, at its end, for another thread's step
        if not self._dispatcher.is_stepping_here:
            self._driver_of(loop)

    async def _driven(self, arrived: asyncio.Queue[StepResults | None]) -> StepResults:
        """The next results, while some task of the event loop steps; another one where it ended.

        Raises:
            ExecutorError: a step runs in this thread.
        """
        self._dispatcher.expect_to_wait()
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
        """A task holds its loop, which could not go while the task is kept for it."""
        loop = driver.get_loop()
        if self._drivers.get(loop) is driver:
            del self._drivers[loop]

    async def _drive(self) -> None:
        """Step while there is work, each time in a thread, so that the event loop goes on."""
        while self._dispatcher.has_work:
            await asyncio.to_thread(self._dispatcher.advance_and_drain)

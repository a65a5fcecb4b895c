"""Steps for coroutines: one task of their event loop runs them, each in a thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


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


class AsyncSteps:
    """Runs requests of coroutines, in any number of event loops, through one dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            weakref.WeakKeyDictionary()
        )

    async def run(
        self,
        request: LlmRequest,
        owner: object,  # noqa: ARG002 - it lives as long as the iteration
    ) -> AsyncIterator[StepEvent]:
        """Start a request and give its events; leaving the iteration early cancels it.

        Raises:
            ExecutorError: the executor was shut down.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()

        def on_result(results: StepResults) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, results)
            except RuntimeError:  # the loop was closed: nobody waits
                self._dispatcher.cancel([request])

        self._dispatcher.start([request], on_result)
        try:
            finished = False
            while not finished:
                for event in events_of(await self._driven(arrived)):
                    finished = event.finish_reason is not None
                    yield event
        finally:
            self._dispatcher.cancel([request])
            while self._dispatcher.holds([request]):
                await asyncio.to_thread(self._dispatcher.advance)

    async def read(
        self,
        told: Told,
        owner: object,  # noqa: ARG002 - it lives as long as the iteration
    ) -> AsyncIterator[StepEvent]:
        """All events of a request, from its first to its last; leaving early changes nothing."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[StepResults | None] = asyncio.Queue()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits there
                loop.call_soon_threadsafe(arrived.put_nowait, [])

        told.wakes.append(wake)
        try:
            number, finished = 0, False
            while not finished:
                while number == len(told.results):
                    await self._driven(arrived)
                for event in events_of(told.results[number]):
                    finished = event.finish_reason is not None
                    yield event
                number += 1
        finally:
            told.wakes.remove(wake)

    def begin(self) -> None:
        """Step what was handed in, where an event loop runs; elsewhere who waits for it does."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._driver_of(loop)

    async def _driven(self, arrived: asyncio.Queue[StepResults | None]) -> StepResults:
        """The next results, while some task of the event loop steps; another one where it ended."""
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
            await asyncio.to_thread(self._dispatcher.advance)

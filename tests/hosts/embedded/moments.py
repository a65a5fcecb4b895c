"""Calls of an executor at moments when something of it already runs.

``python -m tests.hosts.embedded.moments CHECKPOINT`` prints a line of JSON for each case: what
became of the inner call, what of the call around it, and whether everything was given back. One
child process runs all cases; after a case that hangs or ends it, another runs the rest.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model

TIME_LIMIT_S = 20.0
GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=110, ignore_eos=True)


class Room:
    """An executor, its requests, and one call to make at the moment that a case names."""

    def __init__(self, model: Any, path: str) -> None:
        self.at: str | None = None
        self.llm = LLM(
            {
                "model": path,
                "device": "cpu",
                "max_seq_len": 128,
                "speculative_config": {"decoding_type": "MTP", "max_draft_len": 2},
                "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 1024},
            },
            model=model,
            tokenizer=Letters(self),
            stop_callback=self.on_stop,
        )
        engine = self.llm.executor.engine
        forward = engine.forward

        def watched(*args: Any) -> Any:
            self.on_step()
            return forward(*args)

        engine.forward = watched  # type: ignore[method-assign]

    def begin(self, call: Callable[[Room], Any]) -> None:
        """Submit the requests of a case that makes this call."""
        self.call: Callable[[Room], Any] | None = call
        self.inner = "never called"
        self.on_step: Callable[[], object] = lambda: self.reach("step")
        self.other = self.llm.submit([7, 8], LONG)
        self.stream = self.llm.stream([[1, 2, 3]], GREEDY)

    def reach(self, moment: str) -> None:
        """Make the call where this is its moment."""
        if moment == self.at:
            self.make_call()

    def make_call(self, *_: object) -> None:
        """The call, the first time."""
        call, self.call = self.call, None
        if call is None:
            return
        try:
            call(self)
        except BaseException as error:
            self.inner = type(error).__name__
            raise
        self.inner = "worked"

    def on_stop(self, _: object) -> list[int]:
        self.reach("stop callback")
        return []

    def read(self) -> None:
        """The stream to its end."""
        for _ in self.stream:
            pass

    def end(self) -> str:
        """The final state."""
        llm, self.at = self.llm, None
        self.on_step = lambda: None
        gc.enable()
        self.other.abort()
        self.stream.close()
        del self.other
        if not llm.executor.is_closed and len(llm.generate([1, 2], GREEDY).token_ids) != 5:
            return "broken"
        deadline = time.monotonic() + TIME_LIMIT_S / 4
        while llm.blocks.num_free_blocks != llm.blocks.num_blocks or llm.executor.has_work:
            if time.monotonic() > deadline:
                return "leaked"
            time.sleep(1e-3)
        return "shut down" if llm.executor.is_closed else "goes on"


class Letters:
    """A letter is a token."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        self.room.reach("encode")
        return [ord(letter) % 100 for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        self.room.reach("decode")
        return "".join(chr(33 + token % 90) for token in token_ids)


# --- calls ---


def _result_of_another(room: Room) -> None:
    room.other.result()


def _submit_and_wait(room: Room) -> None:
    room.llm.submit([4, 5], GREEDY).result()


def _abort(room: Room) -> None:
    if not room.llm.abort(room.other.request_id):
        raise LookupError("nothing to abort")


def _await_another(room: Room) -> None:
    async def wait() -> None:
        await room.other

    asyncio.run(wait())


def _submit_in_a_loop(room: Room) -> None:
    async def submit() -> None:
        room.other = room.llm.submit([4, 5], GREEDY)
        await asyncio.sleep(0)

    asyncio.run(submit())


def _stream_async(room: Room) -> None:
    async def read() -> None:
        async for _ in room.llm.stream_async([4, 5], GREEDY):
            break

    asyncio.run(read())


def _submit_text_in_a_loop(room: Room) -> None:
    async def submit() -> None:
        await room.llm.submit("bad", GREEDY)

    asyncio.run(submit())


def _async_with(room: Room) -> None:
    async def leave() -> None:
        async with room.llm:
            pass

    asyncio.run(leave())


CALLS: dict[str, Callable[[Room], Any]] = {
    "generate": lambda room: room.llm.generate([4, 5], GREEDY),
    "generate text": lambda room: room.llm.generate("abc", GREEDY),
    "next of a stream": lambda room: next(room.llm.stream([4, 5], GREEDY)),
    "next of the stream": lambda room: next(room.stream),
    "close the stream": lambda room: room.stream.close(),
    "submit": lambda room: room.llm.submit([4, 5], GREEDY),
    "submit text": lambda room: room.llm.submit("abc", GREEDY),
    "submit in a loop": _submit_in_a_loop,
    "submit text in a loop": _submit_text_in_a_loop,
    "submit and wait": _submit_and_wait,
    "result of another": _result_of_another,
    "await another": _await_another,
    "generate_async": lambda room: asyncio.run(room.llm.generate_async([4, 5], GREEDY)),
    "generate_async text": lambda room: asyncio.run(room.llm.generate_async("bad", GREEDY)),
    "stream_async": _stream_async,
    "abort": _abort,
    "shutdown": lambda room: room.llm.shutdown(),
    "async with": _async_with,
}
LOOPED = {"submit in a loop", "submit text in a loop", "await another", "generate_async"}
LOOPED |= {"generate_async text", "stream_async", "async with"}
"""Calls with an event loop of their own."""


# --- moments ---


def _within(moment: str) -> Callable[[Room], None]:
    def around(room: Room) -> None:
        room.at = moment
        room.read()

    return around


def _encode(room: Room) -> None:
    room.at = "encode"
    room.llm.generate("xyz", GREEDY)


def _signal_in_a_step(room: Room) -> None:
    """The next step sends the main thread, which waits for it, a signal whose handler calls."""
    main_thread = threading.get_ident()
    signal.signal(signal.SIGALRM, room.make_call)

    def step_slowly() -> None:
        room.on_step = lambda: None
        signal.pthread_kill(main_thread, signal.SIGALRM)
        time.sleep(0.02)

    room.on_step = step_slowly


def _signal(room: Room) -> None:
    _signal_in_a_step(room)
    room.read()


def _signal_in_a_loop(room: Room) -> None:
    async def main() -> None:
        _signal_in_a_step(room)
        await room.llm.generate_async([9, 9], GREEDY)

    asyncio.run(main())


def _coroutine(room: Room) -> None:
    """An event loop makes the call while the engine thread steps."""

    async def main() -> None:
        async for _ in room.llm.stream_async([9, 9], GREEDY):
            room.make_call()

    asyncio.run(main())


def _consumer(room: Room) -> None:
    for _ in room.stream:
        room.make_call()


def _collected(room: Room) -> None:
    """The collector makes the call within a step."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with suppress(Exception):
                room.make_call()

    gc.disable()
    Cycle()
    room.on_step = lambda: room.call and gc.collect()
    room.read()


MOMENTS: dict[str, Callable[[Room], None]] = {
    "step": _within("step"),
    "decode": _within("decode"),
    "stop callback": _within("stop callback"),
    "encode": _encode,
    "signal": _signal,
    "signal in a loop": _signal_in_a_loop,
    "coroutine": _coroutine,
    "consumer": _consumer,
    "collected": _collected,
}
ALIKE = ("decode", "stop callback", "collected", "signal in a loop")
"""Moments of which three calls are enough; all calls are made within a step."""
FEW = (
    "generate",
    "abort",
    "shutdown",
    "generate text",
    "submit text in a loop",
    "close the stream",
)
IN_A_LOOP = ("coroutine", "signal in a loop")
"""Moments where Python itself refuses another event loop."""


def cases() -> list[tuple[str, str]]:
    """(Moment, call) of every case."""
    return [
        (moment, call)
        for moment in MOMENTS
        for call in (CALLS if moment == "step" else FEW[:3] if moment in ALIKE else FEW)
        if not (moment in IN_A_LOOP and call in LOOPED)
    ]


def _run(room: Room, moment: str, call: str) -> dict[str, str]:
    room.begin(CALLS[call])
    outer = "worked"
    try:
        MOMENTS[moment](room)
    except BaseException as error:
        outer = type(error).__name__
    return {"inner": room.inner, "outer": outer, "end": room.end()}


def _run_all(rest: list[tuple[str, str]], model: Any, path: str, results: Connection) -> None:
    """Send the result of each case, in a child process."""
    room = Room(model, path)
    for moment, call in rest:
        faulthandler.dump_traceback_later(TIME_LIMIT_S / 2)
        found = _run(room, moment, call)
        results.send({"moment": moment, "call": call, **found})
        if found["end"] != "goes on":
            room = Room(model, path)


def _in_a_process(rest: list[tuple[str, str]], model: Any, path: str) -> Iterator[dict[str, str]]:
    """Results of the first cases, up to one that hangs or dies."""
    receiving, sending = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _run_all(rest, model, path, sending)
        os._exit(0)
    sending.close()
    try:
        for moment, call in rest:
            if not receiving.poll(TIME_LIMIT_S):
                yield {"moment": moment, "call": call, "inner": "hangs"}
                return
            yield receiving.recv()
    except EOFError:
        yield {"moment": moment, "call": call, "inner": "died"}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main() -> None:
    """Run the cases."""
    path = sys.argv[1]
    torch.set_num_threads(1)
    model = load_model(path, num_mtp_layers=2)
    gc.collect()
    gc.freeze()
    rest = cases()
    while rest:
        for found in _in_a_process(rest, model, path):
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            rest = rest[1:]


if __name__ == "__main__":
    main()

"""Servers over loopback with the tiny model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from mtp_plugin import LLM
from mtp_plugin.serving import Server, ServerSettings, make_app

TRAINED = str(Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint")
THINKING = str(Path(__file__).parents[2] / "integration" / "thinking_model" / "checkpoint")
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for tool in tools or [] %}# tool: {{ tool.function.name }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ begin | default('class HTTPServer:\n') }}{% endif %}"
)
SETTINGS = ServerSettings(model_name="tiny", port=0)


@dataclass
class Running:
    """A server that runs in a thread of its own."""

    server: Server
    thread: threading.Thread
    url: str

    @property
    def service(self):
        return self.server._service

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def post(self, path: str, **body) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)


@contextmanager
def running(llm: LLM, log: Callable[[str], None] = lambda _: None, **options) -> Iterator[Running]:
    """Start a server on a free port and stop it at the end."""
    settings = replace(SETTINGS, **options)
    server = Server(make_app(llm, settings), settings, log)

    def run() -> None:
        asyncio.run(server.serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(server, thread, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def tiny_llm(**options) -> LLM:
    llm = LLM(
        TRAINED,
        device="cpu",
        dtype="float32",
        **{
            "max_batch_size": 8,
            "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
            **options,
        },
    )
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def thinking_llm() -> LLM:
    drafts = {"decoding_type": "MTP", "max_draft_len": 3}
    return LLM(THINKING, device="cpu", dtype="float32", max_batch_size=8, speculative_config=drafts)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def measured_stalls(
    server: Running, clock: Callable[[], float] = time.process_time
) -> Iterator[list[float]]:
    """Yield the seconds between iterations of the server's event loop.

    They are CPU time, of the process or of the loop's thread: on a busy machine other processes
    delay the event loop.
    """
    stalls: list[float] = []
    is_done = False

    async def measure() -> None:
        while not is_done:
            start = clock()
            await asyncio.sleep(0.002)
            stalls.append(clock() - start)

    loop = server.server.servers[0].get_loop()
    task = asyncio.run_coroutine_threadsafe(measure(), loop)
    try:
        yield stalls
    finally:
        is_done = True
        task.result(60)


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with tiny_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm) as started:
        yield started

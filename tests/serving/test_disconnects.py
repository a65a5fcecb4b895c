"""Clients that leave, many clients, shutdown, and an engine that ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from http.client import HTTPResponse

import httpx
import pytest

from mtp_plugin import LLM, SamplingParams
from tests.serving.conftest import Running, running, tiny_llm, wait_until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "class A:\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def assert_idle(server: Running) -> None:
    """All sequences have ended and all KV blocks are free."""
    llm = server.service.llm
    wait_until(lambda: server.service.num_sequences == 0 and not llm.executor.has_work)
    wait_until(lambda: llm.blocks.num_free_blocks == llm.blocks.num_blocks)
    assert not server.service._generations


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_the_request(server: Running, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream, "max_tokens": 1500}).encode()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    before = server.service.llm.executor.num_finished.total()
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: server.service.llm.executor.has_work)
    assert_idle(server)
    assert server.service.llm.executor.num_finished.total() == before + 1
    text = server.get("/metrics").text
    aborted = [line for line in text.splitlines() if 'finished_reason="abort"' in line]
    assert float(aborted[0].rpartition(" ")[2]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_ends_its_sending_side_gets_its_response(server: Running, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream, "max_tokens": 24}).encode()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=60) as connection:
        # the end comes with the request: a later one would end a stream that has begun
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
            b"Connection: close\r\nContent-Type: application/json\r\n\r\n%s" % (len(body), body)
        )
        connection.shutdown(socket.SHUT_WR)
        response = HTTPResponse(connection)
        response.begin()
        content = response.read().decode()  # up to the end of the connection
    assert response.status == 200
    assert content.endswith("data: [DONE]\n\n" if stream else "}")
    assert '"finish_reason":"length"' in content
    assert_idle(server)


def test_disconnect_while_the_prompt_is_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, entered, release = server.service.llm, threading.Event(), threading.Event()
    make_requests = llm.make_requests

    def slow(*arguments):
        entered.set()
        release.wait(20)
        return make_requests(*arguments)

    monkeypatch.setattr(llm, "make_requests", slow)
    with server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json={**LONG, "stream": True}, timeout=0.3)
    assert entered.is_set()
    release.set()
    assert_idle(server)


def test_half_bodies_and_many_connections_lose_nothing(llm: LLM) -> None:
    """150 connections at once: every fifth leaves within its body, another within its stream."""
    prompts = [f"def f{number}(" for number in range(150)]
    options = {"max_tokens": 3, "temperature": 0.0}
    expected = llm.generate(prompts, SamplingParams(**options))
    before = llm.executor.num_finished.total()

    async def send(address: tuple[str, int], number: int) -> str | None:
        body = json.dumps({"prompt": prompts[number], **options, "stream": number % 2 == 1})
        content = body.encode()
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
            )
            if number % 5 == 4:
                writer.write(content[: len(content) // 2])
                await writer.drain()
                return None
            writer.write(content)
            if number % 5 == 3:
                await reader.read(10)
                return None
            answer = (await reader.read()).decode()
        finally:
            writer.close()
        assert answer.startswith("HTTP/1.1 200"), answer
        if number % 2 == 0:
            return json.loads(answer[answer.index("{") : answer.rindex("}") + 1])["choices"][0][
                "text"
            ]
        assert answer.count("data: [DONE]") == 1
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if '"choices"' in line]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def send_all(address: tuple[str, int]) -> list[str | None]:
        return await asyncio.gather(*(send(address, number) for number in range(150)))

    with running(llm) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        found = asyncio.run(send_all(address))
        assert_idle(server)
        for number, text in enumerate(found):
            if number % 5 < 3:
                assert text == expected[number].text
    assert 90 <= llm.executor.num_finished.total() - before <= 120


def read_stream(server: Running, started: threading.Event, **body: object) -> list[dict]:
    """Return the chunks of a stream; ``started`` is set after the first one."""
    chunks = []
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
                started.set()
    return chunks


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    result: list = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    return thread, result


def test_shutdown_finishes_running_requests(llm: LLM) -> None:
    started = threading.Event()
    with running(llm) as server:
        body = {**LONG, "max_tokens": 60, "stream": True}
        thread, result = in_thread(lambda: read_stream(server, started, **body))
        assert started.wait(30)
        server.server.should_exit = True
        thread.join(60)
    assert result[0][-1]["choices"][0]["finish_reason"] == "length"


def test_shutdown_aborts_at_its_deadline(llm: LLM) -> None:
    started = threading.Event()
    with running(llm, drain_seconds=0.3) as server:
        body = {**LONG, "max_tokens": 1900, "stream": True}
        thread, result = in_thread(lambda: read_stream(server, started, **body))
        assert started.wait(30)
        server.server.should_exit = True
        thread.join(60)
    assert result[0][-1]["choices"][0]["finish_reason"] == "abort"
    assert llm.is_running


def test_requests_during_shutdown_get_503(llm: LLM) -> None:
    with running(llm) as server:
        server.service.is_draining = True
        assert server.post(COMPLETIONS, **LONG).status_code == 503


def test_end_of_the_engine_ends_streams_with_an_error() -> None:
    started = threading.Event()
    with tiny_llm() as llm, running(llm) as server:
        body = {**LONG, "max_tokens": 1900, "stream": True}
        thread, result = in_thread(lambda: read_stream(server, started, **body))
        whole, answer = in_thread(lambda: server.post(COMPLETIONS, **{**LONG, "max_tokens": 1900}))
        assert started.wait(30)
        wait_until(lambda: server.service.num_sequences == 2)
        assert server.get("/health").status_code == 200
        llm.shutdown()
        thread.join(30)
        whole.join(30)
        assert result[0][-1]["error"]["message"] == "the engine is not running"
        assert answer[0].status_code == 503
        health = server.get("/health")
        assert (health.status_code, health.content) == (503, b"")
        assert server.post(COMPLETIONS, **LONG).status_code == 503


def test_failed_step_is_an_error_without_details(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = server.service.llm.executor

    def fail() -> None:
        executor._fail_all("a step failed: /secret/path")
        raise RuntimeError("/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "step", fail)
        whole = server.post(COMPLETIONS, **LONG)
        chunks = read_stream(server, threading.Event(), **LONG, stream=True)
    for error in (whole.json()["error"], chunks[-1]["error"]):
        assert error["message"] == "the engine could not finish the request"
        assert error["type"] == "server_error"
    assert whole.status_code == 500
    assert server.post(COMPLETIONS, **{**LONG, "max_tokens": 4}).status_code == 200

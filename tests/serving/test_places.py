"""Places in the server and connections come back whatever a client does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from mtp_plugin import LLM
from tests.serving.conftest import Running, measured_stalls, running, wait_until

COMPLETIONS = "/v1/completions"
JSON = b"Content-Type: application/json\r\n"
LONG = {"prompt": "class A:\n", "max_tokens": 80, "ignore_eos": True, "logprobs": 20}


def post(body: dict | bytes, *, path: str = COMPLETIONS, more: bytes = b"") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = more or JSON + b"Content-Length: %d\r\n" % len(content)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
    return head + more + b"\r\n" + content


@contextmanager
def connection(server: Running) -> Iterator[socket.socket]:
    """A connection with small buffers, so that a client that does not read is noticed early."""
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        yield client


def num_connections(server: Running) -> int:
    return len(server.server.server_state.connections)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_reads_nothing_holds_no_place(llm: LLM, stream: bool) -> None:
    with running(llm, max_queued=4) as server, connection(server) as client:
        client.sendall(post({**LONG, "stream": stream, "n": 4}))
        wait_until(lambda: server.service.num_sequences == 4)
        wait_until(lambda: server.service.num_sequences == 0)
        assert num_connections(server) == 1
        assert server.post(COMPLETIONS, prompt=["a"] * 4, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_reads_nothing_is_disconnected(llm: LLM, stream: bool) -> None:
    with running(llm, write_seconds=0.5) as server, connection(server) as client:
        client.sendall(post({**LONG, "stream": stream, "n": 4}))
        wait_until(lambda: num_connections(server) == 1)
        wait_until(lambda: num_connections(server) == 0)
        wait_until(lambda: not server.server.server_state.tasks)
        wait_until(lambda: not server.service._generations)


def test_client_that_reads_slowly_gets_the_whole_answer(llm: LLM) -> None:
    with running(llm, write_seconds=0.5) as server, connection(server) as client:
        client.sendall(post({**LONG, "max_tokens": 40}))
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            part = client.recv(1024)
            assert part
            received += part
            time.sleep(0.05)
    assert len(received) > 20_000


@pytest.mark.parametrize(
    ("status", "path", "more"),
    [
        (401, COMPLETIONS, b"Content-Length: 1000\r\n"),
        (404, "/nothing", b"Content-Length: 1000\r\nAuthorization: Bearer k\r\n"),
        (405, "/health", b"Content-Length: 1000\r\nAuthorization: Bearer k\r\n"),
        (415, COMPLETIONS, b"Content-Length: 1000\r\nAuthorization: Bearer k\r\n"),
        (401, COMPLETIONS, b"Transfer-Encoding: chunked\r\n"),
    ],
)
def test_body_of_a_refused_request_has_a_deadline(
    llm: LLM, status: int, path: str, more: bytes
) -> None:
    with (
        running(llm, api_key="k", body_seconds=0.5, idle_seconds=60) as server,
        connection(server) as client,
    ):
        client.sendall(post(b"", path=path, more=more))
        assert b"HTTP/1.1 %d" % status in client.recv(4096)
        unit = b"1\r\n \r\n" if b"chunked" in more else b" "
        deadline = time.monotonic() + 10
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(unit)
                time.sleep(0.05)
        assert time.monotonic() < deadline


def test_connection_is_used_again_after_a_refused_body(llm: LLM) -> None:
    with running(llm, api_key="k", body_seconds=0.5) as server, connection(server) as client:
        client.sendall(post({"prompt": "a"}))
        received = b""
        while b"}}" not in received:
            received += client.recv(4096)
        assert b"HTTP/1.1 401" in received
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" in client.recv(4096)


@pytest.mark.parametrize("stream", [True, False])
def test_echo_without_a_tokenizer(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(server.service, "tokenizer", None)
    body = {"prompt": [5, 6], "echo": True, "max_tokens": 2, "logprobs": 1, "stream": stream}
    response = server.post(COMPLETIONS, **body)
    assert response.status_code == 200
    if not stream:
        (choice,) = response.json()["choices"]
        assert choice["logprobs"]["tokens"][0] == "token_id:5"
        assert choice["text"]
    wait_until(lambda: server.service.num_sequences == 0)


def test_defect_after_submission_ends_the_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_plugin.serving import app

    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(app, "CompletionWriter", fail)
    before = server.service.llm.executor.num_finished.total()
    assert server.post(COMPLETIONS, **{**LONG, "max_tokens": 1500}).status_code == 500
    wait_until(lambda: server.service.num_sequences == 0)
    assert not server.service._generations
    assert server.service.llm.executor.num_finished.total() == before + 1


@pytest.mark.parametrize(
    ("data", "later", "statuses"),
    [
        (post(b"", more=b"Transfer-Encoding: chunked\r\n") + b"zz\r\n", b"", [b"400"]),
        (post(b"", more=b"Transfer-Encoding: chunked\r\n"), b"zz\r\n", [b"415"]),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0\r\n\r\n", [b"200", b"400"]),
        (b"GET /health HTTP/1.1\r\n\0\xff\r\n\r\n", b"", [b"400"]),
    ],
)
def test_malformed_bytes_are_one_line_of_the_log(
    server: Running, caplog: pytest.LogCaptureFixture, data: bytes, later: bytes, statuses: list
) -> None:
    with connection(server) as client:
        client.sendall(data)
        received = b""
        if later:
            received = client.recv(4096)
            client.sendall(later)
        while part := client.recv(4096):
            received += part
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == statuses
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == [
        "Invalid HTTP request received."
    ]


def test_log_probabilities_of_a_long_prompt_do_not_stall_other_requests(server: Running) -> None:
    body = {"prompt": [5] * 900, "echo": True, "max_tokens": 1, "logprobs": 20, "n": 4}
    with measured_stalls(server, time.thread_time) as stalls:
        response = server.post(COMPLETIONS, **body)
    for choice in response.json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 901
        assert choice["logprobs"]["text_offset"][2] == len(
            "".join(choice["logprobs"]["tokens"][:2])
        )
    assert max(stalls) < 0.1

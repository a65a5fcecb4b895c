"""API key, Host header, limits, deadlines, and what responses do not contain."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from mtp_plugin import LLM
from mtp_plugin.errors import ConfigError
from mtp_plugin.serving import ServerSettings, bind
from mtp_plugin.serving import server as server_module
from tests.serving.conftest import Running, running, tiny_llm, wait_until

COMPLETIONS = "/v1/completions"
KEY = "a-secret-key"


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Running]:
    with running(
        llm, api_key=KEY, max_queued=4, header_seconds=0.5, body_seconds=0.5, idle_seconds=1
    ) as started:
        yield started


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection (the socket's timeout limits the wait)."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_default_address_is_loopback() -> None:
    assert ServerSettings().host == "127.0.0.1"
    assert ServerSettings().is_loopback
    assert not ServerSettings(host="0.0.0.0").is_loopback
    assert "secret" not in repr(ServerSettings(api_key="secret"))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "5"])
def test_deadlines_are_finite(seconds: float) -> None:
    message = re.escape(f"drain_seconds: expected a number of seconds >= 0, got {seconds!r}")
    with pytest.raises(ConfigError, match=message):
        ServerSettings(drain_seconds=seconds)


def test_empty_address_is_refused() -> None:
    """A socket would listen on all interfaces."""
    message = "--listen: expected an address such as 127.0.0.1, or 0.0.0.0 for all interfaces"
    with pytest.raises(ConfigError, match=message):
        ServerSettings(host="")


def test_ports_that_cannot_be_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on 127.0.0.1:70000: .*0-65535"):
        bind(ServerSettings(port=70000))
    with pytest.raises(ConfigError, match=r"^cannot listen on a\\nb:80: "):
        bind(ServerSettings(host="a\nb", port=80))


def test_api_key_guards_everything_but_health(guarded: Running) -> None:
    paths = ["/", "/v1/models", "/version", "/metrics", "/docs", "/nothing"]
    with guarded.client() as client:
        assert client.get("/health").status_code == 200
        for path in paths:
            assert client.get(path).status_code == 401
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert client.post(path, json={"prompt": "a"}).status_code == 401
        for value in ("", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer", "Bearer \xff"):
            headers = {"Authorization": value.encode("latin-1")}
            response = client.get("/v1/models", headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        response = client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        assert response.status_code == 200


def test_api_key_is_compared_in_constant_time(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    from mtp_plugin.serving import security

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((len(given), len(expected)))
        return given == expected

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    with guarded.client(headers={"Authorization": "Bearer x"}) as client:
        client.get("/v1/models")
    assert compared == [(32, 32)]


def test_api_key_and_prompts_are_not_logged(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with guarded.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        client.post(COMPLETIONS, json={"prompt": "a private prompt", "max_tokens": 1})
        client.post(COMPLETIONS, json={"prompt": "a private prompt", "max_tokens": -2})
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert KEY not in messages
    assert "private" not in messages


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.x:80", ""])
def test_other_host_header_is_refused_on_loopback(server: Running, host: str) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000"])
def test_loopback_host_header_is_accepted(server: Running, host: str) -> None:
    with server.client() as client:
        assert client.get("/health", headers={"Host": host}).status_code == 200


def test_no_cors_and_no_server_header(server: Running) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    with server.client() as client:
        for response in (
            client.options(COMPLETIONS, headers=headers),
            client.get("/v1/models", headers=headers),
        ):
            names = {name.lower() for name in response.headers}
            assert not any(name.startswith("access-control") for name in names)
            assert "server" not in names
            assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert client.options(COMPLETIONS, headers=headers).status_code == 405


def test_too_many_sequences_get_429(guarded: Running) -> None:
    with guarded.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        body = {"prompt": ["a"] * 5, "max_tokens": 2}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        body["prompt"] = ["a"] * 4
        assert client.post(COMPLETIONS, json=body).status_code == 200
    assert guarded.service.num_sequences == 0


def test_slow_headers_close_the_connection(guarded: Running) -> None:
    for start in (b"", b"GET /health HTTP/1.1\r\nHo"):
        with connect(guarded) as connection:
            connection.sendall(start)
            assert is_closed(connection)


def test_slow_headers_after_a_response_close_the_connection(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(4096)
        connection.sendall(b"GET /hea")
        assert is_closed(connection)


def test_slow_body_gets_408(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer "
            + KEY.encode()
            + b"\r\n\r\n{"
        )
        assert b"408" in connection.recv(4096)


def test_connection_with_a_refused_body_is_closed(guarded: Running) -> None:
    """The rest of the body is dropped until the deadline of bodies."""
    with connect(guarded) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
        )
        wait_until(lambda: guarded.server.server_state.tasks)
        connection.sendall(b"1\r\na\r\n" * 5000)
        assert b"413 " in connection.recv(4096)
        connection.sendall(b"1\r\na\r\n")
        assert is_closed(connection)


def test_body_with_two_lengths_gets_400_and_is_closed(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(
            b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Length: 5\r\n\r\n"
        )
        answer = b"".join(iter(partial(connection.recv, 4096), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"expected Content-Length or Transfer-Encoding, got both" in answer


def test_connections_above_the_limit_get_503(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "MAX_FILES", 260)
    with running(llm) as server:
        served = [connect(server) for _ in range(4)]
        for _ in range(3):
            with connect(server) as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
                assert is_closed(connection)
        for connection in served:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
            connection.close()
        wait_until(lambda: not server.server.server_state.connections)
        assert server.get("/health").status_code == 200
    assert caplog.text.count("at most 4 connections are served") == 1


def test_log_without_open_files_has_one_line(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(llm) as server:
        waiting = [socket.socket() for _ in range(20)]
        free = os.dup(0)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            for connection in waiting:
                connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            time.sleep(1.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for connection in waiting:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
            connection.close()
    assert caplog.text.count("no connection is accepted: Too many open files") == 1
    assert len(caplog.records) == 1


def test_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        server_module._raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == server_module._max_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slow_tokenizer_gets_503_and_its_request_is_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    make_requests = llm.make_requests

    def slow(*arguments):
        release.wait(20)
        return make_requests(*arguments)

    with running(llm, tokenizer_seconds=0.2) as server:
        monkeypatch.setattr(llm, "make_requests", slow)
        response = server.post(COMPLETIONS, prompt="a", max_tokens=2)
        assert (response.status_code, response.json()["error"]["param"]) == (503, "prompt")
        release.set()
        monkeypatch.undo()
        assert server.post(COMPLETIONS, prompt="a", max_tokens=2).status_code == 200
        assert server.service.num_sequences == 0
    wait_until(lambda: not llm.executor.has_work)


def test_defect_gives_no_details(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("/secret/path is broken")

    monkeypatch.setattr(server.service.metrics, "render", fail)
    response = server.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    wait_until(lambda: "/secret/path" in caplog.text)  # logged after the response


def test_template_error_names_no_path(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}
    response = server.post("/v1/chat/completions", **body, max_tokens=1)
    assert response.status_code == 400
    assert "/" not in response.text.replace("application/json", "")


def test_model_without_chat_template_is_refused_by_name() -> None:
    with tiny_llm() as llm, running(llm) as server:
        llm.tokenizer.chat_template = None
        body = {"messages": [{"role": "user", "content": "a"}]}
        response = server.post("/v1/chat/completions", **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert "start the server with --chat-template FILE" in response.json()["error"]["message"]

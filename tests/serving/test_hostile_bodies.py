"""Bodies that are made to hold up the server do not delay other requests."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from http.client import HTTPResponse

import pytest

from tests.serving.conftest import Running, measured_stalls

SIZE = 4 * 2**20
MAX_SECONDS = 0.5
CHAT = '{"messages": [{"role": "user", "content": "a"}'
CALL = ', {"role": "a", "tool_calls": [{"function": {"arguments": "['
FIELDS = ", ".join(f'"f{number}": 0' for number in range(200_000))
SOME_FIELDS = ", ".join(f'"f{number}": 0' for number in range(250))

BODIES = {
    # start, what is repeated up to the maximum size, and end
    "quotes": ("", '"', ""),
    "escaped quotes": ("", '"\\"', ""),
    "escaped quotes of a string": ('{"prompt": "', '\\"', ""),
    "backslashes": ('{"prompt": "', "\\", '"}'),
    "opening brackets": ("", "[", ""),
    "closing brackets": ("{}", "]", ""),
    "objects": ('{"prompt": [', "{},", "{}]}"),
    "floats": ('{"prompt": [', "1.5,", "0]}"),
    "booleans": ('{"prompt": [', "true,", "0]}"),
    "many ids": ('{"prompt": [', "7,", "0]}"),
    "as many ids as are served": ('{"prompt": [', "1234,", "0]}"),
    "ids, then a text": ('{"prompt": [', "1234,", '"a"]}'),
    "texts": ('{"prompt": [', '"abcdef",', '"a"]}'),
    "lists": ('{"prompt": [', "[1.5],", "[0]]}"),
    "a text": ('{"prompt": "', "a", '"}'),
    "digits": ('{"seed": ', "9", "}"),
    "unknown fields": (f'{{"prompt": "a", {FIELDS}', "", "}"),
    "unknown fields of a field": (f'{{"prompt": "a", "stream_options": {{{FIELDS}', "", "}}"),
    "stop strings": ('{"prompt": "a", "stop": [', '"abcd",', '"a"]}'),
    "wrong stop ids": ('{"prompt": "a", "stop_token_ids": [', "1.5,", "0]}"),
    "allowed ids": ('{"prompt": "a", "allowed_token_ids": [', "1234,", "0]}"),
    "bad words": ('{"prompt": "a", "bad_words": [', "[1234],", "[0]]}"),
    "ids of a bad word": ('{"prompt": "a", "bad_words": [[', "1234,", "0]]}"),
    "biases": (f'{{"prompt": "a", "logit_bias": {{{FIELDS}'.replace("f", "1"), "", "}}"),
    "ignored": ('{"prompt": "a", "metadata": [', "[0],", "0]}"),
    "messages": (CHAT, ',{"role":""}', "]}"),
    "wrong messages": (CHAT, ',{"role":1}', "]}"),
    "numbers as messages": (CHAT, ",12345", "]}"),
    "messages with fields": (CHAT, ',{"role": "a", ' + SOME_FIELDS + "}", "]}"),
    "fields of a message": ('{"messages": [{"role": "user", ' + FIELDS, "", "}]}"),
    "parts": ('{"messages": [{"role": "a", "content": [', '{"type":1},', "0]}]}"),
    "fields of a part": ('{"messages": [{"role": "a", "content": [{' + FIELDS, "", "}]}]}"),
    "tools": (CHAT + '], "tools": [', "{},", "{}]}"),
    "wrong tools": (CHAT + '], "tools": [', "1234,", "0]}"),
    "arguments": (CHAT + CALL, "[],", '"}}]}]}'),
    "variables": (CHAT + '], "chat_template_kwargs": {' + FIELDS, "", "}}"),
    "negative ids to decode": ('{"tokens": [', "-12,", "0]}"),
    "ids to decode": ('{"tokens": [', "1234,", "0]}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_body_does_not_stall_other_requests(server: Running, name: str) -> None:
    start, unit, end = BODIES[name]
    count = (SIZE - len(start + end)) // len(unit) if unit else 0
    content = (start + unit * count + end).encode()
    path = "/detokenize" if "tokens" in start[:9] else "/v1/completions"
    path = "/v1/chat/completions" if "messages" in start else path
    client = server.client(headers={"Content-Type": "application/json"})
    with client, measured_stalls(server) as stalls:
        response = client.post(path, content=content)
    assert response.status_code == 400 or name == "ids to decode"
    assert response.status_code == 200 or len(response.content) < 1024
    assert max(stalls) < max(MAX_SECONDS, 5 * seconds_to_parse(content))


def test_names_of_tokens_do_not_stall_other_requests(server: Running) -> None:
    text = ("class A:\n    def f(self):\n" * 2**16)[: 2**20]
    with measured_stalls(server, clock=time.thread_time) as stalls:
        response = server.post("/tokenize", prompt=text, return_token_strs=True)
    answer = response.json()
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])
    assert max(stalls) < MAX_SECONDS


@pytest.mark.parametrize(
    ("unit", "count", "message"),
    [
        (b"1\r\na\r\n", 100_000, "the body has 4129 chunks with 4129 bytes; send chunks of"),
        (b"80;" + b"x" * 4096 + b"\r\n%s\r\n" % (b"a" * 128), 2200, "exceed 8388608 bytes"),
    ],
    ids=["of one byte", "with long headers"],
)
def test_small_chunks_are_refused_early(
    server: Running, unit: bytes, count: int, message: str
) -> None:
    with measured_stalls(server) as stalls:
        status, content = post_chunked(server, unit * count)
    assert (status, json.loads(content)["error"]["type"]) == (413, "invalid_request_error")
    assert message in content
    assert max(stalls) < MAX_SECONDS
    assert server.get("/health").status_code == 200


def test_small_chunks_after_the_response_are_dropped(server: Running) -> None:
    with connect(server) as connection, measured_stalls(server) as stalls:
        connection.sendall(HEAD % b"text/plain")
        assert b"415" in connection.recv(4096)
        connection.sendall(b"1\r\na\r\n" * 100_000)
        assert server.get("/health").status_code == 200
    assert max(stalls) < MAX_SECONDS


def test_chunks_of_400_bytes_are_served(server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 4_000_000}).encode()
    parts = [body[start : start + 400] for start in range(0, len(body), 400)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    status, content = post_chunked(server, chunks)
    assert status == 200, content


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def post_chunked(server: Running, chunks: bytes) -> tuple[int, str]:
    """Return the status and the content of the response."""
    with connect(server) as connection:
        connection.sendall(HEAD % b"application/json" + chunks + b"0\r\n\r\n")
        response = HTTPResponse(connection)
        response.begin()
        return response.status, response.read().decode()


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)


def seconds_to_parse(content: bytes) -> float:
    """Time that Python's own parser takes on this machine, which is linear in the size."""
    began = time.perf_counter()
    with suppress(ValueError, RecursionError):
        json.loads(content)
    return time.perf_counter() - began

"""One client process: sends requests over raw connections and reports the token ids.

It reads a plan, one line of JSON, from standard input, writes ``ready`` when its connections are
open, waits for another line and then sends the requests, each connection one after the other.
Responses are parsed after the last one has arrived. It imports neither torch nor the package.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

END = b"0\r\n\r\n"
"""The last chunk of a chunked body."""


async def send_all(plan: dict[str, Any]) -> dict[str, Any]:
    """Send the requests of a plan and return their results."""
    host, port = plan["host"], plan["port"]
    connections = [
        await asyncio.open_connection(host, port) for _ in range(plan["num_connections"])
    ]
    requests = [
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        for body in plan["bodies"]
    ]
    bodies = [b""] * len(requests)
    todo = iter(range(len(requests)))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in todo:
            writer.write(requests[number])
            bodies[number] = await read_body(reader)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    start = time.monotonic()
    await asyncio.gather(*(use(*each) for each in connections))
    end = time.monotonic()
    for _, writer in connections:
        writer.close()
    parse = parse_stream if plan["stream"] else parse_whole
    results = [parse(body) for body in bodies]
    return {
        "start": start,
        "end": end,
        "token_ids": [tokens for tokens, _ in results],
        "num_chunks": sum(count for _, count in results),
    }


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """Return the body of a response, chunked bodies with their chunk sizes.

    Raises:
        OSError: the status is not 200, or the connection was closed.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    fields = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in fields:
        received = bytearray()
        while not received.endswith(END):
            part = await reader.read(2**16)
            if not part:
                raise OSError("the server closed the connection")
            received += part
        body = bytes(received)
    else:
        length = next(line for line in fields if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(length.partition(b":")[2]))
    if not head.startswith(b"HTTP/1.1 200 "):
        raise OSError(f"expected status 200, got {head[:40]!r}: {body[:400]!r}")
    return body


def unchunked(body: bytes) -> Iterator[bytes]:
    """Yield the chunks of a chunked body."""
    position = 0
    while True:
        line_end = body.index(b"\r\n", position)
        size = int(body[position:line_end], 16)
        if size == 0:
            return
        position = line_end + 2
        yield body[position : position + size]
        position += size + 2


def parse_stream(body: bytes) -> tuple[list[int], int]:
    """Return the token ids of a stream and its number of events with tokens.

    Raises:
        ValueError: the stream reports an error.
    """
    tokens: list[int] = []
    count = 0
    for event in b"".join(unchunked(body)).split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        content = json.loads(data)
        if "choices" not in content:
            raise ValueError(f"expected a chunk, got {data[:400]!r}")
        for choice in content["choices"]:
            found = choice.get("token_ids") or []
            tokens += found
            count += bool(found)
    return tokens, count


def parse_whole(body: bytes) -> tuple[list[int], int]:
    """Return the token ids of a response that is not streamed."""
    return json.loads(body)["choices"][0]["token_ids"], 1


def main() -> None:
    """Run one plan."""
    plan = json.loads(sys.stdin.readline())
    sys.stdout.write(json.dumps(asyncio.run(send_all(plan))) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Runs the application over uvicorn."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mtp_plugin.errors import ConfigError, one_line
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.serving.app import make_app
from mtp_plugin.serving.errors import APIError
from mtp_plugin.serving.generation import EngineService
from mtp_plugin.serving.metrics import Throughput
from mtp_plugin.serving.security import HEADERS
from mtp_plugin.serving.settings import ServerSettings

_logger = logging.getLogger(__name__)
MAX_SMALL_CHUNKS = 4096
"""Number of chunks of a body that may be of any size."""
PEER_CHECK_SECONDS = 0.1
"""Time between two checks that a client that sends nothing more still reads."""
ABORT_SECONDS = 5
"""Time that aborted requests have to send their last events."""
REPORT_SECONDS = 10
"""Time between two lines about throughput and acceptance, and about too many connections."""
MAX_FILES = 2**16
"""Maximum number of open files of the server."""
BACKLOG = 128
"""Connections that the system holds until they are accepted; all of them are accepted at once."""
SPARE_FILES = 128
"""Open files for other uses than connections."""
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(uvicorn.Server):
    """A server whose shutdown finishes running requests within a deadline and aborts the others.

    Args:
        log: called with a line when the port is open, every `REPORT_SECONDS` with requests, and at
            the end.
    """

    def __init__(
        self, app: FastAPI, settings: ServerSettings, log: Callable[[str], object] = _logger.info
    ) -> None:
        self._warn_rarely = _rarely(_logger.warning)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=_protocol(settings, self._warn_rarely),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                proxy_headers=False,
                timeout_keep_alive=int(settings.idle_seconds),
                timeout_graceful_shutdown=int(settings.drain_seconds) + ABORT_SECONDS,
                callback_notify=self._report,
                timeout_notify=REPORT_SECONDS,
            )
        )
        self._service: EngineService = app.state.service
        self._log = log
        self._throughput = Throughput(self._service.llm)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port.

        Raises:
            ConfigError: another process has begun to listen on it since :func:`bind`.
        """
        settings = self._service.settings
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _cannot_listen(settings, error) from None
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        port = self.servers[0].sockets[0].getsockname()[1]
        self._log(f"serving {one_line(settings.model_name)} on http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, wait for the running ones, and abort them at the deadline."""
        self._service.is_draining = True
        deadline = asyncio.get_running_loop().call_later(
            self._service.settings.drain_seconds, self._service.abort_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
        if self.force_exit:
            self._disconnect_all()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=ABORT_SECONDS)
        self._log(self._throughput.total())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; at the second signal, end all requests."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._disconnect_all)
        super().handle_exit(sig, frame)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one line for many connections that cannot be accepted, not a traceback for each."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES and "socket" in context:
            self._warn_rarely(f"no connection is accepted: {error.strerror}; see ulimit -n")
        else:
            loop.default_exception_handler(context)

    def _disconnect_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()

    async def _report(self) -> None:
        line = self._throughput.line()
        if line is not None:
            self._log(line)


def _rarely(log: Callable[[str], object]) -> Callable[[str], None]:
    """Return a function that logs at most one line per `REPORT_SECONDS`."""
    due = 0.0

    def log_if_due(line: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            log(line)

    return log_if_due


def _max_files(limit: int) -> int:
    return MAX_FILES if limit == resource.RLIM_INFINITY else min(limit, MAX_FILES)


def _raise_file_limit() -> None:
    """Raise the limit of open files, on which that of connections depends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _max_files(soft) < _max_files(hard):
        with suppress(OSError, ValueError):  # the lower limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (_max_files(hard), hard))


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket of the port, so that a port in use is reported at once.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, port = settings.host, settings.port
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:
        reserved.close()
        raise _cannot_listen(settings, error) from None
    return reserved


def _cannot_listen(settings: ServerSettings, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    where = f"{one_line(settings.host)}:{settings.port}"
    return ConfigError(f"cannot listen on {where}: {reason}; give another --listen or --port")


def serve(
    llm: LLM,
    settings: ServerSettings,
    reserved: socket.socket | None = None,
    log: Callable[[str], object] = _logger.info,
) -> None:
    """Serve an `LLM` until SIGINT or SIGTERM.

    Args:
        reserved: as :func:`bind` returns; default: of the host and port of ``settings``.
        log: called with a line when the port is open, every `REPORT_SECONDS` with requests, and at
            the end.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not settings.is_loopback and settings.api_key is None:
        _logger.warning("%s: every machine that reaches it can use this server", settings.host)
    _raise_file_limit()
    with reserved or bind(settings) as reserved, suppress(KeyboardInterrupt):
        Server(make_app(llm, settings), settings, log).run([reserved])


class CountedConnection(h11.Connection):
    """A connection that refuses a body of very small chunks, which would take long to parse, and
    one of two lengths, which a proxy may read in another way."""

    refusal: APIError | None = None
    """Why nothing more is read: 400 for the headers of a request, 413 for its body."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(h11.SERVER)
        self._settings = settings
        self._clear()

    def _clear(self) -> None:
        self._num_chunks = self._num_content_bytes = self._num_wire_bytes = 0

    def receive_data(self, data: bytes) -> None:
        """Count the bytes of a request."""
        self._num_wire_bytes += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            RemoteProtocolError: the request is invalid, or its body is refused.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                self._refuse(400, "expected Content-Length or Transfer-Encoding, got both")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_content_bytes += len(event.data)
            problem = self._problem() if event.chunk_start else None
            if problem is not None:
                self._refuse(413, problem)
        elif isinstance(event, h11.EndOfMessage):
            self._clear()
        return event

    def _refuse(self, status: int, message: str) -> NoReturn:
        self.refusal = APIError(status, (None, message), headers=HEADERS)
        raise h11.RemoteProtocolError(message)

    def _problem(self) -> str | None:
        least, most = self._settings.min_chunk_bytes, 2 * self._settings.max_body_bytes
        if self._num_wire_bytes > most:
            return f"the body and the headers of its chunks exceed {most} bytes"
        if self._num_chunks - self._num_content_bytes // least <= MAX_SMALL_CHUNKS:
            return None
        return (
            f"the body has {self._num_chunks} chunks with {self._num_content_bytes} bytes; send "
            f"chunks of at least {least} bytes, or a Content-Length"
        )


def _protocol(settings: ServerSettings, warn: Callable[[str], None]) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit of connections, and deadlines.

    A deadline is for each phase in which it waits for the client: the headers of a request, the
    rest of a body after its response, and the reading of the response. `read_json` limits the time
    of a body that it reads, uvicorn that of an idle connection. A client that closes its sending
    side after a request gets its response.

    Args:
        warn: called for each connection above the limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = max(1, _max_files(soft) - BACKLOG - SPARE_FILES)

    class TimedProtocol(H11Protocol):
        conn: CountedConnection
        _deadline: asyncio.TimerHandle | None = None
        _write_check: asyncio.TimerHandle | None = None
        _peer_check: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn = CountedConnection(settings)
            if len(self.connections) > max_connections:
                message = f"at most {max_connections} connections are served"
                warn(f"{message}; more need a higher ulimit -n")
                headers = {**HEADERS, "Retry-After": "1"}
                self._end_with(APIError(503, (None, message), headers=headers))
                return
            self._set_deadline(settings.header_seconds)

        def data_received(self, data: bytes) -> None:
            if self.conn.refusal is not None:
                return  # the client may read the response only after the rest of its body
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                if not self._has_unread_body:
                    self._clear_deadline()
            elif self._deadline is None:
                self._set_deadline(settings.header_seconds)

        def eof_received(self) -> bool:  # type: ignore[override] # as asyncio.Protocol's
            """Keep the connection open for the response to a whole request."""
            cycle = self.cycle
            if cycle is None or cycle.more_body or cycle.response_started:
                return False
            if cycle.scope["http_version"] != "1.1":
                return (
                    False  # has no interim response, so a client that has left would not be noticed
                )
            # the system of a client that has left replies with a reset
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(event))
            self._expect_peer()
            return True

        def _expect_peer(self) -> None:
            """Abort a connection that was reset; after the end of reading nothing reports it."""
            number = self.transport.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as peer:
                is_reset = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            if is_reset:
                self.transport.abort()
            else:
                self._peer_check = self.loop.call_later(PEER_CHECK_SECONDS, self._expect_peer)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._peer_check is not None and self.cycle.response_complete:
                self.transport.close()
            self._watch_writing()
            if self._has_unread_body:
                self._set_deadline(settings.body_seconds)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_writing()

        def send_400_response(self, msg: str) -> None:
            refusal = self.conn.refusal
            if refusal is not None and refusal.status == 413:
                self._refuse_body(refusal)
                return
            if self.cycle is not None:
                self.cycle.disconnected = True  # what the application still sends is dropped
                self.cycle.message_event.set()
            if refusal is not None:
                self._end_with(refusal)
            elif self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()

        def _refuse_body(self, error: APIError) -> None:
            """Send an error in place of the application's response, unless that was sent."""
            self._set_deadline(settings.body_seconds)
            if self.cycle.response_started:
                return
            self.cycle.disconnected = True  # what the application still sends is dropped
            self.cycle.response_started = self.cycle.response_complete = True
            self.cycle.message_event.set()
            self._send(error)

        def _end_with(self, error: APIError) -> None:
            self._send(error)
            self.transport.close()

        def _send(self, error: APIError) -> None:
            """Send an error that does not come from the application."""
            response = error.response()
            headers = [*response.raw_headers, CLOSE_HEADER]
            status = response.status_code
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))

        def connection_lost(self, exc: Exception | None) -> None:
            self._clear_deadline()
            for check in (self._write_check, self._peer_check):
                if check is not None:
                    check.cancel()
            super().connection_lost(exc)

        @property
        def _has_unread_body(self) -> bool:
            """Whether the response was sent before the client has sent all of its request."""
            is_sending = self.conn.their_state is h11.SEND_BODY
            return is_sending and self.cycle.response_complete

        def _set_deadline(self, seconds: float) -> None:
            self._clear_deadline()
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

        def _clear_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _watch_writing(self) -> None:
            """Abort the connection if the client reads nothing for some time."""
            if self._write_check is not None:
                self._write_check.cancel()
            unsent = self.transport.get_write_buffer_size()
            if unsent:
                self._write_check = self.loop.call_later(
                    settings.write_seconds, self._expect_progress, unsent
                )

        def _expect_progress(self, unsent: int) -> None:
            is_waiting = self.flow.write_paused or self.cycle.response_complete
            if is_waiting and self.transport.get_write_buffer_size() >= unsent:
                self.transport.abort()
            elif is_waiting:
                self._watch_writing()

    return TimedProtocol

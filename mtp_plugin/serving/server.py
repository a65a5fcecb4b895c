"""Runs the application over uvicorn."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtp_plugin.executor import LLM
from mtp_plugin.serving.app import make_app
from mtp_plugin.serving.generation import EngineService
from mtp_plugin.serving.settings import ServerSettings

_logger = logging.getLogger(__name__)
ABORT_SECONDS = 5
"""Time that aborted requests have to send their last events."""


class Server(uvicorn.Server):
    """A server whose shutdown finishes running requests within a deadline and aborts the others."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=_protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(settings.idle_seconds),
                timeout_graceful_shutdown=int(settings.drain_seconds) + ABORT_SECONDS,
            )
        )
        self._service: EngineService = app.state.service

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


def serve(llm: LLM, settings: ServerSettings) -> None:
    """Serve an `LLM` until SIGINT or SIGTERM."""
    if not settings.is_loopback and settings.api_key is None:
        _logger.warning("%s: every machine that reaches it can use this server", settings.host)
    Server(make_app(llm, settings), settings).run()


def _protocol(settings: ServerSettings) -> type[H11Protocol]:
    """Return uvicorn's protocol with a deadline for each phase in which it waits for the client.

    These are the headers of a request, the rest of a body after its response, and the reading of
    the response. `read_json` limits the time of a body that it reads, uvicorn that of an idle
    connection.
    """

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _write_check: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._set_deadline(settings.header_seconds)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                if not self._has_unread_body:
                    self._clear_deadline()
            elif self._deadline is None:
                self._set_deadline(settings.header_seconds)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_writing()
            if self._has_unread_body:
                self._set_deadline(settings.body_seconds)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_writing()

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None:
                self.cycle.disconnected = True  # what the application still sends is dropped
                self.cycle.message_event.set()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._clear_deadline()
            if self._write_check is not None:
                self._write_check.cancel()
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

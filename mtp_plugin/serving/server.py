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
                http=_protocol(settings.header_seconds),
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


def _protocol(header_seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a deadline for the headers of a request."""

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._set_deadline()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._clear_deadline()
            elif self._deadline is None:
                self._set_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._clear_deadline()
            super().connection_lost(exc)

        def _set_deadline(self) -> None:
            self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _clear_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedProtocol

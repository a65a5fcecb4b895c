"""Checks of every HTTP request before its content is used."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from contextlib import suppress
from itertools import accumulate
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_plugin.serving.errors import APIError
from mtp_plugin.serving.settings import ServerSettings

LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
TO_SQUARE = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}


class Guard:
    """ASGI middleware: checks the Host header and the API key, and adds security headers."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._is_loopback = settings.is_loopback
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        error = self._refusal(scope)
        app = self._app if error is None else error.response()
        # only the end of the server cancels a request, and uvicorn would log a traceback for each
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        # another site's page must not reach a local server through a name that it controls
        if self._is_loopback and not LOCAL_HOST.fullmatch(headers.get("host", "")):
            return APIError(403, (None, "Host: expected localhost or a loopback address"))
        if self._key is None or scope["path"] == "/health":
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._key)
        if is_right and scheme.lower() == "bearer":
            return None
        return APIError(
            401,
            (None, "expected the header Authorization: Bearer KEY with this server's API key"),
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def read_json(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        APIError: the body is not JSON, too large, too deep or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, (None, "Content-Type: expected application/json"))
    try:
        body = await asyncio.wait_for(_read_body(request, settings), settings.body_seconds)
    except asyncio.TimeoutError:
        raise APIError(408, (None, "the body did not arrive in time")) from None
    check_structure(body, settings)
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise APIError(400, (None, "the body is not valid JSON")) from None
    if not isinstance(content, dict):
        raise APIError(400, (None, "the body must be a JSON object"))
    return content


async def _read_body(request: Request, settings: ServerSettings) -> bytes:
    too_large = APIError(413, (None, f"the body exceeds {settings.max_body_bytes} bytes"))
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > settings.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > settings.max_body_bytes:
                raise too_large
    except ClientDisconnect:
        raise APIError(400, (None, "the client disconnected")) from None
    return bytes(body)


def check_structure(body: bytes, settings: ServerSettings) -> None:
    """Limit the elements and the depth of a JSON text before it is parsed, in linear time.

    Raises:
        APIError: the text exceeds a limit.
    """
    # commas and brackets of strings count too: a string is no longer than `max_prompt_chars`
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_elements = sum(map(body.count, (b",", b"[", b"{")))
    if max(num_elements, unescaped.count(b'"')) > settings.max_json_elements:
        message = f"the body has more than {settings.max_json_elements} elements"
        raise APIError(400, (None, message))
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b":") > settings.max_json_fields:
        raise APIError(400, (None, f"the body has more than {settings.max_json_fields} fields"))
    brackets = outside.translate(TO_SQUARE, NO_BRACKETS)
    if len(brackets) > 2 * settings.max_json_containers:
        message = f"the body has more than {settings.max_json_containers} lists and objects"
        raise APIError(400, (None, message))
    depths = accumulate(1 if bracket == b"["[0] else -1 for bracket in brackets)
    if max(depths, default=0) > settings.max_json_depth:
        raise APIError(400, (None, f"the body is nested deeper than {settings.max_json_depth}"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

"""Errors of the HTTP API, as OpenAI's error object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.options import OPTIONS

Problem = tuple[str | None, str]
"""The field at fault, and a message that names it."""

MAX_PROBLEMS = 10
"""Maximum number of problems in a message."""
MAX_MESSAGE_CHARS = 1000
"""Maximum length of the description of a problem."""
OPTION_NAMES = {*OPTIONS, *(name for option in OPTIONS.values() for name in option.elsewhere)}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """An error with an HTTP status; the message names the fields at fault."""

    def __init__(
        self,
        status: int,
        *problems: Problem,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        shown = [message[:MAX_MESSAGE_CHARS] for _, message in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
        super().__init__("; ".join(shown))
        self.status = status
        self.problems = problems
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, default),
                "param": next((field for field, _ in self.problems if field), None),
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def problem_of(error: RequestError, default: str | None) -> Problem:
    """Return the problem that an engine's error describes.

    Args:
        default: the field at fault if the message begins with none.
    """
    message = re.sub(r"request \d+: ", "", str(error)).removeprefix("sampling parameters: ")
    message = message.removeprefix("not supported: ")
    named = re.match("[a-z_]+", message)
    is_field = named is not None and named.group() in OPTION_NAMES
    return (named.group() if named and is_field else default, message)


def encode_json(content: object) -> str:
    """Return JSON text that can be encoded in UTF-8 (lone surrogates are escaped)."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(encode_json(content), status, headers, media_type="application/json")

"""The static page of ``/``."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response


@cache
def _content() -> tuple[str, str]:
    """Return the page and its content security policy, which allows its own script and style."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    script, style = (
        base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        for tag in ("script", "style")
        for found in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


async def page() -> Response:
    """``GET /``."""
    text, policy = _content()
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})

"""The page in headless Chromium, driven through the DevTools protocol over pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin import LLM, SamplingParams
from tests.serving.conftest import Running, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


class Tab:
    """A tab of a browser."""

    def __init__(self, requests: int, responses: int) -> None:
        self._requests = os.fdopen(requests, "wb")
        self._responses = os.fdopen(responses, "rb")
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._responses.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return json.loads(content)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._requests.close()
        self._responses.close()


@contextmanager
def browsing(folder: Path) -> Iterator[Tab]:
    (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()

    def use_pipes() -> None:
        # the browser reads descriptor 3 and writes descriptor 4
        kept = os.dup(from_us), os.dup(to_us)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    options = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run"
    process = subprocess.Popen(
        [CHROMIUM, *options.split(), "--window-size=900,760", f"--user-data-dir={folder}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=use_pipes,
    )
    os.close(from_us)
    os.close(to_us)
    tab = Tab(to_it, from_it)
    try:
        yield tab
    finally:
        tab.close()
        process.kill()
        process.wait()


def test_page_streams_with_accepted_drafts_marked(
    server: Running, llm: LLM, tmp_path: Path
) -> None:
    (expected,) = llm.generate("class HTTPServer:\n", SamplingParams(max_tokens=96))
    with browsing(tmp_path / "profile") as tab:
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=server.url)
        wait_until(lambda: tab.evaluate("document.readyState === 'complete' && !!window.fetch"))
        wait_until(lambda: tab.evaluate("!!document.getElementById('start')"))
        tab.evaluate("document.getElementById('start').click()")
        wait_until(lambda: tab.evaluate("document.getElementById('tokens').textContent") == "96")
        wait_until(lambda: tab.evaluate("!document.getElementById('start').disabled"))
        assert tab.evaluate("document.getElementById('output').textContent") == expected.text
        marked = tab.evaluate(
            "[...document.querySelectorAll('#output .draft')].map(e => e.textContent).join('')"
        )
        assert 0 < len(marked) < len(expected.text)
        rate = float(tab.evaluate("document.getElementById('rate').textContent"))
        assert rate > 1
        screenshot = tab.call("Page.captureScreenshot", format="png")["data"]
        (tmp_path / "page.png").write_bytes(base64.b64decode(screenshot))
        # text from the model is shown as text
        tab.evaluate("show('<img src=x onerror=alert(1)>', '')")
        assert tab.evaluate("document.querySelectorAll('#output img').length") == 0
        requested = [
            event["params"]["request"]["url"]
            for event in tab.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert all(url.startswith((server.url, "data:")) for url in requested)
        errors = [e for e in tab.events if e.get("method") in ("Log.entryAdded",)]
        assert not errors


def test_page_shows_the_message_of_an_error(server: Running, tmp_path: Path) -> None:
    with browsing(tmp_path / "profile") as tab:
        tab.call("Page.enable")
        tab.call("Page.navigate", url=server.url)
        wait_until(lambda: tab.evaluate("!!document.getElementById('start')"))
        tab.evaluate("document.getElementById('prompt').value = ''")
        tab.evaluate("document.getElementById('start').click()")
        wait_until(lambda: bool(tab.evaluate("document.querySelector('.error')?.textContent")))
        assert "empty" in tab.evaluate("document.querySelector('.error').textContent")

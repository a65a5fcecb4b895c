"""The page in headless Chromium, driven through the DevTools protocol over pipes."""

from __future__ import annotations

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
from tests.serving.conftest import Running, running, thinking_llm, wait_until

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


@contextmanager
def opened_page(server: Running, folder: Path, *, is_chat: bool = False) -> Iterator[Tab]:
    with browsing(folder / "profile") as tab:
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=server.url)
        wait_for_state(tab, "idle")
        if not is_chat:
            tab.evaluate("document.getElementById('chat').click()")
            set_value(tab, "max", 32)
        yield tab


def wait_for_state(tab: Tab, *names: str) -> None:
    wait_until(lambda: tab.evaluate("document.body?.dataset.state") in names, seconds=120)


def set_value(tab: Tab, name: str, value: object) -> None:
    tab.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}")


def text_of(tab: Tab, selector: str) -> str:
    return tab.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def press_ctrl_enter(tab: Tab) -> None:
    tab.evaluate("document.getElementById('prompt').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", modifiers=2)


def test_page_compares_a_prompt_without_and_with_mtp(
    server: Running, llm: LLM, tmp_path: Path
) -> None:
    prompt = "class HTTPServer:\n"
    expected = llm.generate(prompt, SamplingParams(max_tokens=32))
    with opened_page(server, tmp_path) as tab:
        wait_until(lambda: text_of(tab, "#model") == "tiny")
        set_value(tab, "temperature", 0)
        press_ctrl_enter(tab)
        wait_for_state(tab, "replaying", "done")
        assert tab.evaluate("document.getElementById('error').hidden")
        assert text_of(tab, "#headline").endswith("identical output")
        assert text_of(tab, "#ratio").endswith("\u00d7")
        without, with_mtp = tab.evaluate(
            "last.runs.map(r => [r.seconds, r.num_steps, r.num_tokens, r.token_ids])"
        )
        assert without[2:] == with_mtp[2:] == [32, expected.token_ids]
        assert with_mtp[1] < without[1] == 32
        ratio = without[0] / with_mtp[0]
        assert text_of(tab, "#ratio") == f"{ratio:.1f}\u00d7"
        tab.evaluate("document.getElementById('skip').click()")
        wait_for_state(tab, "done")
        for lane in ("without", "with"):
            assert text_of(tab, f"#{lane} .output") == prompt + expected.text
            marked = tab.evaluate(
                f"[...document.querySelectorAll('#{lane} [class^=d]')]"
                ".map(e => [e.className, e.textContent])"
            )
            assert bool(marked) == (lane == "with")
            assert {name for name, _ in marked} <= {"d1", "d2", "d3"}
        histogram = tab.evaluate("last.runs[1].stats.acceptance_histogram")
        histogram[0] += with_mtp[1] - sum(histogram)  # the step of the prompt has no drafts
        shown = tab.evaluate(
            "[...document.querySelectorAll('#histogram > span')].map(e => e.textContent)"
        )
        assert [int(each.split("(")[1].rstrip(")")) for each in shown] == histogram
        assert text_of(tab, "#rate") == f"{32 / with_mtp[1]:.2f}"
        requested = [
            event["params"]["request"]["url"]
            for event in tab.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert all(url.startswith((server.url, "data:")) for url in requested)
        reported = ("Log.entryAdded", "Runtime.exceptionThrown")
        assert not [event for event in tab.events if event.get("method") in reported]


def test_page_shows_reasoning_and_answer_of_a_chat_model(tmp_path: Path) -> None:
    with (
        thinking_llm() as llm,
        running(llm, model_name="thinking_model") as server,
        opened_page(server, tmp_path, is_chat=True) as tab,
    ):
        assert text_of(tab, "#model") == "thinking_model"
        press_ctrl_enter(tab)
        wait_for_state(tab, "replaying", "done")
        tab.evaluate("document.getElementById('skip').click()")
        reasoning = tab.evaluate("last.runs[1].message.reasoning_content")
        thought = "[...document.querySelectorAll('#with .thinking')].map(e => e.textContent)"
        assert tab.evaluate(f"{thought}.join('')") == reasoning
        assert "17617" in reasoning
        assert text_of(tab, "#with .answer") == text_of(tab, "#without .answer") == "17617"
        assert text_of(tab, "#with .prompt") == "Sum of 2129, 7237, 2720, 5531?\n\n"
        assert tab.evaluate("document.getElementById('looping').hidden")


@pytest.fixture
def recorded(server: Running, tmp_path: Path) -> Iterator[Tab]:
    """A page with two runs that were not made by the server."""
    with opened_page(server, tmp_path) as tab:
        tab.evaluate(
            """
            const segment = (text, draft_position, seconds) => ({text, draft_position, seconds});
            const run = (seconds, ids, segments, stats) => ({
              seconds, token_ids: ids, num_tokens: ids.length, num_steps: ids.length,
              draft_segments: segments, stats, model: "tiny",
            });
            const stats = {
              acceptance_histogram: [1, 1], draft_acceptance_rate: 0.5, num_spec_tokens: 1,
              num_draft_tokens: 2,
            };
            const shown = (first, second) => {
              last = {prompt: "p", runs: [first, second]};
              conclude(last);
              play(last);
              replay.finish();
              return document.getElementById("headline").textContent;
            };
            """
        )
        yield tab


def test_page_reports_slower_and_different_outputs(recorded: Tab) -> None:
    for first, second, ratio, headline in (
        ("run(1, [1, 2], [])", "run(2, [1, 2], [], stats)", "0.5", "slower with MTPidentical"),
        ("run(2, [1, 2], [])", "run(1, [1, 3], [], stats)", "2.0", "faster with MTPoutput differs"),
        ("run(1, [1, 2], [])", "run(1, [1, 2], [], stats)", "1.0", "as fast with MTP as without"),
        # the time per token where the numbers of tokens differ
        ("run(2, [1, 2], [])", "run(1, [1], [], stats)", "1.0", "as fast with MTP as without"),
    ):
        assert recorded.evaluate(f"shown({first}, {second})").startswith(headline)
        assert text_of(recorded, "#ratio") == f"{ratio}\u00d7"
    assert recorded.evaluate("shown(run(1, [1], []), run(1, [1], []))")
    assert "no drafts" in text_of(recorded, "#summary")
    assert recorded.evaluate("document.getElementById('details').hidden")
    for loops in (True, False):
        stats = f"{{...stats, looping: {json.dumps(loops)}}}"
        recorded.evaluate(f"shown(run(1, [1], []), run(1, [1], [], {stats}))")
        assert recorded.evaluate("document.getElementById('looping').hidden") is not loops


def test_page_shows_text_of_the_model_as_text(recorded: Tab) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
    segments = f"[segment({json.dumps(text)}, 0, 0.5), segment({json.dumps(text)}, 1, 1)]"
    recorded.evaluate(f"shown(run(1, [1, 2], {segments}), run(1, [1, 2], {segments}, stats))")
    for lane in ("without", "with"):
        assert text_of(recorded, f"#{lane} .output") == "p" + 2 * text
    assert recorded.evaluate("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_in_both_color_schemes(recorded: Tab, scheme: str) -> None:
    recorded.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=740,
        deviceScaleFactor=2,
        mobile=True,
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    recorded.call("Emulation.setEmulatedMedia", features=features)
    word = json.dumps("x" * 500)
    recorded.evaluate(
        f"shown(run(1, [1], [segment({word}, 0, 1)]), run(1, [1], [segment({word}, 1, 1)], stats))"
    )
    assert recorded.evaluate("document.documentElement.scrollWidth") == 360
    lightness = recorded.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    )
    assert (lightness < 64) == (scheme == "dark")


def test_page_shows_the_message_of_an_error(server: Running, tmp_path: Path) -> None:
    with opened_page(server, tmp_path) as tab:
        set_value(tab, "prompt", "")
        tab.evaluate("document.getElementById('start').click()")
        wait_for_state(tab, "error")
        assert "empty" in text_of(tab, "#error")
        assert tab.evaluate("document.getElementById('result').hidden")
        assert not tab.evaluate("document.getElementById('start').disabled")
        tab.evaluate("document.querySelector('#examples button').click()")
        assert tab.evaluate("document.getElementById('error').hidden")
        tab.evaluate("document.getElementById('error').hidden = false")
        tab.evaluate("document.getElementById('prompt').focus()")
        tab.call("Input.insertText", text="own")
        assert tab.evaluate("document.getElementById('error').hidden")
        prompt = tab.evaluate("document.getElementById('prompt').value")
        assert "own" in prompt
        tab.evaluate("document.getElementById('chat').click()")
        assert text_of(tab, "#examples button") == "Sum"
        assert tab.evaluate("document.getElementById('prompt').value") == prompt


def test_page_stops_a_run(server: Running, tmp_path: Path) -> None:
    with opened_page(server, tmp_path) as tab:
        set_value(tab, "max", 400)
        tab.evaluate("document.getElementById('start').click()")
        wait_for_state(tab, "running")
        wait_until(lambda: server.service.num_sequences == 1)
        tab.evaluate("document.getElementById('stop').click()")
        wait_for_state(tab, "idle")
        wait_until(lambda: server.service.num_sequences == 0)
        assert tab.evaluate("document.getElementById('error').hidden")

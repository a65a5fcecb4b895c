"""What a terminal shows while models load and prompts run, and what is shown elsewhere."""

from __future__ import annotations

import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from types import SimpleNamespace

import pytest

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LLM, SamplingParams, progress
from mtp_plugin.hosts.embedded.progress import batch_progress

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


class Terminal:
    """A terminal as standard error, from its making to :meth:`end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        self._master, slave = pty.openpty()
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.stream = os.fdopen(slave, "w")
        monkeypatch.setattr(sys, "stderr", self.stream)

    def _read(self) -> None:
        # an error is the other end's closing
        with suppress(OSError):
            while piece := os.read(self._master, 4096):
                self._shown.extend(piece)

    def end(self) -> str:
        """Everything that was shown."""
        self.stream.close()
        self._reader.join(10)
        return self._shown.decode()

    def close(self) -> None:
        """Give the terminal back."""
        self.end()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Terminal]]:
    """Makes standard error a terminal; called within a test, before which pytest sets it anew."""
    made: list[Terminal] = []

    def make() -> Terminal:
        made.append(Terminal(monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def llm(harness) -> Iterator[LLM]:
    with harness.llm() as made:
        yield made


def test_a_terminal_counts_the_prompts_that_have_ended(terminal, llm, monkeypatch) -> None:
    screen = terminal()
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    outputs = llm.generate(PROMPTS, [greedy(1), greedy(9), greedy(9)])
    shown = screen.end()
    assert [len(output.token_ids) for output in outputs] == [1, 9, 9]
    for count in ("0/3", "1/3", "3/3"):
        assert count in shown
    assert "tokens/s" in shown
    # the cursor that was hidden is back
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("given", "use_tqdm", "term"),
    [
        (PROMPTS, False, "xterm"),
        (PROMPTS, True, "dumb"),
        (PROMPTS[:1], True, "xterm"),
        (PROMPTS[0], True, "xterm"),
    ],
)
def test_one_prompt_or_a_disabled_bar_shows_nothing(
    terminal, llm, monkeypatch, given: list, use_tqdm: bool, term: str
) -> None:
    screen = terminal()
    monkeypatch.setenv("TERM", term)
    llm.generate(given, greedy(3), use_tqdm=use_tqdm)
    assert "prompts" not in screen.end()


def test_loading_is_shown_and_gone_again(terminal, harness) -> None:
    screen = terminal()
    harness.llm().shutdown()
    shown = screen.end()
    assert "KV cache" in shown
    # the cursor is back, on a line that is empty again
    assert shown.rindex("\x1b[?25h") > shown.rindex("KV cache")
    assert shown.endswith("\x1b[2K")


def test_a_progress_callback_replaces_the_status_line(terminal, harness) -> None:
    screen = terminal()
    lines: list[str] = []
    LLM({"model": harness.path}, model=harness.model, on_progress=lines.append).shutdown()
    assert "allocating the KV cache" in lines
    assert screen.end() == ""


@pytest.mark.parametrize("stream", [StringIO(), None])
def test_without_a_terminal_nothing_is_shown(harness, monkeypatch, stream) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with harness.llm() as llm:
        assert len(llm.generate(PROMPTS, greedy(3))) == 3
    assert stream is None or stream.getvalue() == ""


def test_an_interrupt_leaves_the_terminal_as_it_was(terminal, llm, monkeypatch) -> None:
    screen = terminal()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.executor, "_responses", interrupted)
    with pytest.raises(ExecutorError, match="interrupted"):
        llm.generate(PROMPTS, greedy(3))
    shown = screen.end()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_terminal_that_goes_away_ends_nothing(terminal, monkeypatch) -> None:
    screen = terminal()
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    gain = SimpleNamespace(token_ids=[1, 2], finish_reason=None)
    with batch_progress(3, use_tqdm=True) as report:
        report([gain])

        def gone(_: str) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(screen.stream, "write", gone, raising=False)
        report([gain])
        report([gain])

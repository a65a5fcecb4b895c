"""Processes: readers that leave, output that goes nowhere, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.calls import EAGLE


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mtp_plugin", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_a_reader_that_leaves_ends_the_process_quietly(config: Callable[..., str]) -> None:
    process = start("generate", "-c", config(EAGLE), "-p", "ab", "-n", "400", "--no-compare")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    expected = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 141
    assert "Traceback" not in expected
    assert "BrokenPipe" not in expected


WRITING = (
    ("generate", "-c", "CONFIG", "-p", "ab", "-n", "4", "--no-compare", "--json"),
    ("generate", "-c", "CONFIG", "-p", "ab", "-n", "4", "--no-compare"),
    ("generate", "-c", "CONFIG", "-p", "ab", "-n", "2", "--grid", "k=1", "--json"),
    ("doctor", "-c", "CONFIG"),
    ("config", "CONFIG"),
)
EACH_ON_ITS_OWN = """
import json, os, sys
import transformers.modeling_utils  # what takes long, once for all
from mtp_plugin.__main__ import main
for command in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.argv[1:] = command
        sys.exit(main())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(2, f"ended with {code}\\n".encode())
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_output_that_cannot_be_written_is_one_line(config: Callable[..., str]) -> None:
    file = config(EAGLE)
    commands = [[file if a == "CONFIG" else a for a in arguments] for arguments in WRITING]
    ended = subprocess.run(
        [sys.executable, "-c", EACH_ON_ITS_OWN, json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    expected = ended.stderr.decode()
    assert "Traceback" not in expected
    of_each = expected.split("ended with 1\n")
    assert len(of_each) == len(WRITING) + 1, expected
    assert of_each[-1] == ""
    message = "error: standard output cannot be written: No space left on device"
    assert [of_one.splitlines()[-1] for of_one in of_each[:-1]] == [message] * len(WRITING)


CLOSED = "standard output is closed; redirect it to /dev/null to discard it"


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("bench --help >/dev/full", "the output cannot be written: No space left on device"),
        ("--version >&-", CLOSED),
        ("generate >&-", CLOSED),
    ],
)
def test_output_that_goes_nowhere_is_one_line(way: str, message: str) -> None:
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m mtp_plugin {way}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr.decode() == f"error: {message}\n"
    assert ended.returncode == 1


@pytest.mark.thinned
@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "-c", "CONFIG"),
        ("generate", "-c", "CONFIG", "-p", "ab", "-n", "4", "--grid", "k=1"),
    ],
    ids=["doctor", "generate"],
)
def test_a_report_that_nothing_reads_ends_the_process_quietly(
    config: Callable[..., str], arguments: tuple[str, ...]
) -> None:
    file = config(EAGLE)
    with start(*(file if a == "CONFIG" else a for a in arguments)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        expected = process.stderr.read().decode()
        assert process.wait(60) == 141
    assert "Traceback" not in expected
    assert "error" not in expected


@pytest.mark.thinned
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_document_that_nothing_reads_ends_the_process_quietly(
    config: Callable[..., str], stream: str
) -> None:
    arguments = ("-c", config(EAGLE), "-p", "ab", "-n", "4", "--no-compare", "--json")
    with start("generate", *arguments) as process:
        getattr(process, stream).close()
        other = process.stdout if stream == "stderr" else process.stderr
        assert other is not None
        expected = other.read().decode()
        assert process.wait(60) == 141
    assert "Traceback" not in expected
    assert "Pipe" not in expected
    assert stream == "stdout" or expected == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes inherit an ignored signal, as background jobs of a script have it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_process_cleanly(config: Callable[..., str]) -> None:
    process = start("generate", "-c", config(EAGLE), "-p", "ab", "-n", "450", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, expected = process.communicate(timeout=60)
    assert process.returncode == 130
    assert expected.decode().endswith("interrupted\n")
    assert "Traceback" not in expected.decode()
    assert b"identical" not in out


SWALLOWED = """
import atexit, gc, os, signal, sys
from mtp_plugin.cli import opening
from mtp_plugin.tools.terminal.console import messages

def import_module(name):
    try:
        os.kill(os.getpid(), signal.SIGINT) if sys.argv[1:] else None
        return len(name)
    except KeyboardInterrupt:
        pass

opening.import_module = import_module
atexit.register(lambda: print(gc.get_freeze_count() < 1000))
opening.import_engine(messages())
print(gc.get_freeze_count() > 1000, signal.getsignal(signal.SIGINT).__name__)
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), (0, "True default_int_handler\nTrue\n")), (("interrupt",), (130, ""))],
)
def test_ctrl_c_during_imports(arguments: tuple[str, ...], expected: tuple[int, str]) -> None:
    """torch swallows the exception while it imports numpy; imports are frozen until the exit."""
    command = [sys.executable, "-c", SWALLOWED, *arguments]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert (ended.returncode, ended.stdout) == expected
    assert ended.stderr.endswith("interrupted\n") == bool(arguments)

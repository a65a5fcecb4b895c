"""A call works or is refused by name, whatever runs at its moment; none waits for itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.embedded.moments import cases

WITHIN_A_STEP = {"step", "decode", "stop callback", "collected"}
WAITING = {
    "generate",
    "generate text",
    "next of a stream",
    "next of the stream",
    "submit and wait",
    "submit text in a loop",
    "result of another",
    "await another",
    "generate_async",
    "generate_async text",
    "stream_async",
}
TEXTS = {"generate text", "submit text", "submit text in a loop", "generate_async text"}


def outcome(moment: str, call: str) -> set[str]:
    """What becomes of the call."""
    if moment in WITHIN_A_STEP and call in WAITING:
        return {"ExecutorError"}
    if moment == "encode" and call in TEXTS:
        return {"RequestError"}
    return {"worked"}


@pytest.fixture(scope="module")
def found(harnesses, host, once_per_run) -> dict[tuple[str, str], dict[str, Any]]:
    """What became of every case, in processes of their own."""

    def run(_: Path) -> str:
        command = [
            sys.executable,
            "-m",
            "tests.hosts.embedded.moments",
            harnesses("echo", host).path,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = [json.loads(line) for line in once_per_run("moments", run).splitlines()]
    return {(line.pop("moment"), line.pop("call")): line for line in lines}


@pytest.mark.parametrize(("moment", "call"), cases())
def test_no_call_waits_for_itself(found, moment: str, call: str) -> None:
    reported = found[moment, call]
    assert reported["inner"] in outcome(moment, call), reported
    assert reported.get("outer") in {"worked", "ExecutorError", "RequestError"}, reported
    assert reported["end"] == ("shut down" if call in {"shutdown", "async with"} else "goes on")

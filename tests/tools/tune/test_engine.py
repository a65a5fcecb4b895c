"""An engine in a process: how it ends, why it failed, and its counters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.errors import HostError
from mtp_plugin.tools.tune import engine as engines
from mtp_plugin.tools.tune.answer import Setting
from mtp_plugin.tools.tune.engine import (
    EngineFailedError,
    EngineProcess,
    find_reason,
    run_requests,
)

LOG = """\
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] mtp_plugin.errors.ConfigError: too many ids
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_another_drafter_than_the_given_one_is_an_error() -> None:
    setting, used = Setting(1, drafter="draft_model,DIR"), SimpleNamespace(method="mtp")
    with pytest.raises(HostError, match="drafts with 'mtp' in place of 'draft_model'"):
        engines._check_drafter(setting, used)
    engines._check_drafter(Setting(1), used)
    engines._check_drafter(Setting(0), None)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "mtp_plugin.errors.ConfigError: too many ids",
        ),
        (
            "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the "
            "root cause.",
            "mtp_plugin.errors.ConfigError: too many ids",
        ),
        ("the process ended", "mtp_plugin.errors.ConfigError: too many ids"),
        ("ValueError: no such model", "ValueError: no such model"),
    ],
)
def test_reason_is_the_message_or_the_last_error_of_the_log(message: str, reason: str) -> None:
    assert find_reason(message, LOG) == reason
    assert find_reason(message, "") == message


class StubEngine:
    """Returns the tokens of its steps, by number of the request."""

    def __init__(self, steps: list[dict[int, list[int]]]) -> None:
        self.steps = steps
        self.params: list[Any] = []

    def add_request(self, identifier: str, prompt: Any, params: Any) -> None:
        assert (identifier, prompt) == (str(len(self.params)), {"prompt_token_ids": [5]})
        self.params.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[Any]:
        tokens = self.steps.pop(0)
        return [
            SimpleNamespace(
                request_id=f"{number}-suffix",
                outputs=[SimpleNamespace(token_ids=ids)],
                finished=not self.steps,
            )
            for number, ids in tokens.items()
        ]

    def get_metrics(self) -> list[Any]:
        values = {"num_drafts": 4, "num_accepted_tokens_per_pos": [3, 1]}
        done = {name: value for name, value in values.items() if not self.steps}
        return [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value, values=value)
            for name, value in done.items()
        ]


def test_steps_in_which_all_requests_generate_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(DELTA="delta")
    stubs = {
        "vllm": SimpleNamespace(SamplingParams=lambda **options: options),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=kinds),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    steps = [
        {0: [1]},
        {0: [2], 1: [1]},
        {},
        {0: [3, 4], 1: [2]},
        {0: [5], 1: [3]},
        {0: [6], 1: [4]},
    ]
    engine = StubEngine(steps)
    result = run_requests(engine, [([5], {"seed": 0}), ([5], {"seed": 1})])
    assert result["tokens"] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    # neither the steps with the first tokens nor the one that ends requests
    assert len(result["step_ms"]) == 2
    assert result["acceptance"] == [0.75, 0.25]
    assert engine.params[1] == {"seed": 1, "detokenize": False, "output_kind": "delta"}


def serve_with_child(connection: Any, *_given: Any) -> None:
    """Start a process that holds the connection, as vLLM does, and wait."""
    os.setpgid(0, 0)
    child = os.fork()
    if child:
        connection.send((None, child))
    time.sleep(60)


def serve_without_answer(_connection: Any, *_given: Any) -> None:
    os.setpgid(0, 0)
    time.sleep(60)


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, serve: Any) -> EngineProcess:
    monkeypatch.setattr(engines, "_serve", serve)
    monkeypatch.setattr(engines, "TICK_SECONDS", 0.1)
    return EngineProcess(Setting(0), [], folder / "log", None)


LEAVES_MEMORY = """
from multiprocessing import shared_memory
import os, sys, time
from pathlib import Path
from mtp_plugin.tools.tune import engine

def serve(connection, *given):
    os.setpgid(0, 0)
    connection.send((None, shared_memory.SharedMemory(create=True, size=8).name))
    time.sleep(60)

if __name__ == "__main__":
    engine._serve = serve
    process = engine.EngineProcess(engine.Setting(0), [], Path("log"), None)
    print(process.result())
    process._is_starting = True
    process.close()
"""


def test_shared_memory_of_a_killed_engine_is_removed_without_a_warning(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEAVES_MEMORY)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.stderr == ""
    assert not Path("/dev/shm", done.stdout.strip()).exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Return whether a process ends within seconds: a signal takes effect later."""
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


def test_killed_process_is_a_failed_engine_and_leaves_no_child(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = start(monkeypatch, tmp_path, serve_with_child)
    child = engine.result()
    os.kill(engine._process.pid or 0, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="the process ended"):
            engine.encode([])
    assert is_running(child)
    engine.close()
    assert ends(child)


def test_second_interrupt_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = start(monkeypatch, tmp_path, serve_with_child)
    child, process = engine.result(), engine._process
    join = process.join

    def interrupted(timeout: float | None = None) -> None:
        if timeout is not None:
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(process, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not process.is_alive()
    assert ends(child)


def test_engine_that_starts_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = start(monkeypatch, tmp_path, serve_without_answer)
    monkeypatch.setattr(engine._process, "join", lambda timeout=None: (timeout is None) or 1 / 0)
    engine.close()
    engine._process._popen.wait(10)  # type: ignore[attr-defined]
    assert not engine._process.is_alive()


def test_connection_error_of_an_engine_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Any] = []

    def fail(*_given: Any) -> None:
        raise ConnectionRefusedError("no store")

    for name in ("setpgid", "dup2"):
        monkeypatch.setattr(os, name, lambda *_given: None)
    monkeypatch.setattr(engines, "_engine_arguments", fail)
    connection = SimpleNamespace(send=sent.append)
    engines._serve(connection, Setting(0), [], str(tmp_path / "log"), None)
    assert sent == [(EngineFailedError, "ConnectionRefusedError: no store")]


def test_prompts_without_a_chat_template_are_their_texts() -> None:
    tokenizer = SimpleNamespace(encode=lambda text: [text])
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b"},
    ]
    assert engines.encode_prompts(tokenizer, [messages, "c"]) == [["a\nb"], ["c"]]

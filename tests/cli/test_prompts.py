"""Where prompts come from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin.cli.serve import _read
from mtp_plugin.config.bounded import read_text
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.tools.terminal import prompts
from mtp_plugin.tools.texts import read_texts
from tests.cli.calls import EAGLE, FEW, Result, Run, open_empty_pipe


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("one.txt", b"def f(\n", ["def f(\n"]),
        ("one.txt", b"a\r\nb", ["a\r\nb"]),
        ("marked.txt", b"\xef\xbb\xbfa b", ["a b"]),
        ("marked.json", b'\xef\xbb\xbf["a"]', ["a"]),
        ("many.json", b'["a", "b\\n"]', ["a", "b\n"]),
        ("many.json", b'[{"prompt": "a", "path": "x.py"}, "b"]', ["a", "b"]),
    ],
)
def test_prompt_files(
    run: Run,
    config: Callable[..., str],
    tmp_path: Path,
    name: str,
    content: bytes,
    expected: list[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = ("--prompt-file", str(tmp_path / name), "-p", "first", "-n", "2", "--no-compare")
    result = run("generate", "-c", config(EAGLE), *arguments, "--json")
    assert [r["prompt"] for r in json.loads(result.out)["results"]] == ["first", *expected]


@pytest.mark.parametrize(
    "read",
    [prompts.prompts_of_file, lambda file: list(read_texts(file, print)), partial(_read, "--key")],
)
def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path, read: Callable[..., Any]) -> None:
    file = tmp_path / "pipe.txt"
    os.mkfifo(file)
    with pytest.raises(MTPPluginError, match="expected a regular file, got a pipe"):
        read(file)


def prompt_taken(result: Result) -> list[str]:
    return [r["prompt"] for r in json.loads(result.out)["results"]]


def test_a_pipe_that_the_shell_opened_is_read() -> None:
    """``--config <(command)``"""
    reader, writer = os.pipe()
    os.write(writer, b"model: somewhere\n")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}", "config", "a YAML file") == "model: somewhere\n"
    os.close(reader)


def test_piped_text_is_a_prompt(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, "def é\n".encode())
    os.close(writer)
    stdin(reader)
    assert prompt_taken(run("generate", "-c", config(EAGLE), *FEW)) == ["def é\n"]


def test_a_redirected_file_is_a_prompt(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("abc")
    stdin(os.open(tmp_path / "text", os.O_RDONLY))
    assert prompt_taken(run("generate", "-c", config(EAGLE), *FEW)) == ["abc"]


def test_a_given_prompt_leaves_standard_input_alone(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"later")
    os.close(writer)
    stdin(reader)
    assert prompt_taken(run("generate", "-c", config(EAGLE), "-p", "x", *FEW)) == ["x"]
    assert sys.stdin.read() == "later"


def test_standard_input_by_name(
    run: Run, config: Callable[..., str], stdin: Callable[[int], None]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"piped")
    os.close(writer)
    stdin(reader)
    arguments = ("-p", "x", "--prompt-file", "-", *FEW)
    assert prompt_taken(run("generate", "-c", config(EAGLE), *arguments)) == ["x", "piped"]


def open_terminal() -> int:
    return os.openpty()[1]


def open_silent_pipe() -> int:
    return os.pipe()[0]


NOTHING = [
    pytest.param(open_terminal, id="a terminal"),
    pytest.param(open_silent_pipe, id="a pipe without a writer"),
    pytest.param(open_empty_pipe, id="an empty pipe"),
    pytest.param(lambda: os.open(os.devnull, os.O_RDONLY), id="the null device"),
    pytest.param(None, id="closed"),
]


@pytest.mark.parametrize("opening", NOTHING)
def test_without_any_prompt_there_is_a_clear_error(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    opening: Callable[[], int] | None,
) -> None:
    monkeypatch.setattr(prompts, "STDIN_WAIT_SECONDS", 0.05)
    if opening is None:
        monkeypatch.setattr(sys, "stdin", None)
    else:
        stdin(opening())
    result = run("generate", "-c", config(EAGLE))
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        "error: no prompt: give --prompt TEXT or --prompt-file FILE, or pipe one in "
        f"(and there is no {checkpoint.parent / 'prompts.json'})"
    )


def test_bundled_prompts_lie_around_the_checkpoint(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
) -> None:
    monkeypatch.setattr(prompts, "STDIN_WAIT_SECONDS", 0.05)
    stdin(open_silent_pipe())
    bundled = checkpoint.parent / "prompts.json"
    bundled.write_text('[{"prompt": "one"}, {"prompt": "two"}]')
    try:
        result = run("generate", "-c", config(EAGLE), *FEW)
    finally:
        bundled.unlink()
    assert prompt_taken(result) == ["one", "two"]
    expected_value = result.err.splitlines()
    assert expected_value[0].startswith("nothing came on standard input within 0.05 s")
    assert expected_value[1] == f"no prompt was given: taking those of {bundled}"

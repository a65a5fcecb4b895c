"""What is refused is one line that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tests.cli.calls import EAGLE, FEW, VANILLA, Run, byte_tokenizer, open_empty_pipe


def test_named_errors_are_one_line_each(run: Run, config: Callable[..., str]) -> None:
    file = config({"decoding_type": "MTP", "max_draft_len": 99}, max_batch_sizes=3)
    result = run("generate", "-c", file, "-p", "x")
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"error: {file}: ") for line in lines)
    assert "max_draft_len: should be less than or equal to 16, got 99" in result.err
    assert "max_batch_sizes: unknown key; did you mean max_batch_size?" in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["generate", "parity", "config"])
def test_what_does_not_fit_the_checkpoint_names_the_file(
    run: Run, config: Callable[..., str], command: str
) -> None:
    file = config({**VANILLA, "max_draft_len": 4})
    result = run(command, *([file] if command == "config" else ["-c", file, "-p", "ab"]))
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith(f"error: {file}: max_draft_len: 4 is more than the checkpoint's 3 MTP")


def test_doctor_reports_of_a_tokenizer_that_is_not_read(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").rename(other / "tokenizer.model")
    result = run("doctor", "-c", config(EAGLE, model=str(other)))
    expected = "prompts must be token ids (tokenizer.model is not read, expected tokenizer.json)"
    assert f"none: {expected}" in result.out
    result = run("generate", "-m", str(other), "-p", "ab")
    assert result.code == 2
    assert f"no tokenizer: {expected}" in result.err.splitlines()
    assert result.err.splitlines()[-1] == (
        "error: request 0: a text prompt needs a tokenizer, the checkpoint has no tokenizer.json"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "x", "-n", "0"), "sampling parameters: max_new_tokens must be an integer >= 1"),
        (("-p", ""), "prompt 1 of 1: the prompt is empty"),
        (("-p", "x" * 600), "request 0: the prompt has 600 tokens, max_seq_len is 512"),
        (
            ("-p", "a", "-p", "x" * 600),
            "prompt 2 of 2: the prompt has 600 tokens, max_seq_len is 512",
        ),
        (("-p", "x", "--stop", ""), "sampling parameters: stop must be a string or a sequence"),
        (("-p", "x", "--stop", "<eos>x"), "request 0: not supported: stop='<eos>x' ("),
    ],
)
def test_requests_refused(
    run: Run, config: Callable[..., str], arguments: tuple[str, ...], message: str
) -> None:
    result = run("generate", "-c", config(EAGLE), *arguments, "--no-marks")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in result.err


EMPTY = [
    pytest.param(("-p", "a", "-p", ""), None, "prompt 2 of 2", id="an option"),
    pytest.param(("--prompt-file", "FILE"), ("one.txt", ""), "prompt 1 of 1", id="a text file"),
    pytest.param(
        ("-p", "a", "--prompt-file", "FILE"),
        ("many.json", '["a", {"prompt": ""}, "b"]'),
        "prompt 3 of 4",
        id="a JSON file",
    ),
    pytest.param(("--prompt-file", "-"), None, "prompt 1 of 1", id="standard input"),
]


@pytest.mark.parametrize("command", ["generate", "parity"])
@pytest.mark.parametrize(("arguments", "file", "place"), EMPTY)
def test_an_empty_prompt_is_found_before_a_weight_is_loaded(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    tmp_path: Path,
    command: str,
    arguments: tuple[str, ...],
    file: tuple[str, str] | None,
    place: str,
) -> None:
    stdin(open_empty_pipe())
    name, content = file or ("none.txt", "")
    (tmp_path / name).write_text(content)
    named = [str(tmp_path / name) if a == "FILE" else a for a in arguments]
    result = run(command, "-c", config(EAGLE), *named)
    assert (result.code, result.err) == (2, f"error: {place}: the prompt is empty\n")


def test_an_empty_text_may_have_a_token(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    """Some tokenizers begin every text with one of their own."""
    folder = tmp_path / "begins"
    shutil.copytree(checkpoint, folder)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<think> $A", special_tokens=[("<think>", 257)]
    )
    tokenizer.save_pretrained(folder)
    result = run("generate", "-c", config(EAGLE, model=str(folder)), "-p", "", *FEW)
    assert result.code == 0
    assert json.loads(result.out)["results"][0]["prompt_token_ids"] == [257]


@pytest.mark.parametrize("command", ["generate", "config"])
def test_a_missing_file(run: Run, command: str, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml")
    result = run(command, *(["-c"] if command == "generate" else []), file)
    assert (result.code, result.err) == (2, f"error: {file}: no such file; expected a YAML file\n")


def test_a_missing_checkpoint(run: Run, config: Callable[..., str], tmp_path: Path) -> None:
    result = run("generate", "-c", config(EAGLE, model=str(tmp_path / "none")), "-p", "x")
    assert result.code == 2
    assert "none: expected a directory, it does not exist" in result.err


def test_wrong_usage(run: Run) -> None:
    assert run("generate").code == 2
    assert run("nonsense").code == 2

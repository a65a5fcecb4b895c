"""Read prompts from options, a file, standard input, or next to the checkpoint."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtp_plugin.config.bounded import read_all, read_bounded
from mtp_plugin.errors import RequestError
from mtp_plugin.requests.prompts import place_of
from mtp_plugin.requests.tokenizer import encode

BUNDLED = "prompts.json"
"""File with prompts in the parent folder of a checkpoint."""
STDIN_WAIT_SECONDS = 5.0
"""Time to wait for input from an open pipe."""

STANDARD_INPUT = Path("-")


def read_prompts(
    given: Sequence[str],
    file: Path | None,
    model: Path,
    report: Callable[[str], None],
    *,
    optional: bool = False,
) -> list[str]:
    """Return the prompts: those given and those of the file, else standard input, else bundled.

    Args:
        given: prompts of the command line.
        file: .txt (one prompt), .json (a list), or - for standard input (one prompt).
        model: checkpoint directory; bundled prompts are searched for in its parent folder.
        report: called with a line that explains an unexpected choice.
        optional: whether there may be no prompt; standard input is not read then.

    Raises:
        RequestError: the file cannot be read, a prompt is empty, or there is no prompt.
        CheckpointError: a prompt is empty and the tokenizer cannot encode it.
    """
    prompts = [*given, *([] if file is None else prompts_of_file(file))]
    if prompts:
        return _not_empty(prompts, model)
    if file is None and not optional and (text := _piped_text(report)):
        return [text]
    bundled = model.parent / BUNDLED
    if file is None and bundled.is_file():
        report(f"no prompt was given: taking those of {bundled}")
        return _not_empty(prompts_of_file(bundled), model)
    if optional:
        return []
    raise RequestError(
        "no prompt: give --prompt TEXT or --prompt-file FILE, or pipe one in "
        f"(and there is no {bundled})"
    )


def _not_empty(prompts: list[str], model: Path) -> list[str]:
    """Refuse prompts without a token, before weights are loaded."""
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt]
    if not empty:
        return prompts
    # some tokenizers start every prompt with a BOS token
    from mtp_plugin.hosts.embedded.models import read_config, read_tokenizer

    tokenizer = read_tokenizer(read_config(model))
    if tokenizer is not None and encode(tokenizer, ""):
        return prompts
    raise RequestError(f"{place_of(empty[0], len(prompts))}: the prompt is empty")


def prompts_of_file(file: Path) -> list[str]:
    """Return the prompts of a file, or of standard input.

    Raises:
        RequestError: the file cannot be read, or does not contain prompts.
    """
    if file == STANDARD_INPUT:
        return [_read_stdin()]
    if file.suffix not in (".txt", ".json"):
        raise RequestError(
            f"prompt file {file}: expected .txt (one prompt), .json (a list) or - (standard input)"
        )
    try:
        # keep newlines; drop a byte-order mark
        text = read_bounded(file).decode("utf-8-sig")
    except FileNotFoundError:
        raise RequestError(f"prompt file {file}: no such file") from None
    except OSError as error:
        raise RequestError(f"prompt file {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"prompt file {file}: expected UTF-8 text: {error}") from None
    if file.suffix == ".txt":
        return [text]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"prompt file {file}: expected JSON: {error}") from None
    if not isinstance(content, list) or not content:
        raise RequestError(f"prompt file {file}: expected a list of prompts that is not empty")
    return [_prompt_of(item, f"prompt file {file}: item {i}") for i, item in enumerate(content, 1)]


def _prompt_of(item: Any, where: str) -> str:
    prompt = item.get("prompt") if isinstance(item, dict) else item
    if not isinstance(prompt, str):
        raise RequestError(f"{where}: expected text or an object with the text under 'prompt'")
    return prompt


def _piped_text(report: Callable[[str], None]) -> str:
    """Return the text piped to standard input, or an empty string."""
    stdin = sys.stdin
    if stdin is None or stdin.closed or stdin.isatty():
        return ""
    try:
        descriptor = stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return ""
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        # a parent process may pass a pipe that is never written or closed
        ready, _, _ = select.select([descriptor], [], [], STDIN_WAIT_SECONDS)
        if not ready:
            report(
                f"nothing came on standard input within {STDIN_WAIT_SECONDS:g} s, going on without "
                "it (--prompt-file - waits for it)"
            )
            return ""
    return _read_stdin()


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError("standard input is closed; expected a prompt there")
    try:
        return read_all(sys.stdin.buffer).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input: expected UTF-8 text: {error}") from None
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror}") from None

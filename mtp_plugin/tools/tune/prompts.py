"""Prompts for a user who gives none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.prompts import place_of
from mtp_plugin.tools.terminal.prompts import BUNDLED, STANDARD_INPUT, prompts_of_file
from mtp_plugin.tools.texts import read_conversations

GENERAL = (
    "Write a Python function that merges overlapping intervals, with a docstring and type hints.",
    "Explain to a new colleague what a KV cache is and why it makes decoding faster.",
    "A train leaves at 9:40 and covers 210 km at 84 km/h. When does it arrive? Show each step.",
    "Write a SQL query for the ten customers with the highest revenue in each of the last 3 years.",
    "Summarize in five bullet points what a company should do after a data breach.",
    "Give a JSON object that describes a library with three books: title, author, year, tags.",
    "Translate into French, German and Spanish: The meeting was moved to Thursday afternoon.",
    "Write a short story about a lighthouse keeper who receives an unexpected letter.",
)


def tune_prompts(
    given: Sequence[str], file: Path | None, model: str, count: int
) -> tuple[list[Any], str]:
    """Return prompts (texts and conversations), and where they come from.

    Args:
        given: prompts of the command line.
        file: .jsonl, .json, .txt or -; without it and other prompts: those next to the checkpoint,
            or general ones.

    Raises:
        RequestError: the file cannot be read, has no prompt, or a prompt is empty.
    """
    texts, source = list(given), "the command line"
    if file is not None and (file.suffix in (".json", ".txt") or file == STANDARD_INPUT):
        texts, source = [*texts, *prompts_of_file(file)], str(file)
    elif file is not None:
        return [*texts, *read_conversations(file, count)][:count], str(file)
    if texts:
        if not all(texts):
            raise RequestError(f"{place_of(texts.index('') + 1, len(texts))}: the prompt is empty")
        return texts[:count], source
    bundled = Path(model).parent / BUNDLED
    if bundled.is_file():
        return list(prompts_of_file(bundled)[:count]), str(bundled)
    return [[{"role": "user", "content": text}] for text in GENERAL[:count]], "general prompts"

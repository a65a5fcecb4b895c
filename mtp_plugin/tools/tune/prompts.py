"""Prompts for a user who gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_plugin.tools.terminal.prompts import BUNDLED, prompts_of_file
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


def tune_prompts(file: Path | None, model: str, count: int) -> tuple[list[Any], str]:
    """Return prompts (texts and conversations), and where they come from.

    Args:
        file: .jsonl; None: those next to the checkpoint, or general ones.

    Raises:
        RequestError: the file cannot be read, or has no prompt.
    """
    if file is not None:
        return list(read_conversations(file, count)), str(file)
    bundled = Path(model).parent / BUNDLED
    if bundled.is_file():
        return list(prompts_of_file(bundled)[:count]), str(bundled)
    return [[{"role": "user", "content": text}] for text in GENERAL[:count]], "general prompts"

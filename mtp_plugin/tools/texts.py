"""Stream the texts of files of any size: .txt, or .jsonl with an object or a text per line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mtp_plugin.config.bounded import MAX_BYTES, open_regular
from mtp_plugin.errors import RequestError

BLOCK_BYTES = 4096
"""A .txt file is read in blocks of this size, which end at the end of a line if they hold one."""

OnRead = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""


def read_texts(file: Path, on_read: OnRead) -> Iterator[str]:
    """Yield the texts of a file: blocks of a .txt file, records of a .jsonl file.

    Raises:
        RequestError: the file cannot be read, or a line is not as described.
    """
    if file.suffix not in (".txt", ".jsonl"):
        raise RequestError(f"{file}: expected a file .txt or .jsonl")
    with _opened(file) as opened:
        if file.suffix == ".txt":
            yield from _blocks(opened, on_read)
        else:
            for where, record in _records(file, opened, on_read):
                yield _text_of(record, where)


def read_conversations(file: Path, count: int) -> list[str | list[dict[str, Any]]]:
    """Return the first prompts of a .jsonl file: texts, or messages up to the last user's.

    Raises:
        RequestError: the file cannot be read, has no prompt, or a line is not as described.
    """
    if file.suffix != ".jsonl":
        raise RequestError(f"{file}: expected a file .jsonl")
    found: list[str | list[dict[str, Any]]] = []
    with _opened(file) as opened:
        for where, record in _records(file, opened, lambda _: None):
            text = _text_of(record, where)
            if not text:  # an engine would fail
                raise RequestError(f"{where}: the prompt is empty")
            messages = record.get("messages") if isinstance(record, dict) else None
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            found.append(messages or text)
            if len(found) == count:
                break
    if not found:
        raise RequestError(f"{file}: expected at least one prompt, got none")
    return found


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    try:
        with open_regular(file) as opened:
            yield opened
    except FileNotFoundError:
        raise RequestError(f"{file}: no such file") from None
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: expected UTF-8 text: {error}") from None


def _blocks(opened: IO[bytes], on_read: OnRead) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    while data := opened.read(BLOCK_BYTES):
        on_read(len(data))
        text = rest + decoder.decode(data)
        end = text.rfind("\n") + 1 or len(text)
        rest = text[end:]
        yield text[:end]
    yield rest + decoder.decode(b"", final=True)


def _records(file: Path, opened: IO[bytes], on_read: OnRead) -> Iterator[tuple[str, Any]]:
    """Yield each record with its place, for messages."""
    number = 0
    while line := opened.readline(MAX_BYTES + 1):
        number += 1
        where = f"{file}, line {number}"
        if len(line) > MAX_BYTES:
            raise RequestError(f"{where}: expected at most {MAX_BYTES} bytes, got more")
        on_read(len(line))
        text = line.decode("utf-8-sig")
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not valid JSON: {error}") from None
        yield where, record


def _text_of(record: Any, where: str) -> str:
    """Return the text of a record: of its fields, and of the contents of its messages."""
    if isinstance(record, str):
        return record
    given = record if isinstance(record, dict) else {}
    texts = [given[name] for name in ("prompt", "text") if given.get(name) is not None]
    messages = given.get("messages")
    messages = [] if messages is None else messages
    if isinstance(messages, list):
        texts += [text_of_message(message) for message in messages]
    if (
        not texts
        or not isinstance(messages, list)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise RequestError(
            f'{where}: expected a text, or an object with a text as "prompt" or "text", or with a '
            'list of objects with "content" as "messages"'
        )
    return "\n".join(texts)


def text_of_message(message: Any) -> str | None:
    """Return the text of a message; None: it is no message."""
    content = message.get("content", "") if isinstance(message, dict) else 0
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text", "") for part in content]
        return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
    return "" if content is None else content if isinstance(content, str) else None

"""The draft vocabulary: which token ids may be drafted."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mtp_plugin.config.bounded import MAX_BYTES, read_file, text_of
from mtp_plugin.errors import ConfigError, format_value

KEY = "mtp.draft_vocab"
SHOWN = 5
"""Number of ids that a message lists."""
WANTED = "a file of token ids: a JSON list, an id or a range a line, .npy, or .pt of SGLang"
MAX_IDS = 2**24
"""Ids of a file at most: a range, or a tensor that repeats an element, is longer than its file."""
_LINE = re.compile(r"([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?")
_NPY, _PT = b"\x93NUMPY", (b"PK\x03\x04", b"\x80")
"""First bytes of files of numpy, and of torch, which no UTF-8 text has but for ``PK``."""


def resolve_draft_vocab(
    option: int | str | None, vocab_size: int | None = None, *, key: str = KEY
) -> Sequence[int] | None:
    """Return the ids that may be drafted, ascending; None: all.

    Args:
        option: ``mtp.draft_vocab``: how many of the lowest ids, or the path of a file: a JSON list,
            an id or an inclusive range (``0-32767``) a line, a one-dimensional array in
            ``.npy``, or a list or tensor of ``torch.save``, as SGLang's token maps. Its first bytes
            say which, not its name.
        vocab_size: V; None if it is not known yet and ids cannot be checked against it.
        key: of the option, for messages.

    Raises:
        ConfigError: a file that cannot be read or has other values than integers, an id twice or
            outside the vocabulary, or more ids than the vocabulary has.
    """
    if option is None:
        return None
    if isinstance(option, int):
        if vocab_size is not None and option > vocab_size:
            raise ConfigError(
                f"{key}: expected at most the vocabulary of {vocab_size}, got {option}"
            )
        return range(option)
    where = f"{key}: {option}"
    ids = _token_ids(_values(read_file(option, where, WANTED), where), where)
    if vocab_size is not None and ids[-1] >= vocab_size:
        outside = [token for token in ids if token >= vocab_size]
        raise ConfigError(
            f"{where}: expected ids of the vocabulary of {vocab_size}, got {_listed(outside)}"
        )
    return ids


def add_draft_ids(ids: Sequence[int], added: Iterable[int], vocab_size: int) -> Sequence[int]:
    """Return ``ids`` with those of ``added`` that are in the vocabulary, ascending.

    Args:
        ids: as `resolve_draft_vocab` returned them; the same object if nothing is missing.
        added: stop ids and thinking tags, without which no draft could be accepted at the end of an
            output or of its thinking phase.
    """
    missing = {token for token in added if 0 <= token < vocab_size}.difference(ids)
    return sorted([*ids, *missing]) if missing else ids


def _values(content: bytes, where: str) -> Any:
    """Return what a file has, by its first bytes."""
    if content.startswith((_NPY, *_PT)):
        try:
            load = _load_npy if content.startswith(_NPY) else _load_pt
            return load(io.BytesIO(content), where)
        except ConfigError:
            raise
        except Exception as error:  # numpy and torch raise errors of any kind
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(f"{where}: cannot be loaded: {reason}; expected {WANTED}") from None
    text = text_of(content, where)
    if not text.lstrip().startswith(("[", "{", '"')):
        return _lines(text, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _lines(text: str, where: str) -> list[int]:
    """Return the ids of lines with an id or a range each; empty lines are left out."""
    ids: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if last < first:
            raise ConfigError(
                f"{where}, line {number}: expected a token id or a range such as 0-32767, got "
                f"{_listed([line.strip()])}"
            )
        if len(ids) + last - first >= MAX_IDS:
            raise ConfigError(f"{where}, line {number}: expected at most {MAX_IDS} ids, got more")
        ids += range(first, last + 1)
    return ids


def _load_npy(file: io.BytesIO, where: str) -> Any:
    import numpy

    return _elements(numpy.load(file, allow_pickle=False), where)


def _load_pt(file: io.BytesIO, where: str) -> Any:
    import torch

    if file.read(2) == b"PK":  # of an older form, no tensor is larger than the file
        size = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
        if size > MAX_BYTES:
            raise ConfigError(f"{where}: expected entries of at most {MAX_BYTES} bytes, got {size}")
    file.seek(0)
    found = torch.load(file, map_location="cpu", weights_only=True)
    return _elements(found, where) if isinstance(found, torch.Tensor) else found


def _elements(array: Any, where: str) -> Any:
    """Return the elements of an array or tensor of integers."""
    dtype = getattr(array.dtype, "name", str(array.dtype))
    if re.fullmatch(r"(torch\.)?u?int\d+", dtype) is None:
        raise ConfigError(f"{where}: expected integers, got {dtype}")
    shape = tuple(array.shape)
    if len(shape) != 1 or shape[0] > MAX_IDS:
        raise ConfigError(
            f"{where}: expected one dimension of at most {MAX_IDS} ids, got the shape {shape}"
        )
    return array.tolist()


def _token_ids(data: Any, where: str) -> list[int]:
    """Return the ids of a file, ascending."""
    if not isinstance(data, list):
        raise ConfigError(f"{where}: expected a list of token ids, got {type(data).__name__}")
    if not data:
        raise ConfigError(f"{where}: expected at least one token id, got an empty list")
    odd = [item for item in data if type(item) is not int or item < 0]
    if odd:
        raise ConfigError(f"{where}: expected integers of at least 0, got {_listed(odd)}")
    twice = [token for token, count in Counter(data).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{where}: expected every id once, got {_listed(sorted(twice))} more than once"
        )
    return sorted(data)


def _listed(items: Sequence[Any]) -> str:
    shown = ", ".join(_spelled(item)[:40] for item in items[:SHOWN])
    rest = len(items) - SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _spelled(item: Any) -> str:
    """Spell an item as JSON does; what only a pickle has may be of any size."""
    is_short = item is None or isinstance(item, (str, bool, float))
    return json.dumps(item) if is_short else format_value(item)

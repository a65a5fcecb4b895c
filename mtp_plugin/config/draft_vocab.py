"""The draft vocabulary: which token ids may be drafted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mtp_plugin.config.bounded import read_text
from mtp_plugin.errors import ConfigError

KEY = "mtp.draft_vocab"
SHOWN = 5
"""Number of ids that a message lists."""


def resolve_draft_vocab(
    option: int | str | None, vocab_size: int | None = None, *, key: str = KEY
) -> Sequence[int] | None:
    """Return the ids that may be drafted, ascending; None: all.

    Args:
        option: ``mtp.draft_vocab``: how many of the lowest ids, or the path of a JSON list of ids.
        vocab_size: V; None if it is not known yet and ids cannot be checked against it.
        key: of the option, for messages.

    Raises:
        ConfigError: a file that is not such a list, an id twice or outside the vocabulary, or more
            ids than the vocabulary has.
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
    text = read_text(option, where, "a JSON list of token ids")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    ids = _token_ids(data, where)
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
    shown = ", ".join(json.dumps(item)[:40] for item in items[:SHOWN])
    rest = len(items) - SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown

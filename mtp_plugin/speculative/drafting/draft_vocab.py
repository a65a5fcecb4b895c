"""The draft vocabulary: which token ids may be drafted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mtp_plugin.config.bounded import read_bounded
from mtp_plugin.errors import ConfigError, expect

KEY = "mtp.draft_vocab"
SHOWN = 5
"""Number of ids that a message lists."""


def resolve_draft_vocab(
    option: int | str | None, vocab_size: int | None = None
) -> Sequence[int] | None:
    """Return the ids that may be drafted, ascending; None: all.

    Args:
        option: ``mtp.draft_vocab``: how many of the lowest ids, or the path of a JSON list of ids.
        vocab_size: V; None if it is not known yet and ids cannot be checked against it.

    Raises:
        ConfigError: a file that is not such a list, an id twice or outside the vocabulary, or more
            ids than the vocabulary has.
    """
    if option is None:
        return None
    if isinstance(option, int):
        if vocab_size is not None and option > vocab_size:
            raise ConfigError(
                f"{KEY}: expected at most the vocabulary of {vocab_size}, got {option}"
            )
        return range(option)
    where = f"{KEY}: {option}"
    ids = _token_ids(_read_json(option, where), where)
    if vocab_size is not None and ids[-1] >= vocab_size:
        outside = [token for token in ids if token >= vocab_size]
        raise ConfigError(
            f"{where}: expected ids of the vocabulary of {vocab_size}, got {_listed(outside)}"
        )
    return ids


def place_draft_vocab(
    option: int | str | None, ids: torch.Tensor | None, device: torch.device | str
) -> torch.Tensor | None:
    """Return the ids that a worker drafts from, [V'] int32 on ``device``; None: all.

    Args:
        option: ``mtp.draft_vocab`` of the worker's config. ids: ``draft_vocab_ids`` of the worker.

    Raises:
        ConfigError: ``option`` without ids, or ids that are no vector of torch.int32.
    """
    if ids is None:
        expect(
            option is None,
            ConfigError,
            f"{KEY}: {option!r} would be ignored; expected draft_vocab_ids with it",
        )
        return None
    expect(
        ids.dim() == 1 and ids.shape[0] > 0 and ids.dtype == torch.int32,
        ConfigError,
        "draft_vocab_ids: expected a vector of torch.int32, one id or more, got "
        f"{ids.dtype} {list(ids.shape)}",
    )
    return ids.to(device=device).contiguous()


def _read_json(path: str, where: str) -> Any:
    try:
        return json.loads(read_bounded(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file; expected a JSON list of token ids") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


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

"""The thinking phase of reasoning models: its two tokens, and the phase after a run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtp_plugin.errors import ConfigError, expect

DEFAULT_BEGIN = "<think>"
DEFAULT_END = "</think>"
NO_TOKEN = -1


def read_thinking_token(config: Any, edge: str) -> int:
    """The ``begin`` or ``end`` thinking token id of a config, in lower or upper case; -1 if
    unset."""
    name = f"{edge}_thinking_phase_token"
    for spelling in (name, name.upper()):
        value = getattr(config, spelling, None)
        if value is not None:
            return int(value)
    return NO_TOKEN


def expect_thinking_tokens(begin: int, end: int) -> None:
    """Check the ids by which acceptance is relaxed.

    Raises:
        ConfigError: one of them is missing, or both are the same.
    """
    missing = [
        f"{edge}_thinking_phase_token"
        for edge, token in (("begin", begin), ("end", end))
        if token < 0
    ]
    if missing:
        raise ConfigError(
            f"use_relaxed_acceptance_for_thinking: there is no "
            f"{' and no '.join(missing)}, so nothing would be relaxed; expected the ids of the "
            f"model's thinking tokens (DeepSeek-R1: 128798 and 128799)"
        )
    _expect_two(begin, end)


def resolve_thinking_tokens(
    config: Any, encode: Callable[[str], list[int]] | None
) -> tuple[int, int]:
    """(begin, end) ids: from the config, else from its strings, else ``<think>`` and ``</think>``.

    Args:
        config: an ``MTPDecodingConfig`` or a host's object with such fields.
        encode: text -> token ids without special additions; None where no tokenizer is loaded.

    Raises:
        ConfigError: a tag of several tokens, no tokenizer to resolve it, or begin equal to end.
    """
    options = getattr(config, "mtp", None)
    resolved = []
    for edge, default in (("begin", DEFAULT_BEGIN), ("end", DEFAULT_END)):
        token = read_thinking_token(config, edge)
        if token == NO_TOKEN:
            tag = getattr(options, f"{edge}_thinking_phase", None) or default
            token = _single_token(edge, tag, encode)
        resolved.append(token)
    begin, end = resolved
    _expect_two(begin, end)
    return begin, end


def _expect_two(begin: int, end: int) -> None:
    expect(
        begin != end,
        ConfigError,
        f"thinking tokens: begin and end must differ, both are {begin}",
    )


def _single_token(edge: str, tag: str, encode: Callable[[str], list[int]] | None) -> int:
    if encode is None:
        raise ConfigError(
            f"{edge}_thinking_phase_token: no id is set and no tokenizer is loaded to look "
            f"{tag!r} up"
        )
    ids = encode(tag)
    if len(ids) != 1:
        raise ConfigError(
            f"{edge}_thinking_phase: {tag!r} must be one token of the tokenizer, it is "
            f"{len(ids)}: {ids}"
        )
    return ids[0]


def thinking_after(tokens: Sequence[int], begin: int, end: int) -> bool:
    """Whether a request thinks after ``tokens``: the last of the two thinking tokens counts."""
    for token in reversed(tokens):
        if token == begin:
            return True
        if token == end:
            return False
    return False

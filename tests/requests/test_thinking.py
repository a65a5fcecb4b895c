"""The thinking tokens of a config, and the phase after a run of tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.thinking import (
    ThinkingEnd,
    names_thinking_tokens,
    read_thinking_token,
    resolve_thinking_end,
    resolve_thinking_tokens,
    thinking_after,
)

WORDS = {"<think>": [7], "</think>": [8], "<reason>": [9], "<two>": [1, 2], "<none>": []}


def config(**options: object) -> MTPDecodingConfig:
    return MTPDecodingConfig(max_draft_len=1, use_relaxed_acceptance_for_thinking=True, **options)


@pytest.mark.parametrize(
    ("host", "tokens"),
    [
        (SimpleNamespace(begin_thinking_phase_token=3, end_thinking_phase_token=4), (3, 4)),
        (SimpleNamespace(BEGIN_THINKING_PHASE_TOKEN=3, END_THINKING_PHASE_TOKEN=4), (3, 4)),
        (
            SimpleNamespace(
                begin_thinking_phase_token=None,
                BEGIN_THINKING_PHASE_TOKEN=0,
                END_THINKING_PHASE_TOKEN=4,
            ),
            (0, 4),
        ),
        (SimpleNamespace(), (-1, -1)),
    ],
    ids=["lower", "upper", "token_zero", "unset"],
)
def test_tokens_are_read_under_either_spelling(
    host: SimpleNamespace, tokens: tuple[int, int]
) -> None:
    assert (read_thinking_token(host, "begin"), read_thinking_token(host, "end")) == tokens


def test_ids_of_the_config_need_no_tokenizer() -> None:
    given = config(begin_thinking_phase_token=0, end_thinking_phase_token=5)
    assert resolve_thinking_tokens(given, None) == (0, 5)


def test_tags_are_looked_up() -> None:
    assert resolve_thinking_tokens(config(), WORDS.__getitem__) == (7, 8)
    named = config(mtp={"begin_thinking_phase": "<reason>"})
    assert resolve_thinking_tokens(named, WORDS.__getitem__) == (9, 8)
    mixed = config(begin_thinking_phase_token=3)
    assert resolve_thinking_tokens(mixed, WORDS.__getitem__) == (3, 8)
    assert resolve_thinking_tokens(SimpleNamespace(), WORDS.__getitem__) == (7, 8)


@pytest.mark.parametrize(
    ("tokens", "thinks"),
    [
        ([], False),
        ([1], False),
        ([7, 1], True),
        ([7, 8, 1], False),
        ([8, 7], True),
        ([7, 7, 8], False),
    ],
)
def test_the_last_of_the_two_counts(tokens: list[int], thinks: bool) -> None:
    assert thinking_after(tokens, 7, 8) is thinks


def test_unset_tokens_never_begin_a_phase() -> None:
    assert not thinking_after([0, 1, 2], -1, -1)


# --- budgets ---


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (config(), ThinkingEnd(7, (8,), 8)),
        (config(begin_thinking_phase_token=3), ThinkingEnd(3, (8,), 8)),
        (config(mtp={"end_thinking_phase": "<two>"}), ThinkingEnd(7, (1, 2))),
        (config(mtp={"thinking_end": [5, 8]}), ThinkingEnd(7, (5, 8), 8)),
        (config(mtp={"begin_thinking_phase": "<two>"}), None),
        (config(mtp={"end_thinking_phase": "<none>"}), None),
        (None, ThinkingEnd(7, (8,), 8)),
    ],
    ids=["tags", "id", "end-of-two", "own-end", "begin-of-two", "no-end", "no-config"],
)
def test_what_budgets_go_by(given: object, end: ThinkingEnd | None) -> None:
    assert resolve_thinking_end(given, WORDS.__getitem__) == end


def test_budgets_without_a_tokenizer() -> None:
    assert resolve_thinking_end(config(), None) is None
    ids = config(begin_thinking_phase_token=3, end_thinking_phase_token=4)
    assert resolve_thinking_end(ids, None) == ThinkingEnd(3, (4,), 4)
    own = config(begin_thinking_phase_token=3, mtp={"thinking_end": [9, 9]})
    assert resolve_thinking_end(own, None) == ThinkingEnd(3, (9, 9))
    with pytest.raises(ConfigError, match=r"thinking_end: \(9,\) is forced after the token that"):
        resolve_thinking_end(config(mtp={"thinking_end": [9]}), None)


def test_whether_a_config_says_anything_of_tags() -> None:
    assert not names_thinking_tokens(None)
    assert not names_thinking_tokens(config())
    assert names_thinking_tokens(config(end_thinking_phase_token=4))
    assert names_thinking_tokens(config(mtp={"thinking_end": [4]}))


@pytest.mark.parametrize(
    ("tokens", "prompt_len", "state"),
    [
        ([1, 2], 1, (-1, 0)),
        ([7, 1, 2], 3, (0, 0)),
        ([7, 1, 2], 1, (2, 0)),
        ([7, 1, 5], 1, (2, 1)),
        ([7, 5, 5, 6], 1, (3, 2)),
        ([7, 5, 6, 8], 1, (-1, 0)),
        ([7, 8, 1], 1, (-1, 0)),
        ([7, 1, 2, 3, 8], 1, (4, 0)),
        ([7, 7], 1, (1, 0)),
    ],
    ids=["out", "prompt", "two", "began", "twice", "ended", "by-token", "forced", "again"],
)
def test_where_a_text_is(tokens: list[int], prompt_len: int, state: tuple[int, int]) -> None:
    """The end is 5 6 8, of which 8 ends by itself until it is forced, after three tokens."""
    assert ThinkingEnd(7, (5, 6, 8), 8).progress_after(tokens, prompt_len, 3) == state

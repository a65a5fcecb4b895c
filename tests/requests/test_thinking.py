"""The thinking tokens of a config, and the phase after a run of tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.thinking import (
    read_thinking_token,
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
    ("given", "message"),
    [
        ({"mtp": {"begin_thinking_phase": "<two>"}}, r"'<two>' must be one token .* it is 2"),
        ({"mtp": {"end_thinking_phase": "<none>"}}, r"'<none>' must be one token .* it is 0"),
        ({"begin_thinking_phase_token": 8}, "begin and end must differ, both are 8"),
    ],
    ids=["two_tokens", "no_token", "equal"],
)
def test_tags_that_cannot_serve(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_thinking_tokens(config(**given), WORDS.__getitem__)


def test_tags_without_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="begin_thinking_phase_token: no id is set"):
        resolve_thinking_tokens(config(), None)


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

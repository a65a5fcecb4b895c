"""How messages spell values."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from mtp_plugin.errors import LONGEST_LINE, format_value, one_line, shell_quote
from tests.hostile import HOSTILE, HOSTILE_TEXT, Evil


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ((5, -1), "(5, -1)"),
        ({2: "a", 1: None}, "{1: None, 2: 'a'}"),
        ("x" * 200, repr("x" * 200)),
        ("x" * 201, repr("x" * 200) + "..."),
        (10**60, str(10**60)),
        (-(10**5000), "an integer of 16610 bits"),
        ([10**5000], "[an integer of 16610 bits]"),
        ([1] * 30, f"[{'1, ' * 20}...]"),
        ([[[[[1]]]]], "[[[[[...]]]]]"),
    ],
    ids=range(9),
)
def test_values_are_spelled_as_python_does_and_cut(value: Any, shown: str) -> None:
    assert format_value(value) == shown


def test_what_cannot_be_spelled_is_named() -> None:
    assert format_value(Evil()).startswith("<Evil instance at 0x")


@pytest.mark.parametrize("name", ["list", "dict", "deque", "array", "str", "int", "set"])
def test_classes_that_are_called_as_pythons_own(name: str) -> None:
    assert format_value(type(name, (), {})()) == f"<{name}>"


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_is_too_much(value: Any) -> None:
    assert 0 < len(format_value(value)) <= 410


@pytest.mark.parametrize("text", HOSTILE_TEXT.values(), ids=HOSTILE_TEXT)
def test_text_of_others_is_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()
    assert len(one_line(text)) <= LONGEST_LINE + 3
    assert one_line("größe 語") == "größe 語"


@pytest.mark.parametrize("text", ["a b", "größe", *HOSTILE_TEXT.values(), "\udcff\t'"])
def test_quoted_words_are_read_back_by_a_shell(text: str) -> None:
    if len(text) > 10**5 or text == "\ud800":  # no argument of a command
        return
    command = f"printf %s {shell_quote(text)}"
    assert command.isprintable()
    assert subprocess.check_output(["bash", "-c", command]) == os.fsencode(text)

"""How an answer of a user's own rule of stopping is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtp_plugin.requests.stop_callback import StopWishes, ask

OUTPUTS = {7: (4, 7), 3: (0, 1), 9: (2, 4)}


def answered(answer: Any) -> StopWishes:
    asked: list[Sequence[int]] = []

    def callback(ids: Sequence[int]) -> Any:
        asked.append(ids)
        return answer

    wishes = ask(callback, OUTPUTS)
    assert asked == [[7, 3, 9]]
    return wishes


@pytest.mark.parametrize("answer", [None, [], (), set(), {}, frozenset()])
def test_nothing_ends(answer: Any) -> None:
    assert answered(answer) == StopWishes()


@pytest.mark.parametrize("answer", [[9, 7], (7, 9), {7, 9}, [7, 7, 9], {7: 7, 9: 4}.keys()])
def test_ids_end_behind_their_last_token(answer: Any) -> None:
    assert answered(answer) == StopWishes({7: 7, 9: 4})


@pytest.mark.parametrize("kept", [4, 5, 6, 7])
def test_counts_are_those_of_the_output(kept: int) -> None:
    assert answered({7: kept, 3: 0}) == StopWishes({7: kept, 3: 0})


def test_integers_of_other_kinds() -> None:
    wishes = answered({np.int64(7): np.int32(5)})
    assert wishes == StopWishes({7: 5})
    assert {type(n) for pair in wishes.keep.items() for n in pair} == {int}
    assert answered(np.array([9])) == StopWishes({9: 4})


@pytest.mark.parametrize("kept", [3, -1, 8, 5.0, "5", None, True])
def test_counts_that_cannot_be(kept: Any) -> None:
    """They concern their own request."""
    why = f"stop_callback: expected 4 to 7 tokens of the output to keep, got {kept!r}"
    assert answered({7: kept, 9: 3}) == StopWishes({9: 3}, {7: why})


@pytest.mark.parametrize("stranger", [8, -1, "7", 7.0, True, None, (7,)])
@pytest.mark.parametrize("kind", [list, dict])
def test_ids_that_were_not_asked_about(stranger: Any, kind: type) -> None:
    answer = [stranger, 9] if kind is list else {stranger: 1, 9: 4}
    why = f"stop_callback: expected ids among 7, 3, 9, got {stranger!r}"
    assert answered(answer) == StopWishes({9: 4}, {}, (why,))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(7, "int"), ("7", "str"), (b"7", "bytes"), (True, "bool"), (iter([7]), "list_iterator")],
)
def test_answers_that_are_none(answer: Any, kind: str) -> None:
    why = f"stop_callback: expected ids, or a mapping of ids to counts, got {kind}"
    assert answered(answer) == StopWishes(wrong=dict.fromkeys(OUTPUTS, why))


def test_a_callback_that_raises() -> None:
    def callback(ids: Sequence[int]) -> list[int]:
        raise KeyError(ids[1])

    assert ask(callback, OUTPUTS).wrong == dict.fromkeys(OUTPUTS, "stop_callback: KeyError: 3")


def test_an_interrupt_is_none_of_its_answers() -> None:
    def callback(_: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(callback, OUTPUTS)

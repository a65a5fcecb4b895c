"""How an answer of a user's own rule of stopping is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin.requests.stop_callback import StopDecisions, call_stop_callback
from tests.hostile import HOSTILE, LONGEST_LINE

OUTPUTS = {7: (4, 7), 3: (0, 1), 9: (2, 4)}


def answered(answer: Any) -> StopDecisions:
    requested: list[Sequence[int]] = []

    def callback(ids: Sequence[int]) -> Any:
        requested.append(ids)
        return answer

    decisions = call_stop_callback(callback, OUTPUTS)
    assert requested == [[7, 3, 9]]
    return decisions


@pytest.mark.parametrize("answer", [None, [], (), set(), {}, frozenset()])
def test_nothing_ends(answer: Any) -> None:
    assert answered(answer) == StopDecisions()


@pytest.mark.parametrize("answer", [[9, 7], (7, 9), {7, 9}, [7, 7, 9], {7: 7, 9: 4}.keys()])
def test_ids_end_after_their_last_token(answer: Any) -> None:
    assert answered(answer) == StopDecisions({7: 7, 9: 4})


@pytest.mark.parametrize("kept", [4, 5, 6, 7])
def test_counts_are_those_of_the_output(kept: int) -> None:
    assert answered({7: kept, 3: 0}) == StopDecisions({7: kept, 3: 0})


def test_integers_of_other_kinds() -> None:
    decisions = answered({np.int64(7): np.int32(5)})
    assert decisions == StopDecisions({7: 5})
    assert {type(n) for pair in decisions.keep.items() for n in pair} == {int}
    assert answered(np.array([9])) == StopDecisions({9: 4})


@pytest.mark.parametrize("kept", [3, -1, 8, 5.0, "5", None, True])
def test_counts_that_cannot_be(kept: Any) -> None:
    """They concern their own request."""
    why = f"stop_callback: expected 4 to 7 tokens of the output to keep, got {kept!r}"
    assert answered({7: kept, 9: 3}) == StopDecisions({9: 3}, {7: why})


@pytest.mark.parametrize("stranger", [8, -1, "7", 7.0, True, None, (7,)])
@pytest.mark.parametrize("kind", [list, dict])
def test_ids_that_were_not_expected(stranger: Any, kind: type) -> None:
    answer = [stranger, 9] if kind is list else {stranger: 1, 9: 4}
    why = f"stop_callback: expected ids among 7, 3, 9, got {stranger!r}"
    assert answered(answer) == StopDecisions({9: 4}, {}, (why,))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(7, "int"), ("7", "str"), (b"7", "bytes"), (True, "bool"), (iter([7]), "list_iterator")],
)
def test_answers_that_are_none(answer: Any, kind: str) -> None:
    why = f"stop_callback: expected ids, or a mapping of ids to counts, got {kind}"
    assert answered(answer) == StopDecisions(wrong=dict.fromkeys(OUTPUTS, why))


def test_a_callback_that_raises() -> None:
    def callback(ids: Sequence[int]) -> list[int]:
        raise KeyError(ids[1])

    assert call_stop_callback(callback, OUTPUTS).wrong == dict.fromkeys(
        OUTPUTS, "stop_callback: KeyError: 3"
    )


def test_an_interrupt_is_none_of_its_answers() -> None:
    def callback(_: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_stop_callback(callback, OUTPUTS)


def test_more_ids_than_anybody_expected() -> None:
    why = "stop_callback: expected at most 10000 ids, got 10001"
    assert answered([1] * 10_001) == StopDecisions(wrong=dict.fromkeys(OUTPUTS, why))


def test_many_strangers_are_cut() -> None:
    decisions = answered([9, *range(100, 130)])
    assert decisions.keep == {9: 4}
    assert len(decisions.unknown) == 11
    assert decisions.unknown[-1] == "stop_callback: and 20 more unexpected ids"


def test_an_answer_without_items() -> None:
    why = "stop_callback: TypeError: "
    decisions = answered(torch.tensor(7))
    assert [reason.startswith(why) for reason in decisions.wrong.values()] == [True] * len(OUTPUTS)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_answer_ends_in_another_error(value: Any) -> None:
    """Whatever an answer is or holds, each request ends by a decision or goes on."""
    for answer in (value, [value], dict.fromkeys(OUTPUTS, value)):
        decisions = answered(answer)
        expected = (*decisions.wrong.values(), *decisions.unknown)
        assert all(len(why) < LONGEST_LINE for why in expected)
        assert len(expected) <= 20

"""Alarms: once per condition, with hysteresis, on figures that are worked out by hand."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.speculative.metrics.alarms import (
    COLLAPSE_STEPS,
    LOOP_NGRAM,
    LOOP_SPAN,
    QUIET_SPANS,
    AcceptanceAlarms,
    repeated_share,
)

K = 3


class Text:
    """A request that emits a given text."""

    is_finished = False

    def __init__(self, request_id: int = 0) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="mtp_plugin")
    return caplog


def messages(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()[:20]) for record in log.records]


def steps(alarms: AcceptanceAlarms, count: int, emitted: int, drafted: int = K) -> None:
    """Steps of fresh requests, so that no text ever fills a span."""
    for _ in range(count):
        alarms.record(Text(), emitted, drafted)


def emit(alarms: AcceptanceAlarms, request: Text, tokens: Sequence[int], run: int = K + 1) -> None:
    """The request emits ``tokens``, ``run`` at a time."""
    for start in range(0, len(tokens), run):
        request.tokens += tokens[start : start + run]
        alarms.record(request, len(tokens[start : start + run]), K)


# --- collapse ---


def test_a_collapse_is_logged_once_the_window_is_full(log: pytest.LogCaptureFixture) -> None:
    alarms = AcceptanceAlarms()
    steps(alarms, COLLAPSE_STEPS - 1, 1)
    assert not alarms.collapsed
    steps(alarms, 3 * COLLAPSE_STEPS, 1)
    assert alarms.collapsed
    assert alarms.num_collapses == 1
    assert alarms.acceptance_length == 1.0
    assert messages(log) == [("WARNING", "acceptance collapsed")]
    assert "1.000 tokens per step over the last 512 steps" in log.text


def test_it_ends_well_above_where_it_began(log: pytest.LogCaptureFixture) -> None:
    """26 accepted drafts in 512 steps keep it silent, 25 raise it, 77 end it."""
    alarms = AcceptanceAlarms()
    steps(alarms, 26, 2)
    steps(alarms, COLLAPSE_STEPS - 26, 1)
    assert not alarms.collapsed  # 1.0508
    steps(alarms, 1, 1)
    assert alarms.collapsed  # 1.0488
    steps(alarms, COLLAPSE_STEPS, 1)
    steps(alarms, 76, 2)
    assert alarms.collapsed  # 1.1484
    steps(alarms, 1, 2)
    assert not alarms.collapsed
    assert messages(log) == [
        ("WARNING", "acceptance collapsed"),
        ("INFO", "acceptance recovered"),
    ]
    steps(alarms, COLLAPSE_STEPS, 1)
    assert alarms.num_collapses == 2


def test_steps_without_drafts_are_no_collapse() -> None:
    alarms = AcceptanceAlarms()
    steps(alarms, 5 * COLLAPSE_STEPS, 1, drafted=0)
    assert not alarms.collapsed
    assert alarms.acceptance_length == 0.0


def test_ordinary_acceptance_says_nothing(log: pytest.LogCaptureFixture) -> None:
    alarms = AcceptanceAlarms()
    for request_id in range(8):
        request = Text(request_id)
        for i in range(600):
            emit(alarms, request, list(range(1000 + 10 * i, 1000 + 10 * i + 1 + i % 4)))
    assert not log.records
    assert not alarms.looping


# --- looping ---


def loop(period: int, count: int = LOOP_SPAN) -> list[int]:
    return [i % period for i in range(count)]


def test_a_loop_at_the_ceiling_is_logged_with_its_request(log: pytest.LogCaptureFixture) -> None:
    alarms = AcceptanceAlarms()
    request = Text(17)
    emit(alarms, request, loop(5, LOOP_SPAN - 4))
    assert not alarms.looping
    emit(alarms, request, loop(5, 4))
    assert alarms.looping
    assert "?" not in log.text
    assert "a run without speculative_config shows" in log.text
    assert "temperature 0.8, top_p 0.95 and a seed" in log.text
    emit(alarms, request, loop(5, 5 * LOOP_SPAN))
    emit(alarms, Text(18), loop(7))
    assert alarms.num_looping_requests == 2
    assert messages(log) == [("WARNING", "request 17 loops: ev")]


@pytest.mark.parametrize(
    ("tokens", "run", "loops"),
    [
        pytest.param(loop(60), 4, True, id="period-60"),
        pytest.param(loop(61), 4, False, id="period-61"),  # 61 of 121 8-grams are new
        pytest.param(list(range(LOOP_SPAN)), 4, False, id="fluent"),
        pytest.param(loop(5), 3, False, id="under-the-ceiling"),
    ],
)
def test_it_takes_both_a_ceiling_and_a_loop(tokens: list[int], run: int, loops: bool) -> None:
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), tokens + tokens[:2], run)
    assert alarms.looping is loops


def test_a_few_rejections_do_not_hide_a_loop() -> None:
    """Two steps of 33 emit two tokens instead of four: 97 % of what was possible."""
    alarms = AcceptanceAlarms()
    request = Text()
    for run in (2, 2, *[4] * 31):
        emit(alarms, request, loop(4, run))
    assert alarms.looping


def test_the_alarm_comes_again_after_quiet_spans(log: pytest.LogCaptureFixture) -> None:
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), loop(3))
    for _ in range(QUIET_SPANS - 1):
        emit(alarms, Text(), list(range(LOOP_SPAN)))
    emit(alarms, Text(), loop(3))  # not quiet yet
    request = Text()
    for _ in range(QUIET_SPANS):
        assert alarms.looping
        emit(alarms, request, list(range(LOOP_SPAN)))
    assert not alarms.looping
    emit(alarms, Text(), loop(3))
    assert [level for level, _ in messages(log)] == ["WARNING", "INFO", "WARNING"]
    assert alarms.num_looping_requests == 3


@pytest.mark.parametrize(
    ("run", "late"),
    [
        pytest.param(2, 0, id="under-the-ceiling"),
        # the text that is being emitted is undecided, and looked at every span's tokens
        pytest.param(K + 1, 2, id="at-the-ceiling"),
    ],
)
def test_texts_shorter_than_a_span_end_it(run: int, late: int) -> None:
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), loop(3))
    for _ in range(2 * QUIET_SPANS + late):
        assert alarms.looping
        emit(alarms, Text(), list(range(LOOP_SPAN // 2)), run)
    assert not alarms.looping


def test_texts_that_ended_are_not_undecided_though_somebody_holds_them() -> None:
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), loop(3))
    held = []
    for _ in range(2 * QUIET_SPANS + 2):
        assert alarms.looping
        held.append(Text())
        emit(alarms, held[-1], list(range(LOOP_SPAN // 2)))
        held[-1].is_finished = True
    assert not alarms.looping


def test_a_looping_request_keeps_the_alarm_among_many_others(log: pytest.LogCaptureFixture) -> None:
    """Between two spans of it the others emit far more than what is quiet otherwise."""
    alarms = AcceptanceAlarms()
    request, others = Text(), [Text(i) for i in range(1, 301)]
    emit(alarms, request, loop(3))
    for _ in range(3 * LOOP_SPAN // (K + 1)):
        emit(alarms, request, loop(3, K + 1))
        for other in others:
            emit(alarms, other, [len(other.tokens)] * 3)
    assert alarms.looping
    assert alarms.num_looping_requests == 1
    for _ in range(QUIET_SPANS * LOOP_SPAN // 900 + 1):  # it ended, though somebody still holds it
        for other in others:
            emit(alarms, other, [len(other.tokens)] * 3)
    assert not alarms.looping
    assert [level for level, _ in messages(log)] == ["WARNING", "INFO"]


def test_what_may_still_be_a_loop_is_not_quiet(log: pytest.LogCaptureFixture) -> None:
    """A batch that loops as one: its spans are undecided until each was emitted."""
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), loop(3))
    batch = [Text(i) for i in range(1, 101)]
    for _ in range(LOOP_SPAN // (K + 1) - 1):
        for request in batch:
            emit(alarms, request, loop(4, K + 1))
    assert sum(len(request.tokens) for request in batch) > QUIET_SPANS * LOOP_SPAN
    assert alarms.looping
    for request in batch:
        emit(alarms, request, loop(4, K + 1))
    assert alarms.looping
    assert alarms.num_looping_requests == 101
    assert [level for level, _ in messages(log)] == ["WARNING"]


@pytest.mark.parametrize("run", [pytest.param(3, id="with-rejections"), K + 1])
def test_a_request_that_leaves_its_loop_counts_as_quiet(run: int) -> None:
    alarms = AcceptanceAlarms()
    request = Text()
    emit(alarms, request, loop(3))
    for _ in range(QUIET_SPANS - 1):
        emit(alarms, request, list(range(LOOP_SPAN)), run)
    assert alarms.looping
    for _ in range(3):  # what it began while it may have looped on came on top
        emit(alarms, request, list(range(LOOP_SPAN)), run)
    assert not alarms.looping
    assert alarms.num_looping_requests == 1
    emit(alarms, request, loop(3, 2 * LOOP_SPAN))
    assert alarms.looping
    assert alarms.num_looping_requests == 1  # it has been counted


def test_requests_are_not_kept_alive() -> None:
    alarms = AcceptanceAlarms()
    emit(alarms, Text(), loop(3, 12))
    gc.collect()
    assert len(alarms._spans) == 0


def test_repeated_share_of_a_small_text() -> None:
    assert repeated_share("abcabcabc", 3) == pytest.approx(4 / 7)
    assert repeated_share("abcd", 2) == 0.0
    assert repeated_share("ab", 3) == repeated_share("", 1) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, LOOP_NGRAM))
def test_repeated_share_counts_earlier_ngrams(tokens: list[int], n: int) -> None:
    grams = [tokens[i : i + n] for i in range(max(0, len(tokens) - n + 1))]
    repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repeated_share(tokens, n) == pytest.approx(repeated / len(grams) if grams else 0.0)

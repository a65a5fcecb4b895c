"""How many drafts a step makes: schedule, gate, and what each request may still draft."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.speculative.draft_length.controller import (
    DraftLengthController,
    DraftState,
    LengthGate,
)

calm = settings(max_examples=150, deadline=None)


def controller(
    *, max_batch_size: int = 16, mtp: dict[str, Any] | None = None, **config: Any
) -> DraftLengthController:
    options = {"max_draft_len": 3, "mtp": mtp or {}, **config}
    return DraftLengthController(MTPDecodingConfig(**options), max_batch_size=max_batch_size)


def gated(*, window: int = 4, threshold: float = 2.0, **options: Any) -> DraftLengthController:
    mtp = {"gate_margin": 0.5, "gate_probe_interval": 8, "gate_max_probe_interval": 20}
    mtp.update(options.pop("mtp", {}))
    return controller(
        acceptance_window=window, acceptance_length_threshold=threshold, mtp=mtp, **options
    )


def run(of: DraftLengthController, num_steps: int, emitted: dict[int, int]) -> list[int]:
    """Steps of one request: ``emitted`` tokens by drafts verified; the lengths that were chosen."""
    chosen = []
    for _ in range(num_steps):
        length = of.choose(1)
        chosen.append(length)
        of.record(emitted.get(length, 1), length)
    return chosen


# --- the schedule ---


@pytest.mark.parametrize(
    ("config", "lengths", "by_size"),
    [
        ({}, (3,), {1: 3, 16: 3}),
        ({"max_concurrency": 4}, (0, 3), {4: 3, 5: 0}),
        ({"max_concurrency": 16}, (3,), {16: 3}),
        ({"draft_len_schedule": {2: 3, 8: 1}}, (0, 1, 3), {2: 3, 3: 1, 8: 1, 9: 0}),
        ({"draft_len_schedule": {2: 3, 16: 2, 32: 1}}, (2, 3), {2: 3, 16: 2}),
    ],
)
def test_lengths_of_a_schedule(
    config: dict[str, Any], lengths: tuple[int, ...], by_size: dict[int, int]
) -> None:
    of = controller(**config)
    assert of.draft_lens() == lengths
    assert {size: of.choose(size) for size in by_size} == by_size
    assert all(of.draft_lens([size]) == (k,) for size, k in by_size.items())


def test_lengths_of_a_gate_are_those_that_the_schedule_names_and_none() -> None:
    """Also those of batches that never come: so a gate gets its steps."""
    assert gated().draft_lens() == (0, 3)
    of = gated(draft_len_schedule={2: 3, 16: 2, 99: 1})
    assert of.draft_lens() == (0, 1, 2, 3)
    assert of.draft_lens([1, 2]) == (0, 1, 2, 3)
    assert of.draft_lens(range(3, 17)) == (0, 1, 2)
    assert of.draft_lens([]) == ()


def test_cold_batches_need_the_shorter_lengths_too() -> None:
    of = controller(draft_len_schedule={2: 3, 4: 1}, mtp={"keep_warm": False})
    assert of.draft_lens([1]) == (0, 1, 3)
    assert of.draft_lens([3]) == (0, 1)
    assert controller(mtp={"keep_warm": False}).draft_lens() == (3,)


# --- the gate ---


def test_steps_without_drafts_or_with_another_length_do_not_count() -> None:
    of = gated()
    for num_drafted in (0, 1, 2) * 10:
        of.record(1, num_drafted)
    assert of.choose(1) == 3


def test_falls_through_the_lengths_of_the_schedule() -> None:
    """K = 3 at threshold 2.5: three drafts owe 1.5 tokens, one owes 0.5."""
    of = gated(threshold=2.5, draft_len_schedule={8: 3, 16: 1})
    assert (of.gates[3].close_below, of.gates[1].close_below) == (2.5, 1.5)
    assert of.gates[1].open_at == pytest.approx(1.5 + 0.5 / 3)
    pays = run(of, 40, {3: 2, 1: 2})
    assert set(pays) == {1, 3}
    assert pays[4] == 1
    assert run(gated(threshold=2.5, draft_len_schedule={8: 3, 16: 1}), 9, {3: 1})[8] == 0


def test_the_schedule_stays_the_most() -> None:
    of = gated(draft_len_schedule={2: 3, 8: 1})
    assert [of.choose(size) for size in (1, 3, 9)] == [3, 1, 0]
    run(of, 4, {3: 1})
    assert [of.choose(size) for size in (1, 3, 9)] == [1, 1, 0]


def test_the_gate_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mtp_plugin")
    of = gated()
    run(of, 4 + 7, {3: 1})
    run(of, 4, {3: 4})
    assert [record.getMessage() for record in caplog.records] == [
        "acceptance gate: draft length 3 is off, 1.000 tokens per step over 4 request-steps "
        "(threshold 2.000)",
        "acceptance gate: draft length 3 is on again, 4.000 tokens per step over 4 request-steps",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize("rate", [0.47, 0.5, 0.53])
def test_a_noisy_signal_at_the_threshold_hardly_flaps(rate: float) -> None:
    rng = random.Random(0)
    of = controller(
        max_draft_len=1, acceptance_window=200, acceptance_length_threshold=1.5, max_batch_size=8
    )
    states = []
    for _ in range(8000):
        length = of.choose(8)
        for _ in range(8 * length):
            of.record(1 + (rng.random() < rate), 1)
        states.append(of.gates[1].state)
    assert list(pairwise(states)).count(("probing", "open")) <= 1


step = st.tuples(
    st.integers(1, 16), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=4)
)


@calm
@given(
    steps=st.lists(step, max_size=120),
    window=st.integers(1, 4),
    schedule=st.sampled_from([None, {2: 3, 8: 1}, {4: 3, 8: 2, 99: 1}]),
    vanilla=st.booleans(),
    keep_warm=st.booleans(),
    has_gate=st.booleans(),
)
def test_choices_are_among_the_lengths_and_alike_on_every_rank(
    steps: list[Any],
    window: int,
    schedule: dict[int, int] | None,
    vanilla: bool,
    keep_warm: bool,
    has_gate: bool,
) -> None:
    options = {"draft_len_schedule": schedule, "use_mtp_vanilla": vanilla}
    make = gated if has_gate else controller
    if has_gate:
        options["window"] = window
    ranks = [make(mtp={"keep_warm": keep_warm}, **options) for _ in range(2)]
    for size, results in steps:
        chosen = {of.choose(size) for of in ranks}
        assert len(chosen) == 1
        assert chosen <= set(ranks[0].draft_lens([size]))
        assert chosen <= set(ranks[0].draft_lens())
        for of in ranks:
            for num_emitted, num_drafted in results:
                of.record(num_emitted, num_drafted)


class MeanOfTheLast:
    """The gate in plain lists: every request-step ever, the verdict read off the newest."""

    def __init__(self, window: int, close_below: float, open_at: float, pause: int, most: int):
        self.window, self.close_below, self.open_at = window, close_below, open_at
        self.first_pause = self.pause = pause
        self.most = most
        self.seen: list[int] = []
        self.state = "open"
        self.closed_at = 0

    def admits(self, step: int) -> bool:
        if self.state == "closed" and step - self.closed_at >= self.pause:
            self.state, self.seen = "probing", []
        return self.state != "closed"

    def record(self, emitted: int, step: int) -> None:
        if self.state == "closed":
            return
        self.seen.append(emitted)
        if len(self.seen) < self.window:
            return
        bar = self.open_at if self.state == "probing" else self.close_below
        if sum(self.seen[-self.window :]) / self.window >= bar:
            self.state = "open"
        else:
            self.pause = (
                min(2 * self.pause, self.most) if self.state == "probing" else self.first_pause
            )
            self.state, self.closed_at = "closed", step


@calm
@given(
    results=st.lists(st.lists(st.integers(1, 4), max_size=3), max_size=150),
    window=st.sampled_from([1, 2, 4, 8]),  # powers of two: means without rounding
    pause=st.integers(1, 6),
)
def test_a_gate_decides_as_its_reference(results: list[list[int]], window: int, pause: int) -> None:
    gate = LengthGate(
        3,
        MTPDecodingConfig(
            max_draft_len=3,
            acceptance_window=window,
            acceptance_length_threshold=2.0,
            mtp={
                "gate_margin": 0.5,
                "gate_probe_interval": pause,
                "gate_max_probe_interval": 20,
            },
        ),
    )
    reference = MeanOfTheLast(window, 2.0, 2.5, pause, 20)
    for now, emitted in enumerate(results, 1):
        assert gate.admits(now) == reference.admits(now)
        for tokens in emitted:
            gate.record(tokens, now)
            reference.record(tokens, now)
        assert gate.state == reference.state


# --- what each request may draft ---


def new_request(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        py_draft_state=DraftState.fresh(3), is_first_context_chunk=True, **attributes
    )


def batch_of(
    contexts: Iterable[SimpleNamespace] = (), generations: Iterable[SimpleNamespace] = ()
) -> SimpleNamespace:
    contexts, generations = list(contexts), list(generations)
    return SimpleNamespace(
        context_requests=contexts,
        generation_requests=generations,
        all_requests=lambda: contexts + generations,
    )


@pytest.mark.parametrize("vanilla", [False, True])
def test_cold_requests_never_draft_again_and_new_ones_do(vanilla: bool) -> None:
    of = controller(max_concurrency=2, use_mtp_vanilla=vanilla, mtp={"keep_warm": False})
    old = [new_request() for _ in range(3)]
    assert of.plan(batch_of(old)) == 0
    del old[1:]
    # a batch without a warm request runs without drafts
    assert of.plan(batch_of([], old)) == 0
    young = new_request()
    assert of.plan(batch_of([young], old)) == 3
    assert of.plan(batch_of([], [*old, young])) == 3
    assert [r.py_draft_state.limit for r in (*old, young)] == [0, 3]
    # preempted, read again: warm
    assert of.plan(batch_of(old, [young])) == 3
    assert of.plan(batch_of([], [*old, young])) == 3
    assert [r.py_draft_state.limit for r in (*old, young)] == [3, 3]


def test_further_chunks_do_not_warm_a_cold_prompt() -> None:
    of = controller(max_concurrency=2, mtp={"keep_warm": False})
    request, crowd = new_request(), [new_request() for _ in range(2)]
    assert of.plan(batch_of([request, *crowd])) == 0
    request.is_first_context_chunk = False
    assert of.plan(batch_of([request])) == 0
    assert request.py_draft_state.warm == 0


@pytest.mark.parametrize(("vanilla", "limits"), [(False, [1, 1, 3]), (True, [1, 1, 1])])
def test_shorter_steps_cool_the_deeper_layers_only(vanilla: bool, limits: list[int]) -> None:
    of = controller(
        draft_len_schedule={1: 3, 2: 1}, use_mtp_vanilla=vanilla, mtp={"keep_warm": False}
    )
    request, other = new_request(), new_request()
    of.plan(batch_of([request]))
    seen = []
    for others in ([other], [], []):
        of.plan(batch_of([], [request, *others]))
        seen.append(request.py_draft_state.limit)
    assert seen == limits


def test_requests_that_do_not_speculate_need_no_drafts() -> None:
    """Prompts keep the length of the schedule unless a shorter one was captured anyway."""
    silent = new_request(py_disable_speculative_decoding=True)
    assert gated().plan(batch_of([silent])) == 0
    assert gated().plan(batch_of([silent, new_request()])) == 3
    assert controller().plan(batch_of([silent])) == 3
    assert controller().plan(batch_of([], [silent, silent])) == 0
    assert controller().plan(batch_of([], [silent, new_request()])) == 3
    assert controller().plan(batch_of([new_request()], [silent])) == 3


class LaunchedLengths:
    """A request by the lengths of all its steps since it began to read its prompt."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def ready(self, vanilla: bool, keep_warm: bool) -> int:
        """Drafts whose layers ran in every one of those steps."""
        for k in (3, 2, 1):
            runs_in = [
                keep_warm or (length >= k if vanilla else length > 0) for length in self.lengths
            ]
            if all(runs_in):
                return k
        return 0

    def limit(self, now: int, vanilla: bool, keep_warm: bool) -> int:
        before = self.lengths[-1] if self.lengths else 0
        return min(now, before, self.ready(vanilla, keep_warm))


@calm
@given(
    steps=st.lists(st.lists(st.sampled_from("-rp"), min_size=6, max_size=6), max_size=40),
    vanilla=st.booleans(),
    keep_warm=st.booleans(),
    schedule=st.sampled_from([{1: 3, 3: 1}, {2: 3, 4: 2, 5: 1}, {3: 3}]),
)
def test_limits_against_the_history_of_launches(
    steps: list[list[str]], vanilla: bool, keep_warm: bool, schedule: dict[int, int]
) -> None:
    """Six requests; in each step one runs (r), was preempted and reads its prompt (p), or waits."""
    of = controller(
        draft_len_schedule=schedule, use_mtp_vanilla=vanilla, mtp={"keep_warm": keep_warm}
    )
    requests = [new_request() for _ in range(6)]
    stories = [LaunchedLengths() for _ in range(6)]
    for marks in steps:
        marks = ["p" if m == "r" and not s.lengths else m for m, s in zip(marks, stories)]  # noqa: B905
        reading = [i for i, mark in enumerate(marks) if mark == "p"]
        running = [i for i, mark in enumerate(marks) if mark == "r"]
        if not reading + running:
            continue
        for i in reading:
            stories[i].lengths.clear()
        length = of.plan(batch_of([requests[i] for i in reading], [requests[i] for i in running]))
        assert length in of.draft_lens([len(reading + running)])
        usable = max(stories[i].ready(vanilla, keep_warm) for i in reading + running)
        assert length <= usable
        for i in reading + running:
            want = stories[i].limit(length, vanilla, keep_warm)
            assert requests[i].py_draft_state.limit == want
        for i in reading + running:
            stories[i].lengths.append(length)

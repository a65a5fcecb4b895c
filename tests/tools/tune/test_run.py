"""Measuring settings, with engines that are stubs: failures, comparison of outputs, ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin.errors import ConfigError
from mtp_plugin.tools.tune import run
from mtp_plugin.tools.tune.answer import Setting
from mtp_plugin.tools.tune.engine import EngineFailedError, Request
from mtp_plugin.tools.tune.run import TuneOptions, Tuning, differences

OPTIONS = TuneOptions(
    engine_arguments=("--model", "MODEL"),
    prompts=("a", "b"),
    batch_sizes=(1, 4),
    num_drafts=(0, 2, 3),
    methods=("coupled",),
    draft_vocabs=(None,),
    sampling={},
    max_new_tokens=8,
    num_steps=5,
    at_once=1,
    logs=Path("logs"),
)


class StubEngine:
    """An engine whose outputs are the same for all settings, except for `changed`."""

    running = 0
    started: list[Setting]
    caches: list[str | None]
    failing: dict[int, Exception]
    changed: dict[int, int]
    """By K: the last token of the first prompt's output."""
    ties: set[int]
    certain: int = 0
    """The token at a difference that is no tie."""
    acceptance = 0.5
    ending: int | None = None
    """The K whose engine ends while its steps are timed."""
    num_mtp_layers = 1

    def __init__(
        self, setting: Setting, arguments: list[str], log: Path, cache: str | None
    ) -> None:
        assert (arguments, log.parent) == (["--model", "MODEL"], OPTIONS.logs)
        self.caches.append(cache)
        self.setting = setting
        self.requests: list[Request] = []
        type(self).started.append(setting)
        type(self).running += 1

    def result(self, on_wait: Callable[[], None]) -> dict[str, Any]:
        on_wait()
        if self.setting.num_drafts in self.failing:
            raise self.failing[self.setting.num_drafts]
        described = {"dtype": "bfloat16", "max_num_seqs": 4}
        return {**described, "num_mtp_layers": self.num_mtp_layers}

    def encode(self, given: list[str]) -> list[list[int]]:
        return [[ord(text)] for text in given]

    def run(self, given: list[Request]) -> dict[str, Any]:
        k = self.setting.num_drafts
        tokens = [self.output(prompt, options) for prompt, options in given]
        if k == self.ending and given and "ignore_eos" in given[0][1]:
            raise EngineFailedError("the process ended")
        step_ms = [9.0, 2.0 + k, 2.0 + k] if 0 < len(given) <= 4 else []
        return {"tokens": tokens, "step_ms": step_ms, "acceptance": [self.acceptance] * k}

    def output(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
        bias = options.get("logit_bias")
        if bias is not None:
            raised = max(bias, key=bias.__getitem__)
            lowered = min(bias, key=bias.__getitem__)
            is_tie = self.ties.intersection((raised, lowered))
            return [raised if is_tie else self.certain or lowered]
        temperature = 10 * round(10 * options["temperature"])
        first = prompt[0] + temperature
        is_changed = prompt == [ord("a")] and not options.get("ignore_eos")
        return [first, 2, self.changed.get(self.setting.num_drafts, 3) if is_changed else 3]

    def close(self) -> None:
        type(self).running -= 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[StubEngine]:
    empty = {"started": [], "caches": [], "failing": {}, "changed": {}, "ties": set()}
    stub = type("Engine", (StubEngine,), empty)
    monkeypatch.setattr(run, "EngineProcess", stub)
    return stub


def tune(**changed: Any) -> tuple[Tuning, list[str]]:
    lines: list[str] = []
    tuning = Tuning(replace(OPTIONS, **changed), lines.append)
    tuning.run()
    return tuning, lines


def test_settings_are_measured_and_compared_with_k_0(engine: type[StubEngine]) -> None:
    tuning, lines = tune()
    assert engine.started == [Setting(0), Setting(2), Setting(3)]
    assert not engine.running
    off, two, three = tuning.measurements
    assert (two.step_ms, off.step_ms) == ({1: 4.0, 4: 4.0}, {1: 2.0, 4: 2.0})
    assert three.acceptance == (0.5, 0.5, 0.5)
    assert (two.num_outputs, two.num_equal, two.problem) == (2, 2, None)
    assert lines[0].startswith("[....................]   0% K = 0: starting")
    # the share that is left is for vLLM without the plugin
    assert lines[-1] == "[##############......]  71% K = 3, coupled: step time, batch 4"


def test_steps_of_engines_are_timed_in_turns(
    engine: type[StubEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    run_batch = engine.run

    def recorded(self: StubEngine, given: list[Request]) -> dict[str, Any]:
        if given and given[0][1]["max_tokens"] == 32 and "ignore_eos" in given[0][1]:
            timed.append(self.setting.num_drafts)
        return run_batch(self, given)

    monkeypatch.setattr(engine, "run", recorded)
    tune(max_new_tokens=32, batch_sizes=(1,), at_once=2)
    assert timed == [0, 2, 0, 2, 3, 3]


@pytest.mark.parametrize(("at_once", "measured"), [(1, [0, 1, 2]), (2, [0, 1, 2, 3])])
def test_more_drafts_than_those_that_lose_are_left_out(
    engine: type[StubEngine], at_once: int, measured: list[int]
) -> None:
    engine.acceptance = 0.1
    lengths = (0, 1, 2, 3, 5, 7)
    tuning, lines = tune(num_drafts=lengths, at_once=at_once, stops_early=True)
    assert [setting.num_drafts for setting in engine.started] == measured
    losing = f"K = {measured[-1]} is slower than fewer drafts at every batch size"
    why = f"{losing}; --k measures it"
    assert tuning.skipped == {Setting(k): why for k in lengths if k not in measured}
    assert len(lines) < len(tune(num_drafts=lengths)[1])
    assert [setting.num_drafts for setting in engine.started[len(measured) :]] == [*lengths]


def test_draft_lengths_that_vllm_refuses_are_left_out(engine: type[StubEngine]) -> None:
    engine.num_mtp_layers = 3
    tuning, _ = tune(num_drafts=(0, 2, 3, 5, 6), stops_early=True)
    assert [setting.num_drafts for setting in engine.started[:4]] == [0, 2, 3, 6]
    assert tuning.skipped == {Setting(5): "with 3 MTP layers vLLM takes multiples of 3"}


def test_engine_that_fails_leaves_the_other_settings(engine: type[StubEngine]) -> None:
    engine.failing[3] = EngineFailedError("out of memory")
    tuning, lines = tune(at_once=2)
    problems = {m.setting.num_drafts: m.problem for m in tuning.measurements}
    assert problems == {0: None, 2: None, 3: "out of memory"}
    assert lines[-1].endswith(" K = 3, coupled: starting, 0 s")
    assert engine.caches == ["mtp_plugin-tune-1", "mtp_plugin-tune-2", None]
    assert not engine.running


def test_engine_that_fails_while_steps_are_timed(engine: type[StubEngine]) -> None:
    engine.ending = 2
    tuning, lines = tune(at_once=3, batch_sizes=(1, 4, 8))
    problems = [found.problem for found in tuning.measurements]
    assert problems[1] == "the process ended"
    for problem in (problems[0], problems[2]):
        assert problem is not None
        assert problem.startswith("no step generates for 8 requests at once: expected batch sizes")
    assert lines[-1].endswith("K = 3, coupled: step time, batch 8")


@pytest.mark.usefixtures("engine")
def test_nothing_is_measured_while_an_engine_of_the_group_starts() -> None:
    _, lines = tune(at_once=3)
    states = ["starting" in line for line in lines]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_numbers_without_outputs_of_k_0(engine: type[StubEngine], at_once: int) -> None:
    engine.failing[0] = EngineFailedError("out of memory")
    tuning, lines = tune(at_once=at_once)
    assert len(engine.started) == at_once
    assert not [line for line in lines if "acceptance" in line]
    problems = [m.problem for m in tuning.measurements]
    why = "there are no outputs of K = 0 to compare with"
    assert problems == ["out of memory", why, why]


def test_vllm_without_the_plugin_is_measured_at_the_best_k(engine: type[StubEngine]) -> None:
    engine.acceptance = 0.9
    tuning, lines = tune(draft_vocabs=(None, 8), at_once=8)
    best = Setting(3)
    assert engine.started[0] == Setting(0)
    assert engine.started[-2:] == [best, replace(best, has_plugin=False)]
    assert engine.caches[-2:] == ["mtp_plugin-tune-6", "mtp_plugin-tune-7"]
    found = tuning.measurements[-1]
    assert (found.setting.has_plugin, found.problem, found.num_outputs) == (False, None, 0)
    assert lines[-1].endswith("K = 3, vLLM without the plugin: step time, batch 4")
    assert not engine.running


def test_all_engines_are_closed_if_closing_one_is_interrupted(
    engine: type[StubEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: StubEngine) -> None:
        type(self).running -= 1
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "close", close)
    with pytest.raises(KeyboardInterrupt):
        tune(at_once=3)
    assert not engine.running


def test_wrong_arguments_end_the_run(engine: type[StubEngine]) -> None:
    engine.failing[2] = ConfigError("engine arguments: unrecognized arguments: --nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        tune()
    assert not engine.running


def test_different_outputs_are_ties_or_no_numbers(engine: type[StubEngine]) -> None:
    engine.changed.update({2: 7, 3: 8})
    engine.ties.add(7)
    # 8: wrong logits; 3: right ones, and verification is wrong
    for engine.certain in (0, 8, 3):
        _, two, three = tune()[0].measurements
        assert (two.problem, two.num_equal, two.ties) == (None, 1, ("request 1, token 3",))
        assert three.problem is not None
        assert three.problem.startswith("1 of 2 outputs differ from K = 0 and are no ties")


def test_methods_by_probability_are_compared_with_greedy_requests(
    engine: type[StubEngine],
) -> None:
    given = {"sampling": {"temperature": 0.8}, "methods": ("coupled", "block"), "num_drafts": (3,)}
    tuning, _ = tune(**given)
    assert engine.started == [Setting(0), Setting(3), Setting(3, "rejection")]
    _, coupled, block = tuning.measurements
    assert block.setting == Setting(3, "block")
    assert (coupled.num_outputs, block.num_outputs) == (run.MIN_SAMPLED, 2)
    assert (coupled.problem, block.problem) == (None, None)


def test_greedy_requests_need_one_method(engine: type[StubEngine]) -> None:
    tune(methods=("rejection", "block"), num_drafts=(3,))
    assert engine.started == [Setting(0), Setting(3)]


def test_first_difference_of_outputs() -> None:
    assert differences([[1, 2], [1, 2], [1]], [[1, 2], [1, 3], [1, 2]]) == {1: 1, 2: 1}

"""Measure settings in engines: of vLLM, each in a process of its own, or embedded executors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from mtp_plugin.tools.terminal.console import progress_bar
from mtp_plugin.tools.tune.answer import (
    BY_PROBABILITY,
    METHODS,
    Measurement,
    Setting,
    find_answer,
    losing_length,
)
from mtp_plugin.tools.tune.engine import EngineFailedError, EngineProcess, Request

if TYPE_CHECKING:
    from mtp_plugin.tools.tune.embedded import EmbeddedEngine, EmbeddedHost

WARM_UP_TOKENS = 16
MIN_TURNS, MAX_TURNS = 2, 16
"""Batches of one size at least, and at most while there are fewer steps than wanted."""
TIE_MARGINS = {"float32": 0.01}
TIE_MARGIN = 0.25
"""A token is a tie if raising its logit, and lowering that of the other token, by so much gives it.
The default is for 16-bit models: two units in the last place of logits from 16 to 32."""
MIN_SAMPLED = 32
"""Sampled requests for the acceptance at least; prompts are repeated with other seeds."""
NO_REFERENCE = "there are no outputs of K = 0 to compare with"
_START_UNITS = 4
"""Start of an engine in the progress bar; the other units are batches."""

Outputs = list[list[int]]
Engine = Union[EngineProcess, "EmbeddedEngine"]


@dataclass(frozen=True)
class TuneOptions:
    """What is measured.

    Args:
        engine_arguments: of ``vllm serve``, the model included.
        prompts: texts and conversations.
        drafter: see `Setting`.
        sampling: options of vLLM's ``SamplingParams``; empty: greedy.
        num_steps: timed steps per batch size at least.
        at_once: engines that share the GPU.
        embedded: starts embedded executors; None: vLLM.
        stops_early: leave out draft lengths after one that is slower than fewer drafts, and those
            that vLLM refuses.
    """

    engine_arguments: tuple[str, ...]
    prompts: Sequence[Any]
    batch_sizes: tuple[int, ...]
    num_drafts: tuple[int, ...]
    methods: tuple[str, ...]
    draft_vocabs: tuple[int | str | None, ...]
    sampling: Mapping[str, Any]
    max_new_tokens: int
    num_steps: int
    at_once: int
    logs: Path
    drafter: str = "mtp"
    embedded: EmbeddedHost | None = None
    stops_early: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether all methods give the same output."""
        return not self.sampling.get("temperature")

    def engines(self) -> dict[Setting, list[Setting]]:
        """Return the settings that each engine serves; that of K = 0 is the first one."""
        methods = METHODS[:1] if self.is_greedy else self.methods
        settings = [
            Setting(k, method, vocab, self.drafter)
            for vocab in self.draft_vocabs
            for k in self.num_drafts
            for method in methods
            if k
        ]
        engines: dict[Setting, list[Setting]] = {}
        for setting in [Setting(0), *settings]:
            engines.setdefault(setting.engine, []).append(setting)
        return engines


@dataclass
class Tuning:
    """The engines, and what was measured in them."""

    options: TuneOptions
    report: Callable[[str], None]
    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: dict[Setting, str] = field(default_factory=dict)
    """Why a setting was not measured."""
    _prompts: list[list[int]] = field(default_factory=list)
    _outputs: dict[tuple[Setting, bool], Outputs] = field(default_factory=dict)
    """By setting, and whether they are greedy."""
    _num_done: int = 0

    def run(self) -> None:
        """Start the engines and measure all settings, K = 0 first, then vLLM without the plugin
        with the drafts of the answer. No engine starts after one of K = 0 that failed.

        Raises:
            ConfigError, HostError: no engine can start.
        """
        engines = list(self.options.engines().items())
        left, first = engines, 0
        while left and self._has_reference():
            group, left = left[: self.options.at_once], left[self.options.at_once :]
            self._run_group(group, first)
            first += len(group)
            left = [each for each in left if not self._skips(each[1])]
        settings = [setting for _, settings in left for setting in settings]
        self.measurements += [Measurement(setting, NO_REFERENCE) for setting in settings]
        answer = find_answer(self.measurements)
        if not self.options.embedded and answer is not None and answer.setting.num_drafts:
            settings = [answer.setting, answer.setting.without_plugin()]
            # the answer is measured again if both can take turns
            settings = settings if self.options.at_once > 1 else settings[1:]
            self._run_group([(each.engine, [each]) for each in settings], len(engines))

    def _skips(self, settings: Sequence[Setting]) -> bool:
        """Leave out an engine whose settings all have a reason; returns whether it is left out."""
        reasons = {setting: self._reason(setting) for setting in settings}
        if not self.options.stops_early or None in reasons.values():
            return False
        self.skipped |= {setting: str(reason) for setting, reason in reasons.items()}
        self._num_done += _START_UNITS + self._num_batches(settings)
        return True

    def _reason(self, setting: Setting) -> str | None:
        layers = self.facts.get("num_mtp_layers") or 1
        if setting.drafter == "mtp" and setting.num_drafts > layers and setting.num_drafts % layers:
            return f"with {layers} MTP layers vLLM takes multiples of {layers}"
        losing = losing_length(self.measurements, setting)
        if losing is None:
            return None
        return f"K = {losing} is slower than fewer drafts at every batch size; --k measures it"

    def _has_reference(self) -> bool:
        """Whether K = 0, which is measured first, has not failed."""
        return not self.measurements or self.measurements[0].problem is None

    def _run_group(self, group: Sequence[tuple[Setting, list[Setting]]], first: int) -> None:
        """Measure engines that run at the same time; ``first`` started before."""
        processes = []
        with ExitStack() as closing:  # closes all of them, whatever happens
            for number, (setting, _) in enumerate(group, first + 1):
                process = self._start(setting, number, is_alone=len(group) == 1)
                closing.callback(process.close)
                processes.append(process)
            # all of them first: an engine that starts slows down the steps of another one
            problems = [
                self._wait(process, setting)
                for process, (setting, _) in zip(processes, group, strict=True)
            ]
            timed = []
            for process, (_, settings), problem in zip(processes, group, problems, strict=True):
                why = problem if problem or self._has_reference() else NO_REFERENCE
                self._run_engine(process, settings, why)
                end = len(self.measurements)
                timed += [(process, number) for number in range(end - len(settings), end)]
            for size in self.options.batch_sizes:
                self._time_steps(timed, size)

    def _start(self, setting: Setting, number: int, *, is_alone: bool) -> Engine:
        if self.options.embedded is not None:
            return self.options.embedded.start(setting, self.report)
        arguments = list(self.options.engine_arguments)
        log = self.options.logs / f"engine-{number}.log"
        cache = None if is_alone else f"mtp_plugin-tune-{number}"
        return EngineProcess(setting, arguments, log, cache)

    def _run_engine(self, process: Engine, settings: list[Setting], problem: str | None) -> None:
        measured: list[Measurement] = []
        end = self._num_done + len(settings)
        try:
            if problem is not None:
                raise EngineFailedError(problem)
            for setting in settings:
                found = self._accepted(process, setting)
                if setting.num_drafts and setting.has_plugin:
                    self._progress(f"{setting}: comparing outputs", 0)
                    found = self._compared(process, found)
                measured.append(found)
        except EngineFailedError as error:
            others = settings[len(measured) :]
            measured += [Measurement(setting, str(error)) for setting in others]
            self._num_done = end
        self.measurements += measured

    def _wait(self, process: Engine, setting: Setting) -> str | None:
        """Wait until an engine is ready; returns why it is not."""
        started = time.monotonic()

        def show() -> None:
            self._progress(f"{setting}: starting, {time.monotonic() - started:.0f} s", 0)

        show()
        try:
            self.facts = process.result(show)
            if not self._prompts:
                self._prompts = process.encode(list(self.options.prompts))
        except EngineFailedError as error:
            return str(error)
        finally:
            self._num_done += _START_UNITS
        return None

    def _accepted(self, process: Engine, setting: Setting) -> Measurement:
        """Measure the acceptance, and keep the outputs."""
        options, count = self.options, len(self._prompts)
        if not options.is_greedy:
            count = max(count, MIN_SAMPLED)
        self._progress(f"{setting}: acceptance, {count} prompts", 1)
        process.run(self._requests(setting, count, WARM_UP_TOKENS))
        found = process.run(self._requests(setting, count))
        self._outputs[setting, options.is_greedy] = found["tokens"]
        is_compared_greedy = not setting.num_drafts or setting.method in BY_PROBABILITY
        if setting.has_plugin and is_compared_greedy and not options.is_greedy:
            greedy = self._requests(setting, len(self._prompts), temperature=0.0)
            self._outputs[setting, True] = process.run(greedy)["tokens"]
        return Measurement(setting, acceptance=tuple(found["acceptance"]))

    def _time_steps(self, timed: Sequence[tuple[Engine, int]], size: int) -> None:
        """Time steps of a batch size: batches of the engines in turns, so that another load of the
        machine slows down all of them. ``timed`` has numbers of measurements, which it completes.
        """
        num_tokens = max(self.options.max_new_tokens, WARM_UP_TOKENS)
        times: dict[int, list[float]] = {number: [] for _, number in timed}
        for turn, (process, number) in product(range(MAX_TURNS), timed):
            found = self.measurements[number]
            is_done = turn >= MIN_TURNS and len(times[number]) >= self.options.num_steps
            if found.problem is not None or is_done:
                self._num_done += not turn
                continue
            try:
                if not turn:
                    self._progress(f"{found.setting}: step time, batch {size}", 1)
                    process.run(
                        self._requests(found.setting, size, WARM_UP_TOKENS, ignore_eos=True)
                    )
                requests = self._requests(found.setting, size, num_tokens, ignore_eos=True)
                times[number] += process.run(requests)["step_ms"]
            except EngineFailedError as error:
                self.measurements[number] = Measurement(found.setting, str(error))
        for number, measured in times.items():
            found = self.measurements[number]
            if measured and found.problem is None:
                step_ms = {**found.step_ms, size: statistics.median(measured)}
                self.measurements[number] = replace(found, step_ms=step_ms)
            elif found.problem is None:
                problem = (
                    f"no step generates for {size} requests at once: expected batch sizes of at "
                    f"most max_num_seqs ({self.facts['max_num_seqs']}), and "
                    "--max-new-tokens for several steps"
                )
                self.measurements[number] = Measurement(found.setting, problem)

    def _requests(
        self, setting: Setting, count: int, max_tokens: int | None = None, **changed: Any
    ) -> list[Request]:
        """Return requests with the prompts in turn; each has a seed of its own."""
        options = {"temperature": 0.0, **self.options.sampling, **changed}
        options["max_tokens"] = max_tokens or self.options.max_new_tokens
        if setting != setting.engine:
            options["extra_args"] = {"mtp_verification": setting.method}
        prompts = self._prompts
        return [(prompts[i % len(prompts)], {**options, "seed": i}) for i in range(count)]

    def _compared(self, process: Engine, found: Measurement) -> Measurement:
        """Compare the outputs with those of K = 0; ``process`` has the engine of the setting.

        Two tokens are a tie if either is generated after the output so far, which has no drafts,
        once its logit is raised and that of the other lowered. An engine with wrong logits fails
        the one, and one that verifies wrongly the other.
        """
        setting = found.setting
        is_greedy = self.options.is_greedy or setting.method in BY_PROBABILITY
        outputs = self._outputs[setting, is_greedy]
        reference = self._outputs[Setting(0), is_greedy]
        differing = differences(outputs, reference)
        changed = {"temperature": 0.0} if is_greedy else {}
        requests = self._requests(setting, len(outputs), 1, ignore_eos=True, **changed)
        margin = TIE_MARGINS.get(self.facts["dtype"], TIE_MARGIN)
        pairs, again = {}, []
        for number, at in differing.items():
            if at < min(len(outputs[number]), len(reference[number])):
                prompt, options = requests[number]
                prompt = prompt + reference[number][:at]
                pair = pairs[number] = [outputs[number][at], reference[number][at]]
                for raised, lowered in (pair, pair[::-1]):
                    bias = {raised: margin, lowered: -margin}
                    again.append((prompt, {**options, "logit_bias": bias}))
        samples = iter(process.run(again)["tokens"])
        ties = {
            number: f"request {number + 1}, token {differing[number] + 1}"
            for number, pair in pairs.items()
            if [next(samples)[0], next(samples)[0]] == pair
        }
        others = [number for number in differing if number not in ties]
        problem = None
        if others:
            number = others[0]
            problem = (
                f"{len(others)} of {len(outputs)} outputs differ from K = 0 and are no ties; the "
                f"first is request {number + 1}, token {differing[number] + 1}"
            )
        num_equal = len(outputs) - len(differing)
        ties_named = tuple(ties.values())
        return replace(
            found, problem=problem, num_outputs=len(outputs), num_equal=num_equal, ties=ties_named
        )

    def _num_batches(self, settings: Sequence[Setting]) -> int:
        """Return the units of an engine in the progress bar, without those of its start."""
        return len(settings) * (1 + len(self.options.batch_sizes))

    def _progress(self, text: str, units: int) -> None:
        engines = list(self.options.engines().values())
        if len(engines) > 1 and self.options.embedded is None:
            # for vLLM without the plugin, and what takes turns with it
            engines += [[Setting(0)]] * min(2, self.options.at_once)
        total = len(engines) * _START_UNITS + sum(map(self._num_batches, engines))
        self.report(f"{progress_bar(self._num_done / total)} {text}")
        self._num_done += units


def differences(outputs: Outputs, reference: Outputs) -> dict[int, int]:
    """Return the position of the first different token, by number of the output."""
    found = {}
    for number, (tokens, expected) in enumerate(zip(outputs, reference, strict=True)):
        if tokens != expected:
            pairs = zip(tokens, expected, strict=False)
            shorter = min(len(tokens), len(expected))
            found[number] = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    return found

"""One case: the comparison, then, where it held, the figures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from integration.bench.case import BenchmarkError
from integration.bench.e2e.batch import (
    Batch,
    Call,
    Run,
    TimedStep,
    pooled,
    run_batch,
    synchronize,
)
from integration.bench.e2e.case_config import (
    LEAST_STEADY_STEPS,
    check_case,
    executor_config,
)
from integration.bench.e2e.cases import E2ECase, E2EOptions
from integration.bench.e2e.gate import Gate, Match
from integration.bench.e2e.outcome import AskOutcome, E2EOutcome, Phases, StepFigures
from integration.bench.e2e.phases import PHASES, GapClock, clock_for, watch
from integration.bench.e2e.prompts import make_prompts
from integration.bench.e2e.request_kinds import ASKS, GREEDY, Ask, asked_of, check_asks
from integration.bench.e2e.sampled_gate import DrawnGate
from integration.bench.e2e.subject import Subject
from integration.bench.files import TRACE, check_trace, written_whole
from integration.bench.timing import Times
from mtp_plugin.errors import MTPPluginError, expect
from mtp_plugin.executor import LLM
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats

T = TypeVar("T")

WARM_UP_STEPS = 6
TRACED_STEPS = 5
LEAST_SECONDS, MOST_RUNS = {"cuda": 1.0, "cpu": 0.0}, 20
"""Seconds of steps that only generate over which a device is timed, within so many runs."""
TIMES_OF_ASKS = 2
"""So many times those seconds for each of several kinds of requests, which are compared: they take
turns, each round begun by the next, so what drifts is in all of them."""
HOST_BOUND_GAP = 0.03
"""Share of a step for which the device may be idle. Copies and the sampler keep any replay from the
next one for some 16 microseconds: where that is more, steps are as short as the host's part."""
ORACLE_REQUESTS, QUICK_ORACLE_REQUESTS = 8, 2


ORACLE_DRAWN_REQUESTS = 2
"""Asked about draws, which a row of logits takes some hundredth of a second for."""
UNDRAFTED_TOKENS = 16
"""Of every request, without drafts, where draws accept and other texts mean nothing."""


@dataclass(frozen=True)
class Measured:
    """What requests of one kind ran; the tokens of every run are compared."""

    timed: list[Run]
    others: list[Run] = field(default_factory=list)
    """For the device's clocks to rise, for the gaps, for the phases."""
    undrafted: Run | None = None
    """Without drafts: what drawn texts are compared with."""
    asked: dict[str, Measured] = field(default_factory=dict)
    """Other kinds of requests, in the same executor."""
    phases: list[tuple[Call, dict[str, float]]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Milliseconds between the replays of steps that only generate; empty without graphs."""

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [*self.timed, *self.others]


class E2EBench:
    """Measures the cases of one subject; a batch size is first run without MTP."""

    def __init__(
        self,
        subject: Subject,
        options: E2EOptions,
        *,
        tie_ulps: float | None,
        trace: Path | None = None,
    ) -> None:
        self.subject = subject
        self.options = options
        self.synthetic = options.synthetic(is_trained=subject.is_trained)
        self.trace = trace
        self.traces: list[str] = []
        self.gate = Gate(
            subject, QUICK_ORACLE_REQUESTS if options.quick else ORACLE_REQUESTS, tie_ulps
        )
        self.drawn_gate = DrawnGate(subject, self.gate, ORACLE_DRAWN_REQUESTS)
        self._off: dict[int, tuple[Run, E2EOutcome]] = {}
        self._undrafted: dict[tuple[int, str], Run] = {}
        self._ran: dict[str, Any] = {}

    def check(self, cases: Sequence[E2ECase]) -> None:
        """Refuse cases that cannot run, before any other has.

        Raises:
            BenchmarkError: with the case and what is wrong.
        """
        check_asks(self.options.asks, is_synthetic=self.synthetic is not None)
        for case in cases:
            try:
                check_case(self.subject, case, self.options, self.synthetic)
            except MTPPluginError as error:
                raise BenchmarkError(f"{case.label}: {error}") from error

    def measure(self, case: E2ECase) -> E2EOutcome:
        """Compare, then tell the figures; whatever goes wrong is told in the outcome."""
        start = time.perf_counter()
        self._ran = {}
        try:
            outcome = self._measure_off(case) if case.is_off else self._measure_on(case)
        except Exception as error:  # a case that fails must not take the others along
            outcome = E2EOutcome(case, error=f"{type(error).__name__}: {error}")
        return replace(outcome, ran=self._ran, seconds=time.perf_counter() - start)

    @property
    def batches(self) -> list[int]:
        """Batch sizes that ran without MTP."""
        return list(self._off)

    def off_run(self, batch: int) -> Run | None:
        """The run without MTP, where its tokens matched."""
        run, outcome = self._off.get(batch, (None, None))
        return run if outcome is not None and outcome.matched else None

    def prompts(self, batch: int) -> list[list[int]]:
        """The prompts of a batch size."""
        options = self.options
        return make_prompts(self.subject, batch, options.input_tokens, options.seed)

    def _measure_off(self, case: E2ECase) -> E2EOutcome:
        measured = self._run(case)
        match = self.gate.match_off(self.prompts(case.batch), measured.runs)
        figures = self._figures(case, measured) if match.holds else None
        asked = [self._judge_undrafted(case, *each) for each in measured.asked.items()]
        outcome = E2EOutcome(case, None, figures, match, asked=tuple(asked))
        self._off[case.batch] = measured.timed[0], outcome
        return outcome

    def _judge_undrafted(self, case: E2ECase, name: str, measured: Measured) -> AskOutcome:
        """Texts without MTP, with which those of drafts are compared."""
        (run,) = measured.others
        params = self._params(ASKS[name].without_drafting, case, self._undrafted_tokens)
        match = self.drawn_gate.match_oracle(self.prompts(case.batch), params, run)
        if match.holds:
            self._undrafted[case.batch, name] = run
        return AskOutcome(name, match)

    def _measure_on(self, case: E2ECase) -> E2EOutcome:
        off = self.off_run(case.batch)
        if off is None:
            raise BenchmarkError("the run without MTP has no match to compare with")
        measured = self._run(case)
        if self.synthetic is None:
            match = self.gate.match_on(self.prompts(case.batch), measured.runs, off)
        else:
            match = self._match_drawn(measured, case)
        figures = self._figures(case, measured) if match.holds else None
        asked = [self._judge_asked(case, *each) for each in measured.asked.items()]
        return E2EOutcome(
            case,
            self.synthetic,
            figures,
            match,
            off=self._off[case.batch][1].figures,
            asked=tuple(asked),
            has_targets=self._has_targets(case),
        )

    def _judge_asked(self, case: E2ECase, name: str, measured: Measured) -> AskOutcome:
        """Compare, then tell the figures."""
        try:
            match = self._match_asked(case, ASKS[name], measured)
        except BenchmarkError as error:
            return AskOutcome(name, error=str(error))
        gaps = measured.gaps
        return AskOutcome(
            name,
            match,
            self._figures(case, measured) if match.holds else None,
            host_gap_ms=statistics.median(gaps) if gaps else None,
        )

    def _match_asked(self, case: E2ECase, ask: Ask, measured: Measured) -> Match:
        gate, prompts, num_tokens = self.drawn_gate, self.prompts(case.batch), self._num_tokens
        params = self._params(ask, case, num_tokens)
        missing = gate.missing_logprobs(params, measured.runs)
        if ask.is_residual:
            found = gate.match_law(prompts, params, measured.runs)
            return replace(found, mismatches=missing + found.mismatches)
        undrafted = self._undrafted.get((case.batch, ask.name))
        if undrafted is None:
            raise BenchmarkError("the run without MTP has no match to compare with")
        if self.synthetic is None:
            found = gate.match_texts(prompts, params, measured.runs, undrafted)
        else:
            if measured.undrafted is None:
                raise BenchmarkError("expected a run without drafts, got none")
            few = self._params(ask.without_drafts, case, self._undrafted_tokens)
            found = gate.match_synthetic(
                self._match_drawn(measured, case),
                gate.match_texts(prompts, few, [measured.undrafted], undrafted),
            )
        return replace(found, mismatches=missing + found.mismatches)

    def _has_targets(self, case: E2ECase) -> bool:
        """Whether `ASKED_STEPS` are for it."""
        on_device = self.subject.device.type == "cuda" and self.options.graphs
        return on_device and self.subject.name == "8gb" and case.way == "eagle-k3"

    def _match_drawn(self, measured: Measured, case: E2ECase) -> Match:
        """Where draws accept: ids, and the shares asked for."""
        if self.synthetic is None:
            raise BenchmarkError("expected synthetic acceptance, got real")
        return self.gate.match_synthetic(
            measured.runs,
            self._num_tokens,
            self.synthetic.shares(case.k),
            lambda run: _acceptance(run.steady, case.k).per_position,
        )

    @property
    def _num_tokens(self) -> int:
        return self.options.output_tokens

    @property
    def _undrafted_tokens(self) -> int:
        """Of each request of a run without drafts."""
        most = self._num_tokens
        return most if self.synthetic is None else min(most, UNDRAFTED_TOKENS)

    def _params(self, ask: Ask, case: E2ECase, num_tokens: int) -> list[SamplingParams]:
        return ask.params(case.batch, num_tokens, self.options.seed)

    def _run(self, case: E2ECase) -> Measured:
        measured = self._with_executor(case, lambda llm: self._timed(llm, case))
        if not self.options.phases:
            return measured
        clock = clock_for(self.subject.device)
        phases: list[tuple[Call, dict[str, float]]] = []

        def after(call: Call) -> None:
            synchronize(self.subject.device)
            spent = clock.read()
            if call.is_steady and spent is not None:
                phases.append((call, spent))

        # graphs that are captured in here hold the clock's marks, those above do not
        with watch(self.subject.model, clock):
            run = self._with_executor(
                case,
                lambda llm: self._decode(llm, case, ASKS[GREEDY], before=clock.begin, after=after),
            )
        return replace(measured, others=[*measured.others, run], phases=phases)

    def _timed(self, llm: LLM, case: E2ECase) -> Measured:
        others = asked_of(self.options.asks, case.batch)
        asks = [ASKS[GREEDY]] if case.is_off else [ASKS[GREEDY], *others]
        found = self._rounds(llm, case, asks)
        captured = llm.executor.engine.captured
        self._ran = {
            "attention": llm.attn_backend.name,
            "graph_replays": 0 if captured is None else captured.num_replays,
            "steps": llm.executor.num_steps,
        }
        if self.trace is not None and not case.is_off:
            self._write_trace(llm, case, self.trace)
        for ask in asks:
            found[ask.name] = self._with_gaps(llm, case, ask, found[ask.name])
        greedy = found.pop(GREEDY)
        if case.is_off:
            found |= self._undrafted_runs(llm, case, others)
        elif self.synthetic is not None:
            for ask in others:
                run = self._undrafted_run(llm, case, ask.without_drafts)
                found[ask.name] = replace(found[ask.name], undrafted=run)
        return replace(greedy, asked=found)

    def _rounds(self, llm: LLM, case: E2ECase, asks: Sequence[Ask]) -> dict[str, Measured]:
        """Runs of every kind of requests in turn, until each was timed for long enough."""
        runs = {ask.name: [self._decode(llm, case, ask)] for ask in asks}
        least = LEAST_SECONDS[llm.device.type]
        if len(self.options.asks) > 1:
            least *= TIMES_OF_ASKS
        if all(_steady_seconds(each) >= least for each in runs.values()):
            return {name: Measured(each) for name, each in runs.items()}
        # too short for a device's clocks to be where they stay
        first, runs = runs, {ask.name: [] for ask in asks}
        for number in range(MOST_RUNS):
            begin = number % len(asks)
            for ask in [*asks[begin:], *asks[:begin]]:
                runs[ask.name].append(self._decode(llm, case, ask))
            if all(_steady_seconds(each) >= least for each in runs.values()):
                break
        return {name: Measured(each, first[name]) for name, each in runs.items()}

    def _with_gaps(self, llm: LLM, case: E2ECase, ask: Ask, measured: Measured) -> Measured:
        """With what lies between replays, in a run of its own."""
        captured = llm.executor.engine.captured
        others, gaps = measured.others, GapClock()
        if captured is not None:
            captured.around_replay = gaps.around
            others = [*others, self._decode(llm, case, ask, before=gaps.count_next)]
        elif not self.options.phases:
            others = [*others, self._decode(llm, case, ask)]
        synchronize(self.subject.device)
        return replace(measured, others=others, gaps=gaps.read())

    def _undrafted_runs(self, llm: LLM, case: E2ECase, asks: Sequence[Ask]) -> dict[str, Measured]:
        """Without MTP, of all whose texts have to be the same; equal ones are run once."""
        runs: list[tuple[Mapping[str, Any], bool, Run]] = []
        found = {}
        for ask in asks:
            if ask.is_residual:
                continue
            plain = ask.without_drafting
            same = [run for *of, run in runs if of == [plain.options, plain.of_one]]
            if not same:
                same = [self._undrafted_run(llm, case, plain)]
                runs.append((plain.options, plain.of_one, same[0]))
            found[ask.name] = Measured([], same)
        return found

    def _undrafted_run(self, llm: LLM, case: E2ECase, ask: Ask) -> Run:
        num_tokens = self._undrafted_tokens
        params = self._params(ask, case, num_tokens)
        return run_batch(llm, self.prompts(case.batch), num_tokens, params=params)

    def _decode(
        self,
        llm: LLM,
        case: E2ECase,
        ask: Ask,
        *,
        before: Callable[[], Any] | None = None,
        after: Callable[[Call], Any] | None = None,
    ) -> Run:
        prompts, most = self.prompts(case.batch), self._num_tokens
        few = min(most, WARM_UP_STEPS * (case.k + 1))
        run_batch(llm, prompts, few, params=self._params(ask, case, few))
        params = self._params(ask, case, most)
        run = run_batch(llm, prompts, most, params=params, before=before, after=after)
        expect(
            len(run.steady) >= LEAST_STEADY_STEPS,
            BenchmarkError,
            f"only {len(run.steady)} steps had every request generating, expected at least "
            f"{LEAST_STEADY_STEPS}: more output tokens are needed",
        )
        return run

    def _figures(self, case: E2ECase, measured: Measured) -> StepFigures:
        run = pooled(measured.timed)
        steady = run.steady
        times = Times.of([step.seconds * 1000 for step in steady])
        return StepFigures(
            seconds=run.seconds,
            num_tokens=run.num_tokens,
            first_tokens_seconds=run.first_tokens_seconds,
            step_ms=times,
            steady_tokens_per_second=(
                sum(sum(step.emitted) for step in steady) / sum(step.seconds for step in steady)
            ),
            acceptance=_acceptance(steady, case.k),
            share_of_repeated_8_grams=run.share_of_repeated_8_grams,
            phases=_phases(measured, times.median, on_device=self.subject.device.type == "cuda"),
            host_bound=is_host_bound(measured.gaps, times.mean),
        )

    def _with_executor(self, case: E2ECase, use: Callable[[LLM], T]) -> T:
        """The result of ``use``, with an executor whose memory is free again behind it."""
        config = executor_config(self.subject, case, self.options, self.synthetic)
        tokenizer = self.subject.tokenizer if self.options.text else None
        llm = LLM(config, model=self.subject.model, tokenizer=tokenizer)
        try:
            return use(llm)
        finally:
            llm.shutdown()
            del llm
            gc.collect()
            if self.subject.device.type == "cuda":
                torch.cuda.empty_cache()

    def _write_trace(self, llm: LLM, case: E2ECase, file: Path) -> None:
        """A chrome trace of a few generating steps; the label stands in the file's name."""
        path = file.with_name(f"{file.stem}-{case.label.replace('/', '-')}{file.suffix or '.json'}")
        batch = Batch(llm, self.prompts(case.batch), self.options.output_tokens)
        batch.start()
        while batch.is_running and not batch.is_steady:
            batch.step()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.subject.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(TRACED_STEPS):
                if batch.is_running:
                    with torch.profiler.record_function("step"):
                        batch.step()
            synchronize(self.subject.device)
        batch.cancel()
        with written_whole(path, TRACE) as beside:
            profile.export_chrome_trace(str(beside))
            check_trace(beside)
        self.traces.append(str(path))


def is_host_bound(gaps: list[float], step_ms: float) -> bool:
    """Whether the host sets the pace: steps run eagerly, or the device idles too long between two.

    Args:
        gaps: milliseconds between replays; empty without graphs. step_ms: the mean.
    """
    return not gaps or statistics.median(gaps) > HOST_BOUND_GAP * step_ms


def _steady_seconds(runs: list[Run]) -> float:
    return sum(step.seconds for run in runs for step in run.steady)


def _acceptance(steps: list[TimedStep], k: int) -> AcceptanceStats:
    stats = AcceptanceStats(k)
    for step in steps:
        for count in step.emitted:
            stats.record(count, k)
    return stats


def _phases(measured: Measured, step_ms: float, *, on_device: bool) -> Phases | None:
    steps = measured.phases
    if not steps:
        return None
    spent = {name: statistics.median(each[name] for _, each in steps) for name in PHASES}
    if measured.gaps:
        gap = statistics.median(measured.gaps)
    else:
        # on a device these calls waited for their end, so the time is that of the timed steps
        wall = step_ms if on_device else statistics.median(c.seconds * 1000 for c, _ in steps)
        gap = wall - statistics.median(sum(each.values()) for _, each in steps)
    return Phases(spent, gap, len(steps), len(measured.gaps))

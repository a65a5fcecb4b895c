"""Measure a case: compare its outputs, then report results if they match."""

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
from integration.bench.e2e.outcome import E2EOutcome, KindOutcome, Phases, StepFigures
from integration.bench.e2e.phases import PHASES, GapClock, clock_for, watch
from integration.bench.e2e.prompts import make_prompts
from integration.bench.e2e.request_kinds import (
    GREEDY,
    REQUEST_KINDS,
    RequestKind,
    check_kinds,
    kinds_of,
)
from integration.bench.e2e.sampled_gate import SampledGate
from integration.bench.e2e.subject import Subject
from integration.bench.files import TRACE, check_trace, written_whole
from integration.bench.timing import Times
from mtp_plugin.errors import MTPPluginError, expect
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats

T = TypeVar("T")

WARM_UP_STEPS = 6
TRACED_STEPS = 5
LEAST_SECONDS, MOST_RUNS = {"cuda": 1.0, "cpu": 0.0}, 20
"""Seconds of decode steps to time on a device, and the maximum number of runs."""
ROUNDS_PER_KIND = 2
"""Multiple of the timed seconds if several kinds of requests are compared: they alternate, and
another one starts each round, so that drift affects all of them."""
HOST_BOUND_GAP = 0.03
"""Share of a step for which the device may be idle. Copies and the sampler take about 16
microseconds between two replays; if this is a larger share, the host limits the step."""
ORACLE_REQUESTS, QUICK_ORACLE_REQUESTS = 8, 2


ORACLE_SAMPLED_REQUESTS = 2
"""Fewer for sampled requests: the reference takes about 10 ms per row of logits."""
UNDRAFTED_TOKENS = 16
"""Output tokens of every request without drafts, if acceptance is synthetic."""


@dataclass(frozen=True)
class Measured:
    """Runs of one kind of requests; the tokens of every run are compared."""

    timed: list[Run]
    others: list[Run] = field(default_factory=list)
    """Warm-up runs, and runs for the gaps and the phases."""
    undrafted: Run | None = None
    """Run without drafts, the reference for sampled outputs."""
    other_kinds: dict[str, Measured] = field(default_factory=dict)
    """Other kinds of requests, in the same executor."""
    phases: list[tuple[Call, dict[str, float]]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Milliseconds between the replays of steps that only generate; empty without graphs."""

    @property
    def runs(self) -> list[Run]:
        """All runs."""
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
        self.sampled_gate = SampledGate(subject, self.gate, ORACLE_SAMPLED_REQUESTS)
        self._off: dict[int, tuple[Run, E2EOutcome]] = {}
        self._undrafted: dict[tuple[int, str], Run] = {}
        self._ran: dict[str, Any] = {}

    def check(self, cases: Sequence[E2ECase]) -> None:
        """Refuse cases that cannot run, before any other has.

        Raises:
            BenchmarkError: a case failed; the message names it.
        """
        check_kinds(self.options.kinds, is_synthetic=self.synthetic is not None)
        for case in cases:
            try:
                check_case(self.subject, case, self.options, self.synthetic)
            except MTPPluginError as error:
                raise BenchmarkError(f"{case.label}: {error}") from error

    def measure(self, case: E2ECase) -> E2EOutcome:
        """Compare outputs, then return the results; errors are part of the outcome."""
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
        """Return the run without MTP, if its tokens match."""
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
        kind_outcomes = [
            self._check_undrafted(case, *each) for each in measured.other_kinds.items()
        ]
        outcome = E2EOutcome(case, None, figures, match, kind_outcomes=tuple(kind_outcomes))
        self._off[case.batch] = measured.timed[0], outcome
        return outcome

    def _check_undrafted(self, case: E2ECase, name: str, measured: Measured) -> KindOutcome:
        """Check the outputs without MTP, with which those with drafts are compared."""
        (run,) = measured.others
        params = self._params(REQUEST_KINDS[name].without_drafting, case, self._undrafted_tokens)
        match = self.sampled_gate.match_oracle(self.prompts(case.batch), params, run)
        if match.holds:
            self._undrafted[case.batch, name] = run
        return KindOutcome(name, match)

    def _measure_on(self, case: E2ECase) -> E2EOutcome:
        off = self.off_run(case.batch)
        if off is None:
            raise BenchmarkError("the run without MTP has no match to compare with")
        measured = self._run(case)
        if self.synthetic is None:
            match = self.gate.match_on(self.prompts(case.batch), measured.runs, off)
        else:
            match = self._match_synthetic(measured, case)
        figures = self._figures(case, measured) if match.holds else None
        kind_outcomes = [self._check_kind(case, *each) for each in measured.other_kinds.items()]
        return E2EOutcome(
            case,
            self.synthetic,
            figures,
            match,
            off=self._off[case.batch][1].figures,
            kind_outcomes=tuple(kind_outcomes),
            has_targets=self._has_targets(case),
        )

    def _check_kind(self, case: E2ECase, name: str, measured: Measured) -> KindOutcome:
        """Compare outputs, then return the results."""
        try:
            match = self._match_kind(case, REQUEST_KINDS[name], measured)
        except BenchmarkError as error:
            return KindOutcome(name, error=str(error))
        gaps = measured.gaps
        return KindOutcome(
            name,
            match,
            self._figures(case, measured) if match.holds else None,
            host_gap_ms=statistics.median(gaps) if gaps else None,
        )

    def _match_kind(self, case: E2ECase, request_kind: RequestKind, measured: Measured) -> Match:
        gate, prompts, num_tokens = self.sampled_gate, self.prompts(case.batch), self._num_tokens
        params = self._params(request_kind, case, num_tokens)
        missing = gate.missing_logprobs(params, measured.runs)
        if request_kind.is_residual:
            found = gate.match_law(prompts, params, measured.runs)
            return replace(found, mismatches=missing + found.mismatches)
        undrafted = self._undrafted.get((case.batch, request_kind.name))
        if undrafted is None:
            raise BenchmarkError("the run without MTP has no match to compare with")
        if self.synthetic is None:
            found = gate.match_texts(prompts, params, measured.runs, undrafted)
        else:
            if measured.undrafted is None:
                raise BenchmarkError("expected a run without drafts, got none")
            few = self._params(request_kind.without_drafts, case, self._undrafted_tokens)
            found = gate.match_synthetic(
                self._match_synthetic(measured, case),
                gate.match_texts(prompts, few, [measured.undrafted], undrafted),
            )
        return replace(found, mismatches=missing + found.mismatches)

    def _has_targets(self, case: E2ECase) -> bool:
        """Whether `STEP_TARGETS` apply to the case."""
        on_device = self.subject.device.type == "cuda" and self.options.graphs
        return on_device and self.subject.name == "8gb" and case.way == "eagle-k3"

    def _match_synthetic(self, measured: Measured, case: E2ECase) -> Match:
        """Check ids and acceptance rates under synthetic acceptance."""
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
        """Output tokens per request of a run without drafts."""
        most = self._num_tokens
        return most if self.synthetic is None else min(most, UNDRAFTED_TOKENS)

    def _params(
        self, request_kind: RequestKind, case: E2ECase, num_tokens: int
    ) -> list[SamplingParams]:
        return request_kind.params(case.batch, num_tokens, self.options.seed)

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

        # only graphs captured in this context contain the clock's marks
        with watch(self.subject.model, clock):
            run = self._with_executor(
                case,
                lambda llm: self._decode(
                    llm, case, REQUEST_KINDS[GREEDY], before=clock.begin, after=after
                ),
            )
        return replace(measured, others=[*measured.others, run], phases=phases)

    def _timed(self, llm: LLM, case: E2ECase) -> Measured:
        others = kinds_of(self.options.kinds, case.batch)
        kinds = [REQUEST_KINDS[GREEDY]] if case.is_off else [REQUEST_KINDS[GREEDY], *others]
        found = self._rounds(llm, case, kinds)
        captured = llm.executor.engine.captured
        self._ran = {
            "attention": llm.attn_backend.name,
            "graph_replays": 0 if captured is None else captured.num_replays,
            "steps": llm.executor.num_steps,
        }
        if self.trace is not None and not case.is_off:
            self._write_trace(llm, case, self.trace)
        for request_kind in kinds:
            found[request_kind.name] = self._with_gaps(
                llm, case, request_kind, found[request_kind.name]
            )
        greedy = found.pop(GREEDY)
        if case.is_off:
            found |= self._undrafted_runs(llm, case, others)
        elif self.synthetic is not None:
            for request_kind in others:
                run = self._undrafted_run(llm, case, request_kind.without_drafts)
                found[request_kind.name] = replace(found[request_kind.name], undrafted=run)
        return replace(greedy, other_kinds=found)

    def _rounds(self, llm: LLM, case: E2ECase, kinds: Sequence[RequestKind]) -> dict[str, Measured]:
        """Run every kind of requests in turn, until each was timed for long enough."""
        runs = {
            request_kind.name: [self._decode(llm, case, request_kind)] for request_kind in kinds
        }
        least = LEAST_SECONDS[llm.device.type]
        if len(self.options.kinds) > 1:
            least *= ROUNDS_PER_KIND
        if all(_steady_seconds(each) >= least for each in runs.values()):
            return {name: Measured(each) for name, each in runs.items()}
        # too short for the device's clocks to settle
        first, runs = runs, {request_kind.name: [] for request_kind in kinds}
        for number in range(MOST_RUNS):
            begin = number % len(kinds)
            for request_kind in [*kinds[begin:], *kinds[:begin]]:
                runs[request_kind.name].append(self._decode(llm, case, request_kind))
            if all(_steady_seconds(each) >= least for each in runs.values()):
                break
        return {name: Measured(each, first[name]) for name, each in runs.items()}

    def _with_gaps(
        self, llm: LLM, case: E2ECase, request_kind: RequestKind, measured: Measured
    ) -> Measured:
        """Add the gaps between replays, measured in a separate run."""
        captured = llm.executor.engine.captured
        others, gaps = measured.others, GapClock()
        if captured is not None:
            captured.around_replay = gaps.around
            others = [*others, self._decode(llm, case, request_kind, before=gaps.count_next)]
        elif not self.options.phases:
            others = [*others, self._decode(llm, case, request_kind)]
        synchronize(self.subject.device)
        return replace(measured, others=others, gaps=gaps.read())

    def _undrafted_runs(
        self, llm: LLM, case: E2ECase, kinds: Sequence[RequestKind]
    ) -> dict[str, Measured]:
        """Run the kinds without MTP whose outputs must be equal; identical kinds run once."""
        runs: list[tuple[Mapping[str, Any], bool, Run]] = []
        found = {}
        for request_kind in kinds:
            if request_kind.is_residual:
                continue
            plain = request_kind.without_drafting
            same = [run for *of, run in runs if of == [plain.options, plain.of_one]]
            if not same:
                same = [self._undrafted_run(llm, case, plain)]
                runs.append((plain.options, plain.of_one, same[0]))
            found[request_kind.name] = Measured([], same)
        return found

    def _undrafted_run(self, llm: LLM, case: E2ECase, request_kind: RequestKind) -> Run:
        num_tokens = self._undrafted_tokens
        params = self._params(request_kind, case, num_tokens)
        return run_batch(llm, self.prompts(case.batch), num_tokens, params=params)

    def _decode(
        self,
        llm: LLM,
        case: E2ECase,
        request_kind: RequestKind,
        *,
        before: Callable[[], Any] | None = None,
        after: Callable[[Call], Any] | None = None,
    ) -> Run:
        prompts, most = self.prompts(case.batch), self._num_tokens
        few = min(most, WARM_UP_STEPS * (case.k + 1))
        run_batch(llm, prompts, few, params=self._params(request_kind, case, few))
        params = self._params(request_kind, case, most)
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
        """Return the result of ``use`` with an executor, whose memory is freed afterwards."""
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
        """Write a chrome trace of a few decode steps; the file name contains the case's label."""
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
        with written_whole(path, TRACE) as temporary:
            profile.export_chrome_trace(str(temporary))
            check_trace(temporary)
        self.traces.append(str(path))


def is_host_bound(gaps: list[float], step_ms: float) -> bool:
    """Return whether the host limits the speed: steps are eager, or the device idles too long.

    Args:
        gaps: milliseconds between replays; empty without graphs.
        step_ms: mean time of a step.
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

"""A whole soak: warm-up, traffic, draining, checks, report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.table import Table

from integration.bench.case import BenchmarkError
from integration.bench.e2e.cases import EAGLE, VANILLA, WORKERS
from integration.bench.e2e.gate import Gate
from integration.bench.e2e.prompts import make_pieces
from integration.bench.e2e.request_kinds import GREEDY, REQUEST_KINDS, check_kinds
from integration.bench.e2e.sampled_gate import SampledGate
from integration.bench.e2e.subject import Subject, load_checkpoint
from integration.bench.files import check_output, results_file, store, stored_line
from integration.bench.machine import describe_machine
from integration.bench.soak.checks import Check, Memory, Thirds, leak_checks, memory_checks
from integration.bench.soak.outputs import Texts
from integration.bench.soak.traffic import RequestPlan, Traffic, random_chunks
from mtp_plugin.config import MAX_DRAFT_LEN
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded import LLM, LlmRequest
from mtp_plugin.hosts.embedded.resolved_config import resolve_device
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.tools.terminal.console import INTERRUPTED, OutputConsole, messages, progress

TOKENS_PER_BLOCK = 16
MAX_PROMPTS = 100_000
MAX_STALLED_STEPS = 20_000
"""Maximum number of steps until all requests have finished."""
REPORT_EVERY = 10.0
"""Maximum seconds between progress lines, which are also written at each tenth of the run."""


@dataclass(frozen=True)
class SoakOptions:
    """Options of the command line."""

    seconds: float = 60.0
    steps: int | None = None
    """Number of steps instead of seconds, for the same run on every machine."""
    seed: int = 0
    worker: str = EAGLE
    k: int = 3
    batch_size: int = 8
    num_prompts: int = 24
    longest_prompt: int = 96
    longest_output: int = 96
    kv_share: float = 0.4
    """Number of KV blocks relative to a full batch of the longest requests."""
    graphs: bool = True
    fused: bool | None = None
    kinds: tuple[str, ...] = (GREEDY,)
    """Kinds of requests, names of `REQUEST_KINDS`."""

    def check(self) -> None:
        """Check the options.

        Raises:
            BenchmarkError: a number below its minimum, an unknown worker, or a kind of requests
                that cannot be compared.
        """
        low = [
            name
            for name in ("k", "batch_size", "num_prompts", "longest_prompt", "longest_output")
            if getattr(self, name) < 1
        ]
        expect(not low, BenchmarkError, f"soak: expected at least 1, got less for {low[:1]}")
        expect(
            self.k <= MAX_DRAFT_LEN,
            BenchmarkError,
            f"--k: expected at most {MAX_DRAFT_LEN}, got {self.k}",
        )
        expect(
            self.num_prompts <= MAX_PROMPTS,
            BenchmarkError,
            f"--num-prompts: expected at most {MAX_PROMPTS}, got {self.num_prompts}",
        )
        expect(
            self.worker in WORKERS,
            BenchmarkError,
            f"--worker: expected {' or '.join(WORKERS)}, got {self.worker!r}",
        )
        expect(
            self.seconds > 0 and (self.steps is None or self.steps >= 1),
            BenchmarkError,
            f"soak: expected some time, got {self.seconds} s and {self.steps} steps",
        )
        check_kinds(self.kinds)
        kinds = [REQUEST_KINDS[name] for name in self.kinds]
        odd = [
            kind.name
            for kind in kinds
            if kind.is_residual or kind.of_one or kind.num_logprobs is not None
        ]
        expect(
            not odd,
            BenchmarkError,
            "--ask: a soak test compares the tokens of every request with those that its seed "
            f"gives without drafts; expected kinds like sampled or coupled-t1.0, got {odd[:1]}",
        )


@dataclass(frozen=True)
class Counts:
    """Number of requests, steps and tokens of the run."""

    requests: int
    finished: int
    aborted: int
    preemptions: int
    steps: int
    tokens: int
    seconds: float
    graph_replays: int
    prompt_graph_replays: int
    """Those of steps with prompts."""


@dataclass(frozen=True)
class Soaked:
    """Results of a soak test."""

    counts: Counts
    checks: list[Check]
    num_ties: int
    acceptance_length: float
    complete: bool = True
    """The run was not interrupted."""

    @property
    def holds(self) -> bool:
        """Whether every check passed."""
        return all(check.holds for check in self.checks)


class Soak:
    """Traffic through one executor.

    Args:
        llm: an LLM with a chunk policy of random lengths.
        prompts: token ids of the prompts to choose from.
    """

    def __init__(self, llm: LLM, options: SoakOptions, prompts: list[list[int]]) -> None:
        self._llm = llm
        self._options = options
        self._traffic = Traffic(
            options.seed,
            len(prompts),
            options.longest_output,
            options.batch_size,
            options.kinds,
        )
        self._prompts = prompts
        self._live: dict[int, tuple[LlmRequest, RequestPlan, int]] = {}
        self.texts = Texts(prompts, llm.model.facts.eos_token_ids)
        self.thirds = Thirds(llm.pieces.plan.max_draft_len)
        self.num_requests = self.num_finished = self.num_aborted = 0
        self.step_number = 0

    def step(self, third: int) -> None:
        """Submit arrivals, cancel requests that are due, then run a step.

        Raises:
            BenchmarkError: a request failed.
        """
        executor = self._llm.executor
        for planned in self._traffic.arrivals():
            # limit the queue
            if len(self._live) < 3 * self._options.batch_size:
                self._admit(planned)
        for request_id, (_, planned, since) in self._live.items():
            if planned.patience is not None and self.step_number - since >= planned.patience:
                executor.cancel(request_id)
        self.step_number += 1
        self._step(third)

    def drain(self, third: int = 2) -> None:
        """Step until no request is left.

        Raises:
            BenchmarkError: requests do not finish.
        """
        for _ in range(MAX_STALLED_STEPS):
            if not self._llm.executor.has_work:
                return
            self._step(third)
        raise BenchmarkError(f"soak: {len(self._live)} requests do not end")

    def _admit(self, planned: RequestPlan) -> None:
        request = self._llm.make_request(self._prompts[planned.prompt], planned.params())
        self._llm.executor.enqueue(request)
        self._live[request.request_id] = request, planned, self.step_number
        self.num_requests += 1

    def _step(self, third: int) -> None:
        if not self._llm.executor.has_work:
            return
        for event in self._llm.executor.step():
            if event.finish_reason is None:
                continue
            request, planned, _ = self._live.pop(event.request_id)
            expect(
                event.finish_reason is not FinishReason.ERROR,
                BenchmarkError,
                f"request {event.request_id}: {request.error}",
            )
            aborted = event.finish_reason is FinishReason.CANCELLED
            self.num_aborted += aborted
            self.num_finished += not aborted
            self.texts.add(planned, request.output_token_ids, event.finish_reason)
            if planned.speculate and not aborted:
                self.thirds.add(third, request.py_acceptance)


class Interrupts:
    """Whether the user requested a stop; a second request raises ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Handle interrupts, unless this is not the main thread or the process ignores them, as
        background jobs do."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        before = signal.signal(signal.SIGINT, self._take)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def soak(
    subject: Subject,
    options: SoakOptions,
    *,
    tie_ulps: float | None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Soaked:
    """Run the traffic, then the checks.

    An interrupt ends the traffic between two steps; the checks run nevertheless.

    Args:
        on_progress: called with a line of text as the soak goes on.

    Raises:
        BenchmarkError: a request failed or does not finish.
        KeyboardInterrupt: the second interrupt.
        ConfigError: the checkpoint does not support the worker or draft length.
    """
    options.check()
    interrupts = Interrupts()
    with interrupts.taken():
        return _soak(subject, options, tie_ulps, on_progress, interrupts)


def _soak(
    subject: Subject,
    options: SoakOptions,
    tie_ulps: float | None,
    report: Callable[[str], None],
    interrupts: Interrupts,
) -> Soaked:
    gate = SampledGate(subject, Gate(subject, 0, tie_ulps), 0)
    positions = subject.model.facts.max_position_embeddings
    length = options.longest_prompt + options.longest_output
    expect(
        length <= positions,
        BenchmarkError,
        f"--longest-prompt and --longest-output: expected at most the model's {positions} "
        f"positions, got {length}",
    )
    prompts = make_pieces(subject, options.num_prompts, options.longest_prompt, options.seed)
    llm = LLM(
        _config(subject, options),
        model=subject.model,
        tokenizer=subject.tokenizer,
        on_progress=lambda _: None,  # only the progress of the soak test is shown
        chunk_policy=random_chunks(options.seed),
    )
    report("warming up")
    with llm:
        # the first requests of every kind make permanent allocations
        warm = Soak(llm, replace(options, seed=options.seed + 1), prompts)
        for _ in range(4 * options.batch_size):
            warm.step(0)
        warm.drain()
        before = first_third = Memory.now(subject.device)
        preemptions = llm.executor.num_preemptions
        replays, prompt_replays = _replays(llm)
        run = Soak(llm, options, prompts)
        start = time.perf_counter()
        third, shown = 0, Progress(report, start)
        while (share := _share_done(options, run, start)) < 1 and not interrupts.requested:
            if third == 0 and share >= 1 / 3:
                first_third = Memory.now(subject.device)
            third = int(3 * share)
            run.step(third)
            shown.notify(share, run)
        complete = not interrupts.requested
        if not complete:
            report(f"interrupted at {share:.0%}: what went through is checked, unless again")
        report("draining")
        run.drain()
        seconds = time.perf_counter() - start
        drained = Memory.now(subject.device)
        checks = leak_checks(llm) + memory_checks(before, first_third, drained)
        replays, prompt_replays = _replays(llm, replays, prompt_replays)
    checks.append(run.thirds.check())
    wrong = run.texts.wrong_ends
    checks.append(Check("ends", not wrong, "; ".join(wrong[:3]) or "as requested"))
    report(f"comparing {run.texts.num_tokens} tokens with target-only decoding")
    interrupts.requested = True  # from here on the first interrupt ends the comparison
    try:
        mismatches, ties = run.texts.compare(gate)
        found = "; ".join(mismatches[:3]) or f"{run.texts.num_tokens} tokens, ties: {ties}"
    except KeyboardInterrupt:
        complete, mismatches, ties, found = False, ["all"], 0, "not compared: interrupted"
    checks.append(Check("outputs like target-only decoding's", not mismatches, found))
    for stats in run.thirds.stats[1:]:
        run.thirds.stats[0].merge(stats)
    return Soaked(
        Counts(
            requests=run.num_requests,
            finished=run.num_finished,
            aborted=run.num_aborted,
            preemptions=llm.executor.num_preemptions - preemptions,
            steps=run.step_number,
            tokens=run.texts.num_tokens,
            seconds=seconds,
            graph_replays=replays,
            prompt_graph_replays=prompt_replays,
        ),
        checks,
        ties,
        run.thirds.stats[0].acceptance_length,
        complete,
    )


def _replays(llm: LLM, before: int = 0, before_with_prompts: int = 0) -> tuple[int, int]:
    """Return the numbers of graph replays since ``before``: of all steps, and with prompts."""
    captured = llm.executor.engine.captured
    if captured is None:
        return 0, 0
    return captured.num_replays - before, captured.num_prompt_replays - before_with_prompts


class Progress:
    """Reports progress at each tenth of the run and every `REPORT_EVERY` seconds."""

    def __init__(self, report: Callable[[str], None], start: float) -> None:
        self._report = report
        self._start = self._last = start
        self._tenth = 0

    def notify(self, share: float, run: Soak) -> None:
        """Report a line if one is due."""
        now = time.perf_counter()
        tenth = int(10 * share)
        if tenth == self._tenth and now - self._last < REPORT_EVERY:
            return
        self._tenth, self._last = tenth, now
        self._report(
            f"{share:.0%}, {now - self._start:.0f} s: {run.step_number} steps, {run.num_requests} "
            f"requests, {run.num_aborted} aborted, {run.texts.num_tokens} tokens"
        )


def _share_done(options: SoakOptions, run: Soak, start: float) -> float:
    if options.steps is not None:
        return run.step_number / options.steps
    return (time.perf_counter() - start) / options.seconds


def _config(subject: Subject, options: SoakOptions) -> dict[str, Any]:
    length = options.longest_prompt + options.longest_output
    blocks = -(-length // TOKENS_PER_BLOCK)
    # one request always fits
    num_blocks = max(blocks, int(options.kv_share * options.batch_size * blocks))
    config: dict[str, Any] = {
        "model": subject.path,
        "device": subject.device.type,
        "max_batch_size": options.batch_size,
        # prompts do not fit into a step with a full batch, so they are chunked
        "max_num_tokens": options.batch_size * (options.k + 1) + options.longest_prompt // 2 + 8,
        "max_seq_len": length,
        "kv_cache_config": {
            "tokens_per_block": TOKENS_PER_BLOCK,
            "max_tokens": num_blocks * TOKENS_PER_BLOCK,
        },
        "speculative_config": {
            "decoding_type": "MTP",
            "max_draft_len": options.k,
            "use_mtp_vanilla": options.worker == VANILLA,
        },
    }
    if subject.device.type == "cuda" and options.graphs:
        config["cuda_graph_config"] = {"enable_padding": True}
    return config


def run(
    options: SoakOptions,
    *,
    checkpoint: Path,
    device: str,
    dtype: str | None,
    folder: Path,
    path: Path | None,
    tie_ulps: float | None,
) -> int:
    """Run a soak test and report; the exit code is 1 if a check failed, 130 after an interrupt.

    Raises:
        BenchmarkError, ConfigError, CheckpointError: the test cannot run.
    """
    options.check()
    check_output(path)
    place = resolve_device(device)
    fused = place.type == "cuda" if options.fused is None else options.fused
    subject = load_checkpoint(checkpoint, place, dtype, fused=fused)
    machine = describe_machine(place)
    default = folder / f"soak-{subject.name}.json"
    path = results_file(path, default, is_full=place.type == "cuda")
    with progress(messages()) as notify:
        found = soak(subject, options, tie_ulps=tie_ulps, on_progress=notify)
    try:
        store(path, document(machine, subject, options, found))
    finally:
        _show(found)
    _output().print(stored_line(path), soft_wrap=True)
    if found.complete:
        return 0 if found.holds else 1
    return INTERRUPTED


def _show(found: Soaked) -> None:
    out, counts = _output(), found.counts
    out.print(_table(found))
    out.print(
        f"{counts.requests} requests, {counts.aborted} aborted, {counts.preemptions} preemptions, "
        f"{counts.tokens} tokens in {counts.steps} steps and {counts.seconds:.1f} s, "
        f"{counts.graph_replays} graph replays, {counts.prompt_graph_replays} with prompts, "
        f"acceptance length {found.acceptance_length:.2f}",
        soft_wrap=True,
    )


def _output() -> OutputConsole:
    return OutputConsole(highlight=False, markup=False)


def document(
    machine: dict[str, Any], subject: Subject, options: SoakOptions, found: Soaked
) -> dict[str, Any]:
    """Return the JSON document of a soak test."""
    return {
        "kind": "soak",
        "name": subject.name,
        "complete": found.complete,
        "machine": machine,
        "model": subject.as_dict(),
        "options": asdict(options),
        "holds": found.holds,
        "counts": asdict(found.counts),
        "acceptance_length": found.acceptance_length,
        "ties": found.num_ties,
        "checks": [check.as_dict() for check in found.checks],
    }


def _table(found: Soaked) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("check", "holds", "found"):
        table.add_column(name)
    for check in found.checks:
        table.add_row(check.name, "yes" if check.holds else "NO", check.found)
    return table

"""Compare the throughput of the HTTP server with that of `LLM.generate`, in one process."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from integration.bench.case import BenchmarkError
from integration.bench.e2e.case_config import executor_config
from integration.bench.e2e.cases import EAGLE, E2ECase, E2EOptions
from integration.bench.e2e.gate import Gate, Match
from integration.bench.e2e.prompts import make_prompts
from integration.bench.e2e.report import heading
from integration.bench.e2e.subject import Subject, load_checkpoint, make_shape
from integration.bench.files import check_output, results_file, store, stored_line
from integration.bench.machine import describe_machine
from integration.bench.report import NOT_A_BENCHMARK, number
from integration.bench.serve.tokenizer import make_tokenizer
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.resolved_config import resolve_device
from mtp_plugin.serving import Server, ServerSettings, make_app
from mtp_plugin.tools.terminal.console import OutputConsole

ROOT = Path(__file__).parents[3]
OFFLINE, WHOLE, STREAM = "offline", "http", "http-stream"
MODES = {
    OFFLINE: "LLM.generate",
    WHOLE: "HTTP, not streamed",
    STREAM: "HTTP, streamed",
}
GOALS = {WHOLE: 0.95, STREAM: 0.85}
"""Expected share of the throughput of `LLM.generate`."""
CLIENT_SECONDS = 300.0
NARROWEST = 120
RESIDUAL_SCALE = 0.008
"""Of random weights; K = 3 has an acceptance length of about 2.8 with the shape `8gb`."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the command line."""

    concurrency: int = 64
    requests: int = 512
    isl: int = 128
    osl: int = 256
    k: int = 3
    clients: int = 4
    rounds: int = 3
    residual_scale: float = RESIDUAL_SCALE
    text: bool = False
    graphs: bool = True
    fused: bool | None = None
    seed: int = 0

    def check(self) -> None:
        """Check the options.

        Raises:
            BenchmarkError: a number below its minimum.
        """
        for name in ("concurrency", "requests", "isl", "osl", "k", "clients", "rounds"):
            value = getattr(self, name)
            expect(value >= 1, BenchmarkError, f"--{name}: expected at least 1, got {value}")
        expect(
            self.clients <= self.concurrency <= self.requests,
            BenchmarkError,
            f"serve: expected clients <= concurrency <= requests, got {self.clients}, "
            f"{self.concurrency} and {self.requests}",
        )


@dataclass(frozen=True)
class Timed:
    """One run of all requests."""

    seconds: float
    token_ids: list[list[int]]
    num_chunks: int = 0
    """Chunks with tokens, of all streams."""
    acceptance_length: float | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class Outcome:
    """The runs of every mode, and whether their outputs match."""

    runs: dict[str, list[Timed]] = field(default_factory=dict)
    match: Match | None = None

    @property
    def matched(self) -> bool:
        """Whether numbers may be reported."""
        return self.match is not None and self.match.holds

    @property
    def rates(self) -> dict[str, float]:
        """Median tokens per second of each mode."""
        return {
            mode: statistics.median(each.rate for each in timed)
            for mode, timed in self.runs.items()
        }

    @property
    def ratios(self) -> dict[str, float]:
        """Median of the ratios to the offline run of the same round."""
        return {
            mode: statistics.median(
                each.rate / offline.rate
                for each, offline in zip(self.runs[mode], self.runs[OFFLINE], strict=True)
            )
            for mode in GOALS
        }

    @property
    def num_equal(self) -> dict[str, list[int]]:
        """Requests of each run whose tokens are exactly those of the first offline run."""
        expected = self.runs[OFFLINE][0].token_ids
        return {
            mode: [
                sum(a == b for a, b in zip(each.token_ids, expected, strict=True)) for each in timed
            ]
            for mode, timed in self.runs.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the results; without a match no numbers."""
        match = None if self.match is None else self.match.as_dict()
        found: dict[str, Any] = {"matched": self.matched, "match": match}
        if not self.matched:
            return found
        chunks = [sum(map(len, r.token_ids)) / r.num_chunks for r in self.runs[STREAM]]
        return found | {
            "equal_requests": self.num_equal,
            "tokens_per_second": self.rates,
            "tokens_per_second_of_runs": {
                mode: [each.rate for each in timed] for mode, timed in self.runs.items()
            },
            "ratio_to_offline": self.ratios,
            "goals": GOALS,
            "acceptance_length": self.runs[OFFLINE][0].acceptance_length,
            "tokens_per_chunk": statistics.median(chunks),
        }


def run(
    options: ServeOptions,
    *,
    checkpoint: Path | None,
    shape: str | None,
    device: str,
    dtype: str | None,
    folder: Path,
    path: Path | None,
    tie_ulps: float | None,
) -> int:
    """Measure one model; the exit code is 1 if the outputs over HTTP differ.

    Args:
        folder: where the results of a run on a GPU go unless ``path`` names their file.

    Raises:
        BenchmarkError: invalid options, not exactly one model, a failed request, or a file that
            cannot be written.
    """
    expect(
        (checkpoint is None) != (shape is None),
        BenchmarkError,
        "bench serve: expected either --model or --shape",
    )
    options.check()
    check_output(path)
    log = OutputConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
    place = resolve_device(device)
    fused = place.type == "cuda" if options.fused is None else options.fused
    if checkpoint is not None:
        subject = load_checkpoint(checkpoint, place, dtype, fused=fused)
    else:
        subject = make_shape(
            shape or "",
            place,
            dtype,
            options.seed,
            fused=fused,
            echo_draft=True,
            residual_scale=options.residual_scale,
        )
    machine = describe_machine(place)
    default = folder / f"serving-{subject.name}{'-text' if options.text else ''}.json"
    path = results_file(path, default, is_full=place.type == "cuda")
    prompts = make_prompts(subject, options.requests, options.isl, options.seed)
    gate = Gate(subject, 0, tie_ulps)
    outcome = Outcome()
    with open_llm(subject, options) as llm:
        outcome.runs = measure(llm, options, prompts, log.print)
    gc.collect()
    log.print("comparing outputs")
    outcome.match = compare(gate, prompts, outcome.runs)
    content = {
        "kind": "serve",
        "name": subject.name,
        "benchmark": place.type == "cuda",
        "note": None if place.type == "cuda" else NOT_A_BENCHMARK,
        "machine": machine | {"uvloop": find_spec("uvloop") is not None},
        "model": subject.as_dict(),
        "options": asdict(options),
        "tie_tolerance_ulps": gate.tie_ulps,
        **outcome.as_dict(),
    }
    store(path, content)
    out = OutputConsole(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = max(out.width, NARROWEST)
    described = E2EOptions(isl=options.isl, osl=options.osl, acceptance=None)
    for line in heading(machine, subject, described)[:2]:
        out.print(line, soft_wrap=True)
    if not outcome.matched:
        for problem in outcome.match.mismatches[:20]:
            log.print(f"no numbers: {problem}", style="red")
    else:
        out.print(table(options, outcome, is_benchmark=place.type == "cuda"))
    out.print(stored_line(path), soft_wrap=True)
    return 0 if outcome.matched else 1


@contextmanager
def open_llm(subject: Subject, options: ServeOptions) -> Iterator[LLM]:
    """Yield an LLM that can run ``concurrency`` requests at once, and free its memory."""
    case = E2ECase(options.concurrency, EAGLE, options.k)
    settings = E2EOptions(isl=options.isl, osl=options.osl, graphs=options.graphs)
    tokenizer = None
    if options.text:
        tokenizer = subject.tokenizer or make_tokenizer(subject.model.facts.vocab_size)
    llm = LLM(
        executor_config(subject, case, settings, None), model=subject.model, tokenizer=tokenizer
    )
    try:
        yield llm
    finally:
        llm.shutdown()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()


def measure(
    llm: LLM, options: ServeOptions, prompts: Sequence[list[int]], report: Callable[[str], None]
) -> dict[str, list[Timed]]:
    """Return the runs of each mode, in rounds of one run each.

    Raises:
        BenchmarkError: a request failed.
    """
    runs: dict[str, list[Timed]] = {mode: [] for mode in MODES}
    with serving(llm) as port:
        warm = prompts[: options.concurrency]
        run_offline(llm, options, warm)
        run_http(port, options, warm, stream=True)
        for number_ in range(options.rounds):
            for mode, title in MODES.items():
                if mode == OFFLINE:
                    timed = run_offline(llm, options, prompts)
                else:
                    timed = run_http(port, options, prompts, stream=mode == STREAM)
                wrong = [len(ids) for ids in timed.token_ids if len(ids) != options.osl]
                expect(
                    not wrong,
                    BenchmarkError,
                    f"{title}: expected {options.osl} tokens of each request, got {wrong[:3]}",
                )
                report(f"round {number_ + 1}/{options.rounds}: {title}: {timed.seconds:.2f} s")
                runs[mode].append(timed)
    return runs


def run_offline(llm: LLM, options: ServeOptions, prompts: Sequence[list[int]]) -> Timed:
    """Run all prompts with `LLM.generate`."""
    params = SamplingParams(max_new_tokens=options.osl, ignore_eos=True)
    start = time.monotonic()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.monotonic() - start
    completions = [output.outputs[0] for output in outputs]
    steps = sum(each.acceptance.steps for each in completions)
    tokens = sum(
        count * emitted
        for each in completions
        for emitted, count in enumerate(each.acceptance.histogram)
    )
    return Timed(seconds, [list(each.token_ids) for each in completions], 0, tokens / max(steps, 1))


def run_http(
    port: int, options: ServeOptions, prompts: Sequence[list[int]], *, stream: bool
) -> Timed:
    """Run all prompts over HTTP, ``concurrency`` of them at a time, from client processes.

    Raises:
        BenchmarkError: a client failed.
    """
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "integration.bench.serve.client"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(options.clients)
    ]
    try:
        for index, client in enumerate(clients):
            bodies = [_body(prompt, options, stream) for prompt in prompts[index :: len(clients)]]
            plan = {
                "host": "127.0.0.1",
                "port": port,
                "stream": stream,
                "bodies": bodies,
                "num_connections": len(range(index, options.concurrency, len(clients))),
            }
            _write_line(client, json.dumps(plan))
        for client in clients:
            _read_line(client)
        for client in clients:
            _write_line(client, "go")
        results = [json.loads(_read_line(client)) for client in clients]
        for client in clients:
            client.wait(CLIENT_SECONDS)
    finally:
        for client in clients:
            client.kill()
            client.wait()
            for pipe in (client.stdin, client.stdout):
                if pipe is not None:
                    pipe.close()
    token_ids: list[list[int]] = [[] for _ in prompts]
    for index, result in enumerate(results):
        token_ids[index :: len(clients)] = result["token_ids"]
    seconds = max(each["end"] for each in results) - min(each["start"] for each in results)
    return Timed(seconds, token_ids, sum(each["num_chunks"] for each in results))


def _body(prompt: list[int], options: ServeOptions, stream: bool) -> str:
    return json.dumps(
        {
            "prompt": prompt,
            "max_tokens": options.osl,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
        }
    )


def _write_line(client: subprocess.Popen[str], line: str) -> None:
    if client.stdin is not None:
        client.stdin.write(line + "\n")
        client.stdin.flush()


def _read_line(client: subprocess.Popen[str]) -> str:
    line = "" if client.stdout is None else client.stdout.readline()
    expect(bool(line), BenchmarkError, "a client process failed; its error is above")
    return line


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """Serve an LLM on a free port of the loopback address, in a thread; yield the port."""
    settings = ServerSettings(model_name="bench", port=0)
    server = Server(make_app(llm, settings), settings)
    thread = threading.Thread(target=server.run, name="bench-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            expect(thread.is_alive(), BenchmarkError, "the server did not start")
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def compare(gate: Gate, prompts: Sequence[list[int]], runs: dict[str, list[Timed]]) -> Match:
    """Compare the outputs of every run with those of the first offline run."""
    expected = runs[OFFLINE][0].token_ids
    num_tokens = 0
    different: set[tuple[int, tuple[int, ...]]] = set()
    for timed in (each for of_mode in runs.values() for each in of_mode):
        num_tokens += timed.num_tokens
        different |= {
            (index, tuple(tokens))
            for index, tokens in enumerate(timed.token_ids)
            if tokens != expected[index]
        }
    num_ties, mismatches = 0, []
    for index, tokens in sorted(different):
        match = gate.match_tokens([prompts[index]], [list(tokens)], [expected[index]])
        num_ties += match.num_ties
        mismatches += [line.replace("request 0", f"request {index}") for line in match.mismatches]
    return Match("LLM.generate", num_tokens, num_ties, mismatches)


def table(options: ServeOptions, outcome: Outcome, *, is_benchmark: bool) -> Table:
    """Return the results as a table."""
    result = outcome.as_dict()
    shown = Table(
        box=box.SIMPLE_HEAD,
        title=None if is_benchmark else NOT_A_BENCHMARK,
        caption=f"{options.requests} requests, {options.concurrency} at a time, {options.isl} "
        f"tokens in, {options.osl} out, K = {options.k}, acceptance length "
        f"{result['acceptance_length']:.2f}, {result['tokens_per_chunk']:.1f} tokens per chunk",
    )
    for name in ("", "tok/s", "of LLM.generate", "goal", "equal requests", "runs"):
        shown.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for mode, title in MODES.items():
        goal, ratio = GOALS.get(mode), outcome.ratios.get(mode)
        shown.add_row(
            title,
            number(outcome.rates[mode]),
            "" if ratio is None else f"{ratio:.3f}",
            "" if goal is None else f"{goal:.2f}",
            str(min(outcome.num_equal[mode])),
            " ".join(number(each.rate) for each in outcome.runs[mode]),
        )
    return shown

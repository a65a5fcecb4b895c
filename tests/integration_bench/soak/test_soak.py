"""``python -m integration.bench soak``: what it runs, what it checks, and that a check can fail."""

from __future__ import annotations

import json
import math
import signal
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import triton  # noqa: F401 - imported first, so that the commands leave the environment alone
from typer.testing import CliRunner

from integration.bench.case import BenchmarkError
from integration.bench.cli import app
from integration.bench.e2e.gate import Gate
from integration.bench.e2e.sampled_gate import SampledGate
from integration.bench.e2e.subject import Subject, load_checkpoint
from integration.bench.soak import run
from integration.bench.soak.checks import Memory, Thirds, leak_checks, memory_checks
from integration.bench.soak.outputs import Texts
from integration.bench.soak.run import SoakOptions, soak
from integration.bench.soak.traffic import OutputKey, RequestPlan, Traffic, random_chunks
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.parity import TIE_ULPS, transformers_attention
from tests.checkpoints import write_echo_checkpoint
from tests.greedy import greedy_decode

SMALL = SoakOptions(
    steps=60, batch_size=3, k=2, num_prompts=4, longest_prompt=16, longest_output=10
)

KINDS = ("greedy", "sampled", "sampled-penalty", "coupled-t1.0")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory):
    """Drafts that are often right, and an end token that comes up."""
    path = tmp_path_factory.mktemp("echo") / "checkpoint"
    write_echo_checkpoint(path, vocab_size=64, eos_token_id=[7, 11, 19])
    return path


@pytest.fixture(scope="module")
def subject(path) -> Subject:
    return load_checkpoint(path, torch.device("cpu"), None, fused=False)


def failed(found: run.Soaked) -> list[str]:
    return [check.name for check in found.checks if not check.holds]


# --- whole soaks ---


@pytest.mark.parametrize("worker", ["eagle", "vanilla"])
def test_r47_a_soak_holds_and_repeats(subject: Subject, worker: str) -> None:
    """R47: random lengths, aborts and chunks leave no trend in acceptance, memory or free slots."""
    options = run.replace(SMALL, worker=worker, kinds=KINDS)
    one, two = (soak(subject, options, tie_ulps=TIE_ULPS) for _ in range(2))
    assert failed(one) == failed(two) == []
    for name in ("requests", "finished", "aborted", "preemptions", "steps", "tokens"):
        assert getattr(one.counts, name) == getattr(two.counts, name) > 0
    assert one.counts.steps == 60
    assert one.counts.finished + one.counts.aborted == one.counts.requests
    assert one.acceptance_length == two.acceptance_length > 1.2
    assert one.num_ties == 0


@pytest.mark.gpu
@pytest.mark.parametrize("worker", ["eagle", "vanilla"])
def test_r47_a_soak_holds_in_graphs(path, worker: str) -> None:
    """The same on a device: steps in graphs, and as many tokens per step as on the CPU."""
    options = run.replace(SMALL, worker=worker, steps=400, batch_size=8, kinds=KINDS)
    # steps hold 64 prompt tokens, the fewest that have a graph
    options = run.replace(options, longest_prompt=64)
    on_device = load_checkpoint(path, torch.device("cuda"), "float32", fused=True)
    found = soak(on_device, options, tie_ulps=TIE_ULPS)
    assert failed(found) == []
    assert found.counts.aborted > 0
    assert found.counts.preemptions > 0
    assert found.num_ties == 0
    assert found.counts.graph_replays > found.counts.prompt_graph_replays
    # a layer per depth reads the lengths of chunks on the host
    assert (found.counts.prompt_graph_replays > 0) == (worker == "eagle")
    on_cpu = load_checkpoint(path, torch.device("cpu"), None, fused=False)
    expected = soak(on_cpu, options, tie_ulps=TIE_ULPS)
    assert found.acceptance_length == expected.acceptance_length


def test_the_command_leaves_a_document(path, tmp_path) -> None:
    file = tmp_path / "results" / "soak.json"
    arguments = ["soak", "-m", str(path), "--device", "cpu", "--seconds", "1", "--k", "2"]
    sizes = ["--batch-size", "2", "--longest-prompt", "12", "--longest-output", "8"]
    result = CliRunner().invoke(app, [*arguments, *sizes, "--output", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert (report["kind"], report["complete"], report["holds"]) == ("soak", True, True)
    assert report["counts"]["seconds"] >= 1
    assert report["options"]["longest_output"] == 8
    assert {check["name"] for check in report["checks"]} >= {
        "KV blocks",
        "sequence slots",
        "history slots",
        "device memory",
        "host memory",
        "acceptance length by third",
        "ends",
        "outputs like target-only decoding's",
    }
    assert "outputs like target-only decoding's" in result.stdout


def test_a_soak_without_a_gpu_replaces_no_published_one(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["soak", "-m", str(path), "--device", "cpu", "--steps", "9", "--k", "2"]
    sizes = ["--batch-size", "2", "--longest-prompt", "12", "--longest-output", "8"]
    result = CliRunner().invoke(app, [*arguments, *sizes])
    assert result.exit_code == 0, result.output
    assert "results are not written: without a GPU" in result.stdout
    assert list(tmp_path.iterdir()) == []


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> None:
    """Ctrl-C in the middle of a step of the traffic."""
    honest = run.Soak.step

    def step(self: run.Soak, third: int) -> None:
        if self._options.seed == SMALL.seed and self.step_number == steps:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        honest(self, third)

    monkeypatch.setattr(run.Soak, "step", step)


@pytest.fixture
def interruptible():
    """A process may have been started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SMALL_COMMAND = ["--steps", "60", "--k", "2", "--batch-size", "3", "--num-prompts", "4"]
SMALL_COMMAND += ["--longest-prompt", "16", "--longest-output", "10", "--device", "cpu"]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_what_went_through(path, tmp_path, monkeypatch) -> None:
    interrupt_after(30, monkeypatch)
    file = tmp_path / "soak.json"
    arguments = ["soak", "-m", str(path), *SMALL_COMMAND, "--output", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130, result.output
    report = json.loads(file.read_text())
    assert report["complete"] is False
    assert report["holds"] is True
    assert report["counts"]["steps"] == 31
    assert (
        report["counts"]["requests"]
        == report["counts"]["finished"] + report["counts"]["aborted"]
        > 0
    )
    assert "KV blocks" in result.stdout
    lines = result.stderr.splitlines()
    assert "interrupted at 52%: what went through is checked, unless again" in lines
    assert lines[0] == "warming up"
    assert [line.split("%")[0] for line in lines[1:6]] == ["10", "20", "30", "40", "50"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_full_disk_at_the_end_loses_no_report(path, tmp_path, monkeypatch) -> None:
    def fill(*_: object) -> None:
        raise BenchmarkError("--output: cannot be written: No space left on device")

    monkeypatch.setattr(run, "store", fill)
    arguments = ["soak", "-m", str(path), *SMALL_COMMAND, "--output", str(tmp_path / "a.json")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, BenchmarkError)
    assert "KV blocks" in result.stdout
    assert "results: " not in result.stdout


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_leaves(subject: Subject, monkeypatch) -> None:
    interrupt_after(30, monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        soak(subject, SMALL, tie_ulps=TIE_ULPS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_comparison_keeps_the_rest(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(Texts, "compare", lambda *_: signal.raise_signal(signal.SIGINT))
    found = soak(subject, SMALL, tie_ulps=TIE_ULPS)
    assert not found.complete
    assert failed(found) == ["outputs like target-only decoding's"]
    assert found.checks[-1].found == "not compared: interrupted"
    assert found.counts.steps == 60


def test_a_soak_that_ignores_interrupts_goes_on_doing_so(subject: Subject, monkeypatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt_after(30, monkeypatch, times=2)
        assert soak(subject, SMALL, tie_ulps=TIE_ULPS).counts.steps == 60
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/proc/none/soak.json"], "--output: /proc/none/soak.json cannot be written"),
        (["--device", "tpu"], "device: expected one of auto, cpu, cuda, got 'tpu'"),
        (["--tie-tolerance", "-1"], "tie tolerance: expected at least 0 ulps"),
    ],
)
def test_what_would_lose_the_result_is_refused_first(
    path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(run, "LLM", None)  # nothing may run
    result = CliRunner().invoke(app, ["soak", "-m", str(path), "--device", "cpu", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SoakOptions(k=0), "expected at least 1, got less for"),
        (SoakOptions(worker="medusa"), "--worker: expected eagle or vanilla, got 'medusa'"),
        (SoakOptions(k=17), "--k: expected at most 16, got 17"),
        (SoakOptions(num_prompts=10**20), "--num-prompts: expected at most 100000, got 1000000"),
        (
            SoakOptions(longest_prompt=10**20),
            "--longest-output: expected at most the model's 512 positions, got 100000000",
        ),
        (SoakOptions(seconds=math.nan), "expected some time, got nan s"),
        (SoakOptions(seconds=0), "expected some time, got 0 s"),
        (SoakOptions(kinds=("greedy", "beam")), r"--ask: expected some of .*, got \['beam'\]"),
        (
            SoakOptions(kinds=("greedy", "rejection-t1.0")),
            r"--ask: .*expected kinds like sampled or coupled-t1.0, got \['rejection-t1.0'\]",
        ),
    ],
)
def test_wrong_options_are_named(subject: Subject, options: SoakOptions, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        soak(subject, options, tie_ulps=TIE_ULPS)


# --- what a soak must find ---


def test_a_leaked_block_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_one(llm: LLM) -> list[run.Check]:
        llm.blocks._free.pop()
        return leak_checks(llm)

    monkeypatch.setattr(run, "leak_checks", lose_one)
    assert failed(soak(subject, SMALL, tie_ulps=TIE_ULPS)) == ["KV blocks"]


def test_a_leaked_slot_is_found(subject: Subject) -> None:
    llm = LLM({"model": subject.path, "speculative_config": {"decoding_type": "MTP"}})
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3))
    assert all(check.holds for check in leak_checks(llm))
    llm.seq_slots.slots.add_slot(77)
    llm.pieces.manager.slot_manager.add_slot(77)
    llm.executor.enqueue(llm.make_request([1, 2], SamplingParams(max_new_tokens=2)))
    wrong = [check.name for check in leak_checks(llm) if not check.holds]
    assert wrong == ["sequence slots", "history slots", "requests"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_token_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    honest = Texts.add
    seen = iter(range(1000))

    def add(
        self: Texts, planned: RequestPlan, tokens: list[int], reason: FinishReason | None
    ) -> None:
        if len(tokens) > 3 and planned.kind == kind and next(seen) == 4:
            tokens = [*tokens[:2], (tokens[2] + 1) % 64, *tokens[3:]]
        honest(self, planned, tokens, reason)

    monkeypatch.setattr(Texts, "add", add)
    found = soak(subject, run.replace(SMALL, kinds=KINDS, steps=120), tie_ulps=TIE_ULPS)
    assert failed(found) == ["outputs like target-only decoding's"]
    assert "token 3: " in found.checks[-1].found


def test_growing_memory_is_found() -> None:
    warm, third = Memory(device=0, host=0), Memory(device=0, host=100 * 2**20)
    grown = Memory(device=17 * 2**20, host=220 * 2**20)
    assert [check.holds for check in memory_checks(warm, third, grown)] == [False, True]
    grown = Memory(device=16 * 2**20, host=229 * 2**20)
    assert [check.holds for check in memory_checks(warm, third, grown)] == [True, False]


def stats(histogram: list[int]) -> AcceptanceStats:
    return AcceptanceStats(3, histogram)


def test_drift_is_found_unless_chance_explains_it() -> None:
    steady, worse = [0, 2, 2, 2, 4], [0, 4, 3, 2, 1]
    thirds = Thirds(3)
    for third in range(3):
        for _ in range(40):
            thirds.add(third, stats(steady))
    assert thirds.check().holds
    for _ in range(400):
        thirds.add(2, stats(worse))
    assert not thirds.check().holds
    # too few requests say nothing
    thirds = Thirds(3)
    for third, histogram in enumerate((steady, steady, worse)):
        for _ in range(9):
            thirds.add(third, stats(histogram))
    assert thirds.check().holds


def test_requests_that_never_end_are_named(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(run, "MAX_STALLED_STEPS", 3)
    with pytest.raises(BenchmarkError, match=r"soak: \d+ requests do not end"):
        soak(subject, SMALL, tie_ulps=TIE_ULPS)


# --- traffic ---


def test_traffic_follows_its_seed() -> None:
    def sampled(seed: int) -> list[list[RequestPlan]]:
        traffic = Traffic(seed, 7, 20, 4)
        return [traffic.arrivals() for _ in range(300)]

    assert sampled(3) == sampled(3) != sampled(4)
    planned_requests = [planned for step in sampled(3) for planned in step]
    assert {planned.prompt for planned in planned_requests} == set(range(7))
    assert {planned.max_new_tokens for planned in planned_requests} == set(range(1, 21))
    for kind in (
        lambda planned: planned.patience is not None,
        lambda planned: not planned.ignore_eos,
        lambda planned: not planned.speculate,
    ):
        assert 0 < sum(map(kind, planned_requests)) < len(planned_requests) / 2


def test_chunks_fit_and_vary() -> None:
    chunk = random_chunks(1)
    requests = [SimpleNamespace(request_id=i, context_current_position=0) for i in range(50)]
    lengths = [chunk(request, 9) for request in requests]
    assert lengths == [chunk(request, 9) for request in requests]
    assert set(lengths) == set(range(1, 10))


# --- outputs ---

PLAN = RequestPlan(prompt=0, max_new_tokens=6, ignore_eos=False, speculate=True, patience=None)


@pytest.mark.parametrize(
    ("tokens", "reason", "problem"),
    [
        ([1, 2, 3, 4, 5, 6], FinishReason.LENGTH, ""),
        ([1, 2, 9], FinishReason.END_ID, ""),
        ([1, 2], FinishReason.CANCELLED, ""),
        ([1, 2, 3], FinishReason.LENGTH, "3 of 6 tokens, ended by length"),
        ([1, 2, 3], FinishReason.END_ID, "3 of 6 tokens, ended by stop"),
        ([1, 9, 3], FinishReason.CANCELLED, "continues after the end token 9"),
        ([1, 2, 3, 4, 5, 9], FinishReason.LENGTH, "6 of 6 tokens, ended by length"),
        ([1, 2], None, "2 of 6 tokens, ended by nothing"),
    ],
)
def test_outputs_end_as_requested(tokens: list[int], reason: FinishReason | None, problem: str):
    texts = Texts([[0]], end_ids=(9,))
    texts.add(PLAN, tokens, reason)
    assert texts.wrong_ends == ([f"prompt 0, greedy: {problem}"] if problem else [])


def test_outputs_of_a_prompt_are_kept_once(subject: Subject) -> None:
    prompt = [5, 6, 7]
    with transformers_attention(subject.model):
        truth = greedy_decode(subject.model.target, prompt, 8)
    texts = Texts([prompt], end_ids=())
    planned = run.replace(PLAN, ignore_eos=True)
    for length in deque([3, 8, 5, 8]):
        texts.add(planned, truth[:length], FinishReason.CANCELLED)
    assert texts.longest == {OutputKey(0): truth}
    assert texts.odd == []
    gate = SampledGate(subject, Gate(subject, 0, TIE_ULPS), 0)
    assert texts.compare(gate) == ([], 0)
    texts.add(planned, [*truth[:3], (truth[3] + 1) % 64], FinishReason.CANCELLED)
    assert len(texts.odd) == 1
    mismatches, _ = texts.compare(gate)
    assert mismatches[0].startswith("outputs unlike others: request 0, token 4: ")
    assert texts.num_tokens == 28

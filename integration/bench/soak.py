"""Soak test of the executor: a long run of random traffic, then checks.

Arrivals, lengths, prompt chunks, aborts and memory pressure are random and determined by a seed. At
the end no block, slot or memory may have leaked, acceptance may not have drifted, and every output
must equal target-only decoding.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from integration.bench.case import BenchmarkError
from integration.bench.e2e.cases import EAGLE, GREEDY, KINDS, VANILLA
from integration.bench.e2e.prompts import make_pieces
from integration.bench.e2e.reference import Reference
from integration.bench.e2e.subject import Subject
from integration.bench.machine import describe_machine
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded import LLM, LlmRequest, SamplingParams
from mtp_plugin.requests.pacing import paced
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.check import PromptResult, document

TOKENS_PER_BLOCK = 16
KV_SHARE = 0.4
"""Number of KV blocks relative to a full batch of the longest requests."""
MAX_STALLED_STEPS = 20_000
"""Maximum number of steps until all requests have finished."""
ABORTED, WITHOUT_DRAFTS, STOPPING = 0.1, 0.05, 0.25
"""Shares of requests that are aborted, have no drafts, and stop at an EOS token."""
BURST = 3
"""Maximum number of requests that arrive in one step."""
MAX_DEVICE_GROWTH, MAX_HOST_GROWTH = 16 * 2**20, 128 * 2**20
"""Bytes since the warm-up, and since the first third: libraries cache data per shape."""
MAX_DRIFT, STANDARD_ERRORS, LEAST_REQUESTS = 0.05, 4.0, 10
"""Of a third's acceptance length, whichever is larger; and the requests of a third to check it."""
MAX_ODD = 200
"""Maximum number of outputs that differ from others of their key and are kept for comparison."""


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
    graphs: bool = True
    kinds: tuple[str, ...] = (GREEDY,)
    """Kinds of requests, names of `KINDS`, whose outputs are those without drafts."""


class Check(NamedTuple):
    """Result of one check."""

    name: str
    holds: bool
    found: str


class OutputKey(NamedTuple):
    """Prompt and kind: requests with equal keys have the same seed, and thus the same output."""

    prompt: int
    kind: str = GREEDY

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the options of a request that does not stop at an EOS token."""
        return KINDS[self.kind].params(1, max_new_tokens, seed=self.prompt)[0]


@dataclass(frozen=True)
class RequestPlan:
    """One request to submit."""

    key: OutputKey
    params: SamplingParams
    patience: int | None
    """Number of steps after which an unfinished request is aborted; None: never."""


def random_plan(rng: random.Random, options: SoakOptions) -> RequestPlan:
    key = OutputKey(rng.randrange(options.num_prompts), rng.choice(options.kinds))
    params = replace(
        key.params(rng.randint(1, options.longest_output)),
        ignore_eos=rng.random() >= STOPPING,
        speculate=rng.random() >= WITHOUT_DRAFTS,
    )
    is_aborted = rng.random() < ABORTED
    return RequestPlan(
        key, params, rng.randint(0, options.longest_output // 4) if is_aborted else None
    )


@dataclass
class Third:
    """Acceptance in a third of the run."""

    stats: AcceptanceStats
    lengths: list[float] = field(default_factory=list)

    def add(self, stats: AcceptanceStats) -> None:
        """Count a finished request."""
        self.stats.merge(stats)
        self.lengths.append(stats.acceptance_length)


@dataclass
class Outputs:
    """Outputs by prompt and kind: the longest one, and those that are not a prefix of it."""

    end_ids: tuple[int, ...]
    longest: dict[OutputKey, list[int]] = field(default_factory=dict)
    odd: list[tuple[OutputKey, list[int]]] = field(default_factory=list)
    num_tokens: int = 0
    wrong_ends: list[str] = field(default_factory=list)

    def add(self, plan: RequestPlan, tokens: list[int], reason: FinishReason | None) -> None:
        """Add the output of a finished or aborted request."""
        self.num_tokens += len(tokens)
        if not self._ends_well(plan.params, tokens, reason):
            self.wrong_ends.append(f"{plan.key}: {len(tokens)} tokens, {reason}")
        known = self.longest.get(plan.key, [])
        shared = min(len(known), len(tokens))
        if known[:shared] != tokens[:shared]:
            self.odd = [*self.odd, (plan.key, tokens)][:MAX_ODD]
        elif len(tokens) > len(known):
            self.longest[plan.key] = tokens

    def _ends_well(
        self, params: SamplingParams, tokens: list[int], reason: FinishReason | None
    ) -> bool:
        is_end = [not params.ignore_eos and token in self.end_ids for token in tokens]
        if any(is_end[:-1]):
            return False
        if reason is FinishReason.LENGTH:
            return not any(is_end) and len(tokens) == params.max_new_tokens
        return reason is FinishReason.CANCELLED or (reason is FinishReason.END_ID and any(is_end))

    def check(self, reference: Reference, prompts: list[list[int]]) -> tuple[Check, int]:
        """Compare with target-only decoding; return also the number of ties."""
        outputs = [*sorted(self.longest.items()), *self.odd]
        stats = AcceptanceStats(0)
        match = reference.compare(
            [
                PromptResult(prompts[key.prompt], tokens, "", FinishReason.LENGTH, stats)
                for key, tokens in outputs
                if tokens
            ],
            [key.params(len(tokens)) for key, tokens in outputs if tokens],
        )
        found = "; ".join(match.mismatches[:3]) or f"{self.num_tokens} tokens"
        name = "outputs like target-only decoding's"
        return Check(name, not match.mismatches, found), match.num_ties


class Soak:
    """Traffic through one executor."""

    def __init__(self, llm: LLM, options: SoakOptions, prompts: list[list[int]]) -> None:
        self._llm, self._options, self._prompts = llm, options, prompts
        self._rng = random.Random(options.seed)
        # slightly more than a batch that gets two tokens per request and step
        rate = 1.2 * options.batch_size * 4 / options.longest_output
        self._chance = min(0.9, rate / ((1 + BURST) / 2))
        self._live: dict[int, tuple[LlmRequest, RequestPlan, int]] = {}
        self.outputs = Outputs(llm.model.facts.eos_token_ids)
        self.thirds = [Third(AcceptanceStats(options.k)) for _ in range(3)]
        self.counts = dict.fromkeys(("requests", "finished", "aborted", "steps"), 0)

    def step(self, third: int) -> None:
        """Submit arrivals, cancel requests that are due, then run a step.

        Raises:
            BenchmarkError: a request failed.
        """
        executor, rng = self._llm.executor, self._rng
        if rng.random() < self._chance:
            for _ in range(rng.randint(1, BURST)):
                plan = random_plan(rng, self._options)
                if len(self._live) < 3 * self._options.batch_size:  # limits the queue
                    request = self._llm.make_request(self._prompts[plan.key.prompt], plan.params)
                    executor.enqueue(request)
                    self._live[request.request_id] = request, plan, self.counts["steps"]
                    self.counts["requests"] += 1
        for request_id, (_, plan, since) in self._live.items():
            if plan.patience is not None and self.counts["steps"] - since >= plan.patience:
                executor.cancel(request_id)
        self.counts["steps"] += 1
        self._step(third)

    def drain(self) -> None:
        """Step until no request is left.

        Raises:
            BenchmarkError: requests do not finish.
        """
        for _ in range(MAX_STALLED_STEPS):
            if not self._llm.executor.has_work:
                return
            self._step(2)
        raise BenchmarkError(f"soak: {len(self._live)} requests do not end")

    def _step(self, third: int) -> None:
        if not self._llm.executor.has_work:
            return
        for event in self._llm.executor.step():
            if event.finish_reason is None:
                continue
            request, plan, _ = self._live.pop(event.request_id)
            expect(
                event.finish_reason is not FinishReason.ERROR,
                BenchmarkError,
                f"request {event.request_id}: {request.error}",
            )
            is_aborted = event.finish_reason is FinishReason.CANCELLED
            self.counts["aborted" if is_aborted else "finished"] += 1
            self.outputs.add(plan, request.output_token_ids, event.finish_reason)
            if plan.params.speculate and not is_aborted and request.py_acceptance.steps:
                self.thirds[third].add(request.py_acceptance)


def random_chunks(seed: int) -> Callable[[LlmRequest, int], int]:
    """Return a chunk policy with random lengths, determined by seed, request and position."""

    def chunk(request: LlmRequest, limit: int) -> int:
        key = f"{seed} {request.request_id} {request.context_current_position}"
        return random.Random(key).randint(1, max(1, limit))

    return chunk


def soak(
    subject: Subject, options: SoakOptions, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the traffic, then the checks; return the JSON document.

    Raises:
        BenchmarkError: the lengths exceed the model's, or a request failed or does not finish.
        ConfigError: the checkpoint does not support the worker or draft length.
    """
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
    report = paced(on_progress)
    with llm:
        # the first requests of every kind make permanent allocations
        warm = Soak(llm, replace(options, seed=options.seed + 1), prompts)
        for _ in range(4 * options.batch_size):
            warm.step(0)
        warm.drain()
        warm_memory = first_third = _memory(subject.device)
        before = _counters(llm)
        run = Soak(llm, options, prompts)
        start, third = time.perf_counter(), 0
        while (share := _share_done(options, run, start)) < 1:
            if third == 0 and share >= 1 / 3:
                first_third = _memory(subject.device)
            third = int(3 * share)
            run.step(third)
            report(f"{share:.0%}: {run.counts}")
        run.drain()
        seconds = time.perf_counter() - start
        checks = leak_checks(llm) + memory_checks(warm_memory, first_third, _memory(subject.device))
        counters = {name: count - before[name] for name, count in _counters(llm).items()}
    whole = AcceptanceStats(options.k)
    for each in run.thirds:
        whole.merge(each.stats)
    wrong, tokens = run.outputs.wrong_ends, run.outputs.num_tokens
    on_progress(f"comparing {tokens} tokens with target-only decoding")
    checks += [
        acceptance_check(run.thirds, whole.acceptance_length),
        Check("ends", not wrong, "; ".join(wrong[:3]) or "as requested"),
    ]
    check, ties = run.outputs.check(Reference(subject), prompts)
    checks.append(check)
    return document(
        "soak",
        {
            "name": subject.name,
            "machine": describe_machine(subject.device),
            "model": subject.as_dict(),
            "options": asdict(options),
            "counts": run.counts | counters | {"tokens": tokens, "seconds": seconds},
            "acceptance_length": whole.acceptance_length,
            "ties": ties,
        },
        all(check.holds for check in checks),
        [check._asdict() for check in checks],
    )


def _config(subject: Subject, options: SoakOptions) -> dict[str, Any]:
    length = options.longest_prompt + options.longest_output
    blocks = -(-length // TOKENS_PER_BLOCK)
    # one request always fits
    num_blocks = max(blocks, int(KV_SHARE * options.batch_size * blocks))
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


def _share_done(options: SoakOptions, run: Soak, start: float) -> float:
    if options.steps is not None:
        return run.counts["steps"] / options.steps
    return (time.perf_counter() - start) / options.seconds


def _counters(llm: LLM) -> dict[str, int]:
    captured = llm.executor.engine.captured
    return {
        "preemptions": llm.executor.num_preemptions,
        "graph_replays": 0 if captured is None else captured.num_replays,
        "prompt_graph_replays": 0 if captured is None else captured.num_prompt_replays,
    }


def _memory(device: torch.device) -> tuple[int, int]:
    """Return the allocated bytes of the device and of the host, after a garbage collection."""
    gc.collect()
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return held, pages * os.sysconf("SC_PAGE_SIZE")


def memory_checks(
    warm: tuple[int, int], first_third: tuple[int, int], drained: tuple[int, int]
) -> list[Check]:
    """Check the growth of device memory since the warm-up, of host memory since the first third."""
    return [
        Check(name, grown <= most, f"{grown / 2**20:+.1f} MiB, at most {most / 2**20:.0f}")
        for name, grown, most in (
            ("device memory", drained[0] - warm[0], MAX_DEVICE_GROWTH),
            ("host memory", drained[1] - first_third[1], MAX_HOST_GROWTH),
        )
    ]


def leak_checks(llm: LLM) -> list[Check]:
    """Check blocks, slots and requests of an executor without requests."""
    blocks = llm.blocks
    free = f"{blocks.num_free_blocks} of {blocks.num_blocks} free"
    checks = [
        Check("KV blocks", blocks.num_free_blocks == blocks.num_blocks, free),
        Check("requests", not llm.executor.has_work, f"has work: {llm.executor.has_work}"),
    ]
    history = getattr(llm.pieces.manager, "slot_manager", None)
    for name, slots in (("sequence slots", llm.seq_slots.slots), ("history slots", history)):
        if slots is not None:
            held, left = len(slots.slot_mapping), len(set(slots.free_slots))
            whole = held == 0 and left == slots.max_num_requests
            checks.append(Check(name, whole, f"{held} held, {left} free"))
    return checks


def acceptance_check(thirds: Sequence[Third], whole: float) -> Check:
    """Check that the acceptance length of each third is close to that of the whole run."""
    holds = True
    for third in thirds:
        if len(third.lengths) >= LEAST_REQUESTS:
            error = statistics.stdev(third.lengths) / math.sqrt(len(third.lengths))
            most = max(MAX_DRIFT * whole, STANDARD_ERRORS * error)
            holds &= abs(third.stats.acceptance_length - whole) <= most
    found = " / ".join(f"{third.stats.acceptance_length:.3f}" for third in thirds)
    return Check("acceptance length by third", holds, found)

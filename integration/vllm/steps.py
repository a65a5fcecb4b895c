"""Step times with and without the plugin: ``python -m integration.vllm.steps --json FILE``.

Random weights in bfloat16, K = 3, the same synthetic acceptance in all engines. The engines take
turns on one GPU: batches in ascending order, then in descending order, and so on. Each turn gives
a ratio to vLLM's step of the same turn; the median with quartiles is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from integration.shapes import vllm_config, write_config
from integration.vllm.engine_process import (
    ROOT,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    wait_for,
)
from integration.vllm.load import run_batch
from integration.vllm.requests import sampling_params

NUM_DRAFTS = 3
ACCEPTANCE = [0.78, 0.605, 0.467]
SHAPE = vllm_config("8gb")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.6-p0.95": {"temperature": 0.6, "top_p": 0.95},
}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"plugin": None},
    "plugin": {"plugin": {}},
    "draft_vocab": {"plugin": {"draft_vocab": 32768}},
    "off": {"plugin": None, "num_drafts": 0},
}
"""``off``: vLLM without drafts. ``vllm`` is what the others are compared with."""
ISL, OSL = 128, 128
RUNNING, ARRIVING, ARRIVING_ISL = 16, 30, 384
SHORT, LONG = 120.0, 400.0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,64,128")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--no-arrivals", action="store_true", help="leave the first tokens out")
    add_common_options(parser)
    options = parser.parse_args()
    if "vllm" not in options.engines.split(",") or options.turns < 2:
        parser.error("ratios need the engine vllm, and at least 2 turns for quartiles")
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all engines, then let them take turns."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu)
    batches = [int(batch) for batch in options.batches.split(",")]
    names = options.engines.split(",")
    engines = {name: _start(name, batches, folder, on_gpu) for name in names}
    found: dict[str, Any] = {"engines": {}, "step_ms": {}, "ratio": {}, "arrivals": {}}
    try:
        for name, engine in engines.items():
            found["engines"][name] = engine.wait_until_ready()
        wait_for(options.wait)
        rng = random.Random(0)
        vocab = SHAPE["vocab_size"]
        prompts = [[rng.randrange(2, vocab) for _ in range(ISL)] for _ in range(max(batches))]
        for label, sampling in SAMPLING.items():
            times = _steps(engines, prompts, sampling, batches, options.turns)
            found["step_ms"][label] = {
                name: [round(statistics.median(times[name][b]), 3) for b in batches]
                for name in names
            }
            found["ratio"][label] = {
                name: [ratio(times[name][b], times["vllm"][b]) for b in batches]
                for name in names
                if name != "vllm"
            }
        new = [[rng.randrange(2, vocab) for _ in range(ARRIVING_ISL)] for _ in range(ARRIVING)]
        for turn in range(0 if options.no_arrivals else 4):
            for name, engine in engines.items():
                got = engine.call(run_arrivals, LONG, running=prompts[:RUNNING], new=new)
                if turn:  # the first one compiles
                    found["arrivals"].setdefault(name, []).append(got)
    finally:
        for engine in engines.values():
            engine.close()
    return found


def _start(name: str, batches: list[int], folder: Path, on_gpu: bool) -> EngineProcess:
    given = dict(ENGINES[name])
    num_drafts = given.pop("num_drafts", NUM_DRAFTS)
    sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    # vLLM has a full graph for a batch whose rows are among the sizes
    sizes |= {batch * (num_drafts + 1) for batch in batches}
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": ACCEPTANCE}
    settings = engine_settings(
        num_drafts,
        on_gpu,
        given["plugin"],
        model=write_config(folder / "model", SHAPE),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=SHAPE["torch_dtype"],
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        speculative_config=spec,
        compilation_config={"cudagraph_capture_sizes": sorted(sizes)},
    )
    settings.pop("attention_backend", None)
    if on_gpu:
        settings |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
    return EngineProcess(name, settings, folder)


def _steps(
    engines: dict[str, EngineProcess],
    prompts: list[list[int]],
    sampling: dict[str, Any],
    batches: list[int],
    turns: int,
) -> dict[str, dict[int, list[float]]]:
    """Return the median step time of each turn, by engine and batch."""
    times: dict[str, dict[int, list[float]]] = {
        name: {batch: [] for batch in batches} for name in engines
    }
    for turn in range(turns + 1):
        for batch in batches if turn % 2 else batches[::-1]:
            requests = [
                {"prompt": prompt, "params": {"max_tokens": OSL, **sampling}}
                for prompt in prompts[:batch]
            ]
            for name, engine in engines.items():
                got = engine.call(run_batch, LONG, requests=requests, until_first_end=True)
                if turn:  # the first one compiles
                    times[name][batch].append(got["median_ms"])
    return times


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return median, lower and upper quartile of the ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(value, 3) for value in (middle, low, high)]


def run_arrivals(llm: Any, *, running: list[list[int]], new: list[list[int]]) -> dict[str, float]:
    """Return times of prompts that arrive among running requests, in milliseconds.

    One prompt arrives after every third step. ``first_token_steps`` is the median number of steps
    from arrival to first token, ``gap`` the longest time between two steps.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def add(identifier: str, prompt: list[int], length: int) -> None:
        params = sampling_params({"ignore_eos": True, "detokenize": False, "max_tokens": length})
        params.temperature, params.output_kind = 0.0, RequestOutputKind.DELTA
        engine.add_request(identifier, {"prompt_token_ids": prompt}, params)

    for number, prompt in enumerate(running):
        add(f"r{number}", prompt, 350)
    waiting: dict[str, tuple[float, int]] = {}
    first: list[float] = []
    steps: list[int] = []
    gaps: list[float] = []
    last, count, num_added = time.perf_counter(), 0, 0
    while len(first) < len(new):
        outputs = [o for o in engine.step() if o.outputs[0].token_ids]
        now = time.perf_counter()
        if not outputs:
            continue
        count += 1
        if count > 20:  # all running requests generate
            gaps.append(now - last)
            if count % 3 == 0 and num_added < len(new):
                waiting[f"n{num_added}"] = time.perf_counter(), count
                add(f"n{num_added}", new[num_added], 8)
                num_added += 1
        last = now
        for output in outputs:
            begun = waiting.pop(output.request_id.split("-")[0], None)
            if begun is not None:
                first.append(now - begun[0])
                steps.append(count - begun[1])
    engine.abort_request([f"r{number}" for number in range(len(running))])
    while engine.has_unfinished_requests():
        engine.step()
    tenths = statistics.quantiles(first, n=10)
    return {
        "first_token_median": round(1000 * statistics.median(first), 2),
        "first_token_p90": round(1000 * tenths[-1], 2),
        "first_token_steps": statistics.median(steps),
        "gap": round(1000 * max(gaps), 2),
    }


def main() -> int:
    """Measure and print a table; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    found = {
        "batches": options.batches,
        "turns": options.turns,
        "draft_len": NUM_DRAFTS,
        "synthetic_acceptance": ACCEPTANCE,
        "model": SHAPE,
        "commit": commit.stdout.strip(),
        **found,
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for label, times in found["step_ms"].items():
        for name, values in times.items():
            ratios = found["ratio"][label].get(name, [])
            shown = ", ".join("{:.3f} ({:.3f} to {:.3f})".format(*ratio) for ratio in ratios)
            sys.stdout.write(f"{label:12} {name:12} {values} ms  {shown}\n")
    for name, rounds in found["arrivals"].items():
        sys.stdout.write(f"arrivals {name}: {rounds}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

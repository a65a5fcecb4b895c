"""Step times, alone and with the plugin: ``python -m integration.sglang.steps --json FILE``.

Random weights in bfloat16 of the 8gb shape, K = 3, the same simulated acceptance in both engines,
which take turns on one GPU: batches in ascending order, then in descending order, and so on. Each
turn gives a ratio to SGLang's step of the same turn; the median with quartiles is reported. For
greedy requests the plugin's simulation also takes an argmax of all rows, which SGLang's own step
has anyway. ``busy``: other processes took more than a tenth of the CPU time next to the engines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.bench.machine import load_of_others, store
from integration.sglang.engine_process import START_SECONDS, EngineError, EngineProcess, prepare
from integration.sglang.proof import describe, ports
from integration.shapes import write_config
from integration.vllm.engine_process import cores_of_each, wait_for
from integration.vllm.steps import ACCEPTANCE, ISL, NUM_DRAFTS, OSL, SHAPE, load_of, ratio
from integration.vllm.steps import SAMPLING as GREEDY_AND_TOP_P

SAMPLING: dict[str, dict[str, Any]] = {
    **GREEDY_AND_TOP_P,
    "t0.6-p0.95-penalties": {
        **GREEDY_AND_TOP_P["t0.6-p0.95"],
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}
ENGINES: dict[str, str | None] = {"sglang": None, "plugin": "{}"}
"""Options of the plugin; None: off."""
SIMULATION = {
    "SGLANG_SIMULATE_ACC_LEN": str(round(1 + sum(ACCEPTANCE), 3)),
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}
SECONDS = 120.0
BUILD = "import flashinfer.sampling as s; s.get_sampling_module()"
"""Compiles the kernels with which SGLang samples, before it would at its first request."""
TIMED = (
    "milliseconds between two outputs of one request, which alone is streamed, while the whole "
    "batch generates; medians of turns, in which the engines run one after the other"
)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start both engines, then let them take turns."""
    prepare(given.folder)
    options = {
        "model_path": write_config(given.folder.resolve() / "steps_model", SHAPE),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": SHAPE["torch_dtype"],
        "attention_backend": given.attention,
        "sampling_backend": "flashinfer",
        "grammar_backend": "none",
        "mem_fraction_static": 0.7,  # of what is free; both start together, the cache is limited
        "max_running_requests": max(given.batches),
        "max_total_tokens": 2 * max(given.batches) * (ISL + OSL),
        "cuda_graph_bs_decode": sorted(given.batches),
        "disable_prefill_cuda_graph": True,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "info",
        "stream_interval": 1,
        **given.options,
    }
    engines: dict[str, EngineProcess] = {}
    found: dict[str, Any] = {"seconds_to_start": {}, "step_ms": {}, "ratio": {}}
    *cores, rest = cores_of_each(len(ENGINES) + 1)  # idle engines of SGLang take CPU time
    found["cores"] = [len(own) for own in cores]
    loads: list[float] = []
    try:
        for index, (name, plugin) in enumerate(ENGINES.items()):
            more = {**options, **ports(given.port, index)}
            arguments = given.folder, more, NUM_DRAFTS, plugin, SIMULATION, cores[index]
            engines[name] = EngineProcess(name, *arguments)
        if rest:
            os.sched_setaffinity(0, rest)
        if options["sampling_backend"] == "flashinfer":
            build_sampling()
        for name, engine in engines.items():
            found["seconds_to_start"][name] = engine.result(START_SECONDS)
            sys.stderr.write(f"{name} is ready after {found['seconds_to_start'][name]} s\n")
        expect_plugin(engines)
        wait_for(given.wait)
        for label, sampling in SAMPLING.items():
            times = take_turns(engines, sampling, given.batches, given.turns, loads)
            found["step_ms"][label] = {
                name: [round(statistics.median(times[name][b]), 3) for b in given.batches]
                for name in engines
            }
            found["ratio"][label] = [
                ratio(times["plugin"][b], times["sglang"][b]) for b in given.batches
            ]
            found |= load_of(loads)
            sys.stderr.write(f"{label}: {found['step_ms'][label]} ms, {found['ratio'][label]}\n")
            store(given.json, {**described(given), **found})  # what follows may be cut off
    finally:
        for engine in engines.values():
            engine.stop()
    return found


def build_sampling() -> None:
    """Compile FlashInfer's sampling, which takes a minute or more with an empty cache.

    Raises:
        EngineError: it cannot be compiled here.
    """
    built = subprocess.run(
        [sys.executable, "-c", BUILD], capture_output=True, text=True, check=False
    )
    if built.returncode:
        raise EngineError(
            "FlashInfer's sampling, with which SGLang applies top_p, cannot be compiled:\n"
            f"{built.stdout[-2000:]}{built.stderr[-4000:]}"
        )


def expect_plugin(engines: dict[str, EngineProcess]) -> None:
    """Check that one engine has the plugin and the other has not."""
    for name, engine in engines.items():
        lines = engine.log_lines("mtp_plugin on: verification")
        if bool(lines) != (ENGINES[name] is not None):
            raise EngineError(f"{name}: lines 'mtp_plugin on' of its log: {lines}")


def take_turns(
    engines: dict[str, Any],
    sampling: dict[str, Any],
    batches: list[int],
    turns: int,
    loads: list[float],
) -> dict[str, dict[int, list[float]]]:
    """Return the median step time of each turn in milliseconds, by engine and batch; ``loads`` gets
    the load of other processes before each turn."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, SHAPE["vocab_size"]) for _ in range(ISL)] for _ in range(512)]
    times: dict[str, dict[int, list[float]]] = {
        name: {batch: [] for batch in batches} for name in engines
    }
    for turn in range(turns + 1):
        loads.append(load_of_others())
        for batch in batches if turn % 2 else batches[::-1]:
            requests = [
                {
                    "input_ids": prompt,
                    "sampling_params": {"max_new_tokens": OSL, "ignore_eos": True, **sampling},
                }
                for prompt in prompts[:batch]
            ]
            for name in engines if turn % 2 else reversed(engines):
                got = engines[name].call("steps", SECONDS, requests=requests)
                if turn:  # the first one warms up
                    times[name][batch].append(got["median_ms"])
    return times


def described(given: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured and how, and the machine."""
    return {
        "kind": "comparison",
        "source": "python -m integration.sglang.steps, one run on one GPU",
        "timed": TIMED,
        **describe(given, "steps"),
        "batches": given.batches,
        "turns": given.turns,
        "draft_len": NUM_DRAFTS,
        "simulation": SIMULATION,
        "sampling": SAMPLING,
        "model": SHAPE,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file of the result")
    parser.add_argument("--folder", type=Path, default=Path("sglang_steps"), help="of logs")
    parser.add_argument(
        "--batches", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 64]
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--attention", default="triton", help="attention backend")
    parser.add_argument("--port", type=int, default=22000, help="first of four ports")
    parser.add_argument(
        "--wait",
        type=Path,
        help="create FILE.ready when the engines are ready, then wait until FILE exists",
        metavar="FILE",
    )
    parser.add_argument("--commit", help="of the result, where git does not know it")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of engines")
    given = parser.parse_args(arguments)
    given.dtype, given.margin = SHAPE["torch_dtype"], None
    if given.turns < 2 or max(given.batches) > 512:
        parser.error("expected at least 2 turns, for quartiles, and batches of at most 512")
    try:
        found = measure(given)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for label, times in found["step_ms"].items():
        for name, values in times.items():
            sys.stdout.write(f"{label:12} {name:8} {values} ms\n")
        sys.stdout.write(f"{label:12} ratio: {found['ratio'][label]}\n")
    sys.stdout.write(f"load of others: {found['load']}{' BUSY' * found['busy']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

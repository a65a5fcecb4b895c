"""Step times with and without the plugin: ``python -m integration.vllm.steps --json FILE``.

Random weights in bfloat16, K = 3, the same synthetic acceptance in all engines. The engines of a
group start together, each on CPU cores of its own, and take turns on one GPU: batches and engines
in ascending order, then in descending order. Each turn gives a ratio to vLLM's step of the same
turn; the median with quartiles is reported. After the timed turns, steps are traced: the time of
their kernels, and what a step takes outside of them. ``busy``: other processes took more than
``MOST_LOAD`` of the CPU time. ``matched``: all ids are valid and acceptance lengths are the
configured ones. Exit code 1: an engine failed, or a group is not matched.

With ``CUDA_VISIBLE_DEVICES`` and ``taskset`` two processes measure different groups on two GPUs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, load_of_others, store
from integration.shapes import ACCEPTANCE as RATES
from integration.shapes import vllm_config, write_config
from integration.vllm.draft_lengths import SMALL, STANDARD_ERRORS, expected_length
from integration.vllm.engine_process import (
    EngineError,
    EngineProcess,
    add_common_options,
    cores_of_each,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    wait_for,
)
from integration.vllm.kernel_times import profiler_config, trace_steps
from integration.vllm.load import run_arrivals, run_batch

NUM_DRAFTS = 3
ACCEPTANCE = RATES[:NUM_DRAFTS]
SHAPE = vllm_config("8gb")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.6-p0.95": {"temperature": 0.6, "top_p": 0.95},
}
FP8 = {"draft_lm_head_quantization": "fp8"}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"plugin": None},
    "plugin": {"plugin": {}},
    "draft_vocab": {"plugin": {"draft_vocab": 32768}},
    "vllm_fp8": {"plugin": None, "speculative": FP8},
    "plugin_fp8": {"plugin": {}, "speculative": FP8},
    "vllm_probabilistic": {"plugin": None, "speculative": {"draft_sample_method": "probabilistic"}},
    "off": {"plugin": None, "num_drafts": 0},
}
"""``off``: vLLM without drafts. ``vllm`` is what the others are compared with."""
GROUPS = {
    "main": ("vllm", "plugin", "draft_vocab", "off"),
    "fp8": ("vllm", "vllm_fp8", "plugin_fp8"),
    "probabilistic": ("vllm", "vllm_probabilistic", "plugin"),
}
ISL, OSL = 128, 128
RUNNING, ARRIVING, ARRIVING_ISL = 16, 30, 384
NUM_TRACED = 20
MOST_LOAD = 0.1
"""Share of CPU time that other processes take, mean of the turns."""
LONG = 400.0
Cells = dict[str, dict[int, dict[str, Any]]]
"""By engine and batch: lists of ``step_ms`` and ``acceptance_length``, by turn, and ``matched``."""


def arguments() -> argparse.Namespace:
    """Read the command line; without a GPU everything is small."""
    on_gpu = has_gpu()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,64,128" if on_gpu else "1,2")
    parser.add_argument("--turns", type=int, default=10 if on_gpu else 2)
    parser.add_argument("--group", action="append", help=f"some of {', '.join(GROUPS)} (all)")
    parser.add_argument("--no-arrivals", action="store_true", help="leave the first tokens out")
    parser.add_argument("--kernels", type=Path, help="write the time of each kernel to this file")
    add_common_options(parser)
    options = parser.parse_args()
    options.group = ",".join(options.group or GROUPS).split(",")
    options.batches = [int(batch) for batch in options.batches.split(",")]
    if set(options.group) - set(GROUPS) or options.turns < 2:
        parser.error(f"--group: expected some of {', '.join(GROUPS)}; --turns: at least 2")
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one group after another; results are stored as they come."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu)
    model = SHAPE | ({} if on_gpu else SMALL | {"torch_dtype": "float32"})
    found: dict[str, Any] = {
        "kind": "comparison",
        "name": "vllm-steps",
        "complete": False,
        "machine": describe_machine(torch.device("cuda" if on_gpu else "cpu")),
        "timed": "milliseconds between two outputs of vLLM's engine core in steps that only "
        "generate; medians of the turns",
        "matched_by": "valid ids, and the configured acceptance length within "
        f"{STANDARD_ERRORS:.0f} standard errors; acceptance is synthetic, so that outputs differ",
        "model": {
            "weights": "random",
            "dtype": model["torch_dtype"],
            "family": model["model_type"],
            "num_mtp_layers": 1,
            **model,
        },
        "draft_len": NUM_DRAFTS,
        "synthetic_acceptance": ACCEPTANCE,
        "batches": options.batches,
        "turns": options.turns,
        "groups": {},
    }
    names: dict[str, Any] = {}
    for group in options.group:
        result = found["groups"][group] = {}
        try:
            with ExitStack() as stack:
                _measure_group(options, group, model, folder, found, names, stack)
        except EngineError as error:
            sys.stdout.write(f"{error}\n")
            result["error"] = str(error).partition("\n")[0]
            result.setdefault("matched", False)
        found["complete"] = group == options.group[-1]
        store(options.json, found)
        store(options.kernels, names)
    return found


def _measure_group(
    options: argparse.Namespace,
    group: str,
    model: dict[str, Any],
    folder: Path,
    found: dict[str, Any],
    names: dict[str, Any],
    stack: ExitStack,
) -> None:
    """Start the engines of a group, then let them take turns."""
    result, batches = found["groups"][group], options.batches
    engines: dict[str, EngineProcess] = {}
    cores = cores_of_each(len(GROUPS[group]))
    for name, own in zip(GROUPS[group], cores, strict=True):
        engines[name] = _start(name, batches, model, folder, own)
        stack.callback(engines[name].close)
    result["cores"] = [len(own) for own in cores]
    result["engines"] = {name: each.wait_until_ready() for name, each in engines.items()}
    wait_for(options.wait)
    rng, vocab = random.Random(0), model["vocab_size"]
    count = max(*batches, RUNNING)
    prompts = [[rng.randrange(2, vocab) for _ in range(ISL)] for _ in range(count)]
    loads: list[float] = []
    for label, sampling in SAMPLING.items():
        cells = _steps(engines, _requests(prompts, sampling), batches, options.turns, vocab, loads)
        _add(result, label, cells)
        result |= load_of(loads)
        store(options.json, found)
    new = [[rng.randrange(2, vocab) for _ in range(ARRIVING_ISL)] for _ in range(ARRIVING)]
    result["arrivals"] = {} if options.no_arrivals else _arrivals(engines, prompts[:RUNNING], new)
    result["kernels"] = {}
    for label, sampling in SAMPLING.items():
        for name, engine in engines.items():
            traces = result["kernels"].setdefault(label, {})[name] = []
            for i, batch in enumerate(batches):
                trace = engine.call(
                    trace_steps,
                    LONG,
                    requests=_requests(prompts[:batch], sampling),
                    num_steps=NUM_TRACED if has_gpu() else 1,
                    folder=_trace_folder(folder, name),
                )
                if trace is not None:
                    names[f"{group} {label} {name} batch {batch}"] = trace.pop("names")
                    step_ms = result["step_ms"][label][name][i]
                    trace["outside_us"] = round(1000 * (step_ms - trace["kernel_ms"]), 1)
                traces.append(trace)
        store(options.json, found)


def _requests(prompts: list[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "params": {"max_tokens": OSL, **sampling}} for prompt in prompts]


def _trace_folder(folder: Path, name: str) -> Path:
    return folder / f"traces-{name}"


def _start(
    name: str, batches: list[int], model: dict[str, Any], folder: Path, cores: list[int]
) -> EngineProcess:
    given, on_gpu = ENGINES[name], has_gpu()
    num_drafts = given.get("num_drafts", NUM_DRAFTS)
    plugin = given["plugin"]
    if plugin and not on_gpu:
        plugin = {"draft_vocab": 128}
    sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    # vLLM has a full graph for a batch whose rows are among the sizes
    sizes |= {batch * (num_drafts + 1) for batch in batches}
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": ACCEPTANCE}
    settings = engine_settings(
        num_drafts,
        on_gpu,
        plugin,
        model=write_config(folder / "model", model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=model["torch_dtype"],
        max_num_seqs=max(*batches, RUNNING + 2),
        max_num_batched_tokens=8192,
        speculative_config=spec | given.get("speculative", {}),
        compilation_config={"cudagraph_capture_sizes": sorted(sizes)},
        profiler_config=profiler_config(_trace_folder(folder, name)),
    )
    settings.pop("attention_backend", None)
    if on_gpu:
        settings |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
    return EngineProcess(name, settings, folder, cores=cores)


def _steps(
    engines: dict[str, EngineProcess],
    requests: list[dict[str, Any]],
    batches: list[int],
    turns: int,
    vocab: int,
    loads: list[float],
) -> Cells:
    """Time the batches in turns; ``loads`` gets the load of other processes before each turn."""
    cells: Cells = {
        name: {n: {"step_ms": [], "acceptance_length": [], "matched": True} for n in batches}
        for name in engines
    }
    for turn in range(turns + 1):
        loads.append(load_of_others())
        for batch in batches if turn % 2 else batches[::-1]:
            for name in list(engines) if turn // 2 % 2 else list(engines)[::-1]:
                got = engines[name].call(
                    run_batch, LONG, requests=requests[:batch], until_first_end=True
                )
                if got["median_ms"] is None:
                    raise EngineError(f"engine {name}: never did all {batch} requests generate")
                cell = cells[name][batch]
                cell["matched"] &= all(0 <= x < vocab for ids in got["tokens"] for x in ids)
                if turn:  # the first one compiles
                    cell["step_ms"].append(got["median_ms"])
                    cell["acceptance_length"].append(got["acceptance_length"] or 1.0)
                    cell["tokens"] = sum(map(len, got["tokens"]))
    return cells


def _add(result: dict[str, Any], label: str, cells: Cells) -> None:
    """Add step times, ratios to vLLM and to no drafts, and acceptance lengths of one sampling."""
    rows: dict[str, dict[str, Any]] = {"step_ms": {}, "acceptance_length": {}}
    for name, of_batch in cells.items():
        by_turn = [cell["step_ms"] for cell in of_batch.values()]
        lengths = [cell["acceptance_length"] for cell in of_batch.values()]
        rows["step_ms"][name] = [round(statistics.median(each), 3) for each in by_turn]
        rows["acceptance_length"][name] = [round(statistics.fmean(each), 3) for each in lengths]
        for kind, reference in (("ratio", "vllm"), ("ratio_to_off", "off")):
            if name != reference and reference in cells:
                theirs = [cell["step_ms"] for cell in cells[reference].values()]
                ratios = [ratio(*pair) for pair in zip(by_turn, theirs, strict=True)]
                rows.setdefault(kind, {})[name] = ratios
        for cell, of_turn in zip(of_batch.values(), lengths, strict=True):
            # turns may have the same random numbers
            num_tokens = cell["tokens"] * len(set(of_turn))
            length, error = expected_length(ENGINES[name].get("num_drafts", NUM_DRAFTS), num_tokens)
            cell["matched"] &= abs(statistics.fmean(of_turn) - length) <= STANDARD_ERRORS * error
        is_matched = all(cell["matched"] for cell in of_batch.values())
        result["matched"] = result.get("matched", True) and is_matched
    for kind, row in rows.items():
        result.setdefault(kind, {})[label] = row


def load_of(loads: list[float]) -> dict[str, Any]:
    """Return the load of other processes over the turns, and whether it is too high."""
    mean = statistics.fmean(loads)
    load = {"mean": round(mean, 3), "most": round(max(loads), 3), "limit": MOST_LOAD}
    return {"load": load, "busy": mean > MOST_LOAD}


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return median, lower and upper quartile of the ratios."""
    low, middle, high = _quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return [middle, low, high]


def _quartiles(values: list[float]) -> list[float]:
    return [round(each, 3) for each in statistics.quantiles(values, n=4, method="inclusive")]


def _arrivals(
    engines: dict[str, EngineProcess], running: list[list[int]], new: list[list[int]]
) -> dict[str, Any]:
    """Return the first tokens of arriving prompts by engine: of each turn, and quartiles of all."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    first: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(4):
        for name in list(engines) if turn % 2 else list(engines)[::-1]:
            got = engines[name].call(run_arrivals, LONG, running=running, new=new)
            if turn:  # the first one compiles
                first[name] += got.pop("first_token_ms")
                turns[name].append(got)
    return {
        name: {"first_token_ms": _quartiles(first[name]), "turns": turns[name]} for name in engines
    }


def table(found: dict[str, Any]) -> str:
    """Return one line per engine, sampling and batch."""
    lines = []
    for group, result in found["groups"].items():
        state = " BUSY" * result.get("busy", False) + f" {result.get('error', '')}"
        load, matched = result.get("load"), result["matched"]
        lines.append(f"{group}: matched: {matched}, load of others: {load}{state}")
        for label, engines in result.get("step_ms", {}).items():
            for name, times in engines.items():
                lines += [
                    f"{label:10} {name:18} batch {batch:3} {_line(result, label, name, i)}"
                    for i, batch in enumerate(found["batches"][: len(times)])
                ]
        for name, each in result.get("arrivals", {}).items():
            lines.append(f"first tokens {name}: quartiles {each['first_token_ms']} ms")
    return "\n".join([*lines, ""])


def _line(result: dict[str, Any], label: str, name: str, i: int) -> str:
    text = f"{result['step_ms'][label][name][i]:8.3f} ms"
    for kind, what in (("ratio", "of vllm"), ("ratio_to_off", "of off")):
        given = result.get(kind, {}).get(label, {}).get(name)
        if given:
            text += " {:.3f} ({:.3f} to {:.3f}) {}".format(*given[i], what)
    trace = dict(enumerate(result.get("kernels", {}).get(label, {}).get(name, []))).get(i)
    if trace is None:
        return f"{text} no kernels traced"
    return (
        f"{text} kernels {trace['kernel_ms']:.3f} ms, {trace['launches']:.0f} launches, outside "
        f"{trace['outside_us']:.0f} us, idle {trace['idle_us']:.0f}"
    )


def main() -> int:
    """Measure and print a table; returns the exit code."""
    found = measured(measure, arguments())
    if found is None:
        return 1
    sys.stdout.write(table(found))
    groups = found["groups"].values()
    return 0 if all(group["matched"] and "error" not in group for group in groups) else 1


if __name__ == "__main__":
    sys.exit(main())

"""``"draft_len": "auto"`` under a load that rises and falls: ``python -m
integration.vllm.auto_draft_len --json FILE``.

One engine with random weights and synthetic acceptance. In every phase a number of requests
generate texts of equal length: in each of ``ROUNDS`` rounds with each number of drafts fixed, in
another order each time, then with the number chosen by the plugin, whose measurements last over all
phases. A second engine, without MTP layers, is "off". Tokens are counted by the configured
acceptance, which has no noise, and times are those between the outputs of two steps; all phases of
one engine share its CUDA graphs.

A third engine, of the trained tiny model, generates with 0 drafts and with the plugin's choice.
``matched``: these outputs are equal, or differ by a rounding tie, and in every phase the tokens are
as many as the acceptance rates give. Exit code 1: that fails, or on a GPU a phase has fewer tokens
per second than ``GOAL`` of the best fixed number.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, store
from integration.shapes import ACCEPTANCE, vllm_config, write_config
from integration.vllm.draft_lengths import (
    SECONDS,
    SMALL,
    STANDARD_ERRORS,
    START_SECONDS,
    compare_outputs,
    expected_length,
    is_equal,
    start_outputs,
)
from integration.vllm.engine_process import (
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    wait_for,
)
from integration.vllm.load import Request
from integration.vllm.requests import sampling_params
from integration.vllm.routing import PLUGIN, choose
from mtp_plugin.hosts.vllm.scheduled_draft_len import lengths_of
from mtp_plugin.hosts.vllm.wrapping import LENGTHS

PHASES = (1, 8, 32, 128, 64, 16, 4, 1)
GOAL = 0.98
ROUNDS = 3
ROUTING = "third"
"""Of the shape sparse, see `integration.vllm.routing`."""
Step = tuple[int, float, int]
"""Verified drafts, seconds since the output of the step before, and output tokens."""


def arguments() -> argparse.Namespace:
    """Read the command line; without a GPU everything is small."""
    small = not has_gpu()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("sparse", "8gb"), default="8gb")
    parser.add_argument("--num-drafts", type=int, default=3 if small else 7)
    parser.add_argument("--phases", default="1,4,1" if small else ",".join(map(str, PHASES)))
    parser.add_argument("--steps", type=int, default=20 if small else 80, help="of a text")
    parser.add_argument("--texts", type=int, default=2 if small else 4, help="of auto in a round")
    parser.add_argument("--input", type=int, default=128, help="token ids of a prompt")
    parser.add_argument("--no-off", action="store_true", help="leave out the engine without MTP")
    add_common_options(parser)
    return parser.parse_args()


class Recorder:
    """Notes the steps of the scheduler in which all requests generate.

    Args:
        lengths: the plugin's choice, or a fixed number of drafts.
        size: requests that generate.
    """

    def __init__(self, lengths: Any, size: int) -> None:
        self.lengths, self.size = lengths, size
        self.steps: list[Step] = []
        self._last: float | None = None

    def choose(self, scheduled: Any) -> int:
        """See `DraftLengths.choose`."""
        return self.lengths if isinstance(self.lengths, int) else self.lengths.choose(scheduled)

    def record(self, scheduled: Any, output: Any) -> None:
        """See `DraftLengths.record`."""
        if not isinstance(self.lengths, int):
            self.lengths.record(scheduled, output)
        now, count = time.perf_counter(), len(scheduled.num_scheduled_tokens)
        if count == 0:
            return
        drafts = scheduled.scheduled_spec_decode_tokens
        each = len(next(iter(drafts.values()))) if drafts else 0
        if count != self.size or scheduled.total_num_scheduled_tokens != count * (1 + each):
            self._last = None
            return
        if self._last is not None:
            num_tokens = sum(map(len, output.sampled_token_ids))
            self.steps.append((each, now - self._last, num_tokens))
        self._last = now


def run_phase(
    llm: Any, *, requests: list[Request], length: int | None, num_steps: int
) -> list[Step]:
    """Generate for some steps, in the process of the engine.

    Args:
        length: fixed number of drafts; None: the plugin's choice.

    Returns:
        ``Recorder.steps``.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    chosen = vars(scheduler).get(LENGTHS) or lengths_of(scheduler.vllm_config)
    recorder = Recorder(chosen if length is None else length, len(requests))
    setattr(scheduler, LENGTHS, recorder)
    names = [str(number) for number in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        params = sampling_params({"ignore_eos": True, "detokenize": False, **request["params"]})
        engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
    while len(recorder.steps) < num_steps and engine.has_unfinished_requests():
        engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    setattr(scheduler, LENGTHS, chosen)
    return recorder.steps


def tokens_per_second(steps: list[Step], size: int) -> float:
    """Return output tokens per second by the configured acceptance."""
    tokens = sum(expected_length(length)[0] for length, *_ in steps)
    return size * tokens / sum(seconds for _, seconds, _ in steps)


def is_as_configured(steps: list[Step], size: int) -> bool:
    """Whether the output tokens are as many as the configured acceptance gives."""
    expected, variance = 0.0, 0.0
    for length, *_ in steps:
        tokens, error = expected_length(length)
        expected += size * tokens
        variance += size * error**2 / tokens
    return abs(sum(num for *_, num in steps) - expected) <= STANDARD_ERRORS * math.sqrt(variance)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all phases, which are stored as they come; returns the document."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu, PLUGIN)
    sizes = [int(size) for size in options.phases.split(",")]
    shape = vllm_config(options.shape) | ({} if on_gpu else SMALL)
    longest = options.input + _most_steps(options) * (1 + options.num_drafts)
    engines: dict[str, EngineProcess] = {}
    found: dict[str, Any] = {
        "kind": "auto-draft-len",
        "name": f"vllm-auto-draft-len-{options.shape}",
        "complete": False,
        "matched": False,
        "reached": False,
        "machine": describe_machine(torch.device("cuda" if on_gpu else "cpu")),
        "shape": options.shape,
        "routing": ROUTING if options.shape == "sparse" else "the model's own router",
        "model": {"weights": "dummy", **shape},
        "num_drafts": options.num_drafts,
        "acceptance": ACCEPTANCE[: options.num_drafts],
        "input": options.input,
        "goal": GOAL,
        "outputs": {},
        "engines": {},
        "phases": [],
    }
    try:
        for name in ("auto", "off")[: 1 if options.no_off else 2]:
            engines[name] = _start(name, options, shape, sizes, longest, folder)
        engines["outputs"] = start_outputs(folder, on_gpu, {"draft_len": "auto"})
        found["outputs"] = compare_outputs(engines["outputs"], on_gpu, (0, None))
        engines.pop("outputs").close()
        for name, engine in engines.items():
            found["engines"][name] = engine.wait_until_ready(START_SECONDS)
        wait_for(options.wait)
        rng = random.Random(0)
        prompts = [
            [rng.randrange(2, shape["vocab_size"]) for _ in range(options.input)]
            for _ in range(max(sizes))
        ]
        lengths = range(options.num_drafts + 1)
        for size in sizes:
            params = {"temperature": 0.0, "max_tokens": longest - options.input - 1}
            requests = [{"prompt": prompt, "params": params} for prompt in prompts[:size]]
            fixed: dict[int, list[Step]] = {length: [] for length in lengths}
            off: list[Step] = []
            auto: list[Step] = []
            run = partial(_run, engines, requests, num_steps=options.steps)
            for turn in range(ROUNDS):
                for length in lengths[:: -1 if turn % 2 else 1]:
                    fixed[length] += run("auto", length)
                if not options.no_off:
                    off += run("off", 0)
                for _ in range(options.texts):
                    auto += run("auto", None)
            found["phases"].append(_row(size, fixed, auto, off))
            found["matched"] = is_equal(found["outputs"]) and all(
                row["matched"] for row in found["phases"]
            )
            found["reached"] = all(row["auto_of_best"] >= GOAL for row in found["phases"])
            store(options.json, found)
            sys.stdout.write(f"{found['phases'][-1]}\n")
            sys.stdout.flush()
    finally:
        for engine in engines.values():
            engine.close()
    found["complete"] = True
    store(options.json, found)
    return found


def _run(
    engines: dict[str, EngineProcess],
    requests: list[Request],
    name: str,
    length: int | None,
    *,
    num_steps: int,
) -> list[Step]:
    call = engines[name].call
    return call(run_phase, SECONDS, requests=requests, length=length, num_steps=num_steps)


def _most_steps(options: argparse.Namespace) -> int:
    return int(options.steps) + 50


def _start(
    name: str,
    options: argparse.Namespace,
    shape: dict[str, Any],
    phases: list[int],
    longest: int,
    folder: Path,
) -> EngineProcess:
    on_gpu, most = has_gpu(), max(phases)
    num_drafts = options.num_drafts if name == "auto" else 0
    spec = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": ACCEPTANCE[:num_drafts],
    }
    settings = engine_settings(
        num_drafts,
        on_gpu,
        {"draft_len": "auto"} if num_drafts else {},
        model=write_config(folder / "model", shape),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=shape.get("torch_dtype", "bfloat16") if on_gpu else "float32",
        max_model_len=longest,
        max_num_seqs=max(most, options.num_drafts + 1),
        max_num_batched_tokens=8192,
        speculative_config=spec,
    )
    settings.pop("attention_backend", None)
    if on_gpu:
        # 2 bytes of a key and of a value for each layer and head, with room for lucky requests
        of_token = 4 * (shape["num_hidden_layers"] + 1) * shape["num_key_value_heads"]
        of_step = 1 + sum(ACCEPTANCE[:num_drafts])
        tokens = most * (options.input + 1.15 * _most_steps(options) * of_step)
        cache = int(tokens * of_token * shape["head_dim"]) + (1 << 30)
        settings |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": cache}
        graphs = {n * each for n in phases for each in range(1, num_drafts + 2)}
        settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(graphs)}
    before = partial(choose, ROUTING if options.shape == "sparse" else None)
    return EngineProcess(name, settings, folder, in_process=True, before=before)


def _row(
    size: int,
    fixed: dict[int, list[Step]],
    auto: list[Step],
    off: list[Step],
) -> dict[str, Any]:
    of_length = {length: tokens_per_second(steps, size) for length, steps in fixed.items()}
    best = max(of_length, key=of_length.__getitem__)
    found = tokens_per_second(auto, size)
    return {
        "requests": size,
        "tokens_per_second": {
            **{f"K = {length}": round(value, 1) for length, value in of_length.items()},
            "auto": round(found, 1),
            **({"off": round(tokens_per_second(off, size), 1)} if off else {}),
        },
        "best": best,
        "auto_of_best": round(found / of_length[best], 3),
        "auto_of_off": round(found / tokens_per_second(off, size), 3) if off else None,
        "steps": len(auto),
        "steps_by_length": dict(sorted(Counter(length for length, *_ in auto).items())),
        "matched": is_as_configured(auto, size),
    }


def main() -> int:
    """Measure and print a table; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    names = list(found["phases"][0]["tokens_per_second"])
    heads = " ".join(f"{name:>9}" for name in names)
    sys.stdout.write(f"tokens/s  {heads}  of best  of off  steps by K\n")
    for row in found["phases"]:
        values = " ".join(f"{value:9.1f}" for value in row["tokens_per_second"].values())
        off = row["auto_of_off"] or float("nan")
        sys.stdout.write(
            f"{row['requests']:8}  {values}  {row['auto_of_best']:7.3f} {off:7.3f}  "
            f"{row['steps_by_length']}\n"
        )
    outputs = found["outputs"].get("auto", "FAILED")
    sys.stdout.write(f"outputs of the tiny model, next to 0 drafts: {outputs}\n")
    reached = "yes" if found["reached"] else "no"
    sys.stdout.write(f"at least {GOAL} of the best K in each phase: {reached}\n")
    sys.stdout.write("matched\n" if found["matched"] else "FAILED: not matched\n")
    return 0 if found["matched"] and (found["reached"] or not has_gpu()) else 1


if __name__ == "__main__":
    sys.exit(main())

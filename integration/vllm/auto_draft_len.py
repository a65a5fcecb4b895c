"""``"draft_len": "auto"`` under a load that rises and falls: ``python -m
integration.vllm.auto_draft_len --json FILE``.

One engine with random weights and synthetic acceptance. In every phase a number of requests
generate texts of equal length: in each of ``ROUNDS`` rounds with each number of drafts fixed, in
another order each time, then with the number chosen by the plugin, whose measurements last over all
phases. The best fixed number is chosen by the even rounds, and compared in the odd ones. A second
engine, without MTP layers, is "off". Tokens are counted by the configured acceptance, which has no
noise, and times are those between the outputs of two steps, in the process of the engine core.

Before that, steps of 0 drafts take turns with those of "off": what they take more, with the draft
head in the graph of the draft pass ("before") and without it ("after", see `capture_undrafted`).

A third engine, of the trained tiny model, generates with 0 drafts and with the plugin's choice.
``matched``: these outputs are equal, or differ by a rounding tie, and in every phase the tokens are
as many as the acceptance rates give. Exit code 1: that fails, or on a GPU a phase has fewer tokens
per second than ``GOAL`` of the best fixed number, or a step of 0 drafts takes ``MOST_EXTRA`` more.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, load_of_others, store
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
from mtp_plugin.hosts.vllm.wrapping import LENGTHS, UNDRAFTED

PHASES = (1, 8, 32, 128, 64, 16, 4, 1)
GOAL = 0.97
MOST_EXTRA = 200.0
"""Microseconds at each of ``--without-drafts``."""
ROUNDS = 6
ROUTING = "third"
"""Of the shape sparse, see `integration.vllm.routing`."""
UTILITIES = {"auto_draft_len": "integration.vllm.auto_draft_len:register"}
Step = tuple[int, float, int]
"""Verified drafts, seconds since the output of the step before, and output tokens."""


def arguments() -> argparse.Namespace:
    """Read the command line; without a GPU everything is small."""
    small = not has_gpu()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("sparse", "8gb"), default="8gb")
    parser.add_argument("--num-drafts", type=int, default=3 if small else 7)
    parser.add_argument("--phases", default="1,4,1" if small else ",".join(map(str, PHASES)))
    parser.add_argument("--rounds", type=int, default=2 if small else ROUNDS)
    parser.add_argument("--steps", type=int, default=20 if small else 80, help="of a text")
    parser.add_argument("--texts", type=int, default=2, help="of auto in a round")
    parser.add_argument(
        "--without-drafts", default="1" if small else "1,8", help="numbers of requests"
    )
    parser.add_argument("--no-off", action="store_true", help="leave out the engine without MTP")
    parser.add_argument("--turns", type=int, default=2 if small else 10, help="without drafts")
    parser.add_argument("--input", type=int, default=128, help="token ids of a prompt")
    parser.add_argument("--attention-backend", help="of vLLM, as TRITON_ATTN (vLLM's choice)")
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS)
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


def register() -> None:
    """Add what the calls below need to vLLM: a plugin of vLLM, in all of its processes."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    EngineCore.start_phase, EngineCore.end_phase = start_phase, end_phase
    WorkerBase.replay_undrafted = replay_undrafted


def start_phase(core: Any, size: int, length: int | None) -> None:
    """Record the steps of an engine core; see `run_phase`."""
    scheduler = core.scheduler
    if not hasattr(core, "chosen_lengths"):
        core.chosen_lengths = lengths_of(scheduler.vllm_config)
    lengths = core.chosen_lengths if length is None else length
    setattr(scheduler, LENGTHS, Recorder(lengths, size))


def end_phase(core: Any) -> list[Step]:
    """Return ``Recorder.steps``."""
    steps: list[Step] = getattr(core.scheduler, LENGTHS).steps
    return steps


def replay_undrafted(worker: Any, do_replay: bool) -> bool:
    """Choose whether steps of 0 drafts leave out the draft head; returns whether they can."""
    manager = worker.model_runner.speculator.prefill_cudagraph_manager
    graphs = vars(manager).setdefault("undrafted", getattr(manager, UNDRAFTED, None))
    setattr(manager, UNDRAFTED, graphs if do_replay else None)
    return graphs is not None


def choose_graphs(llm: Any, *, do_replay: bool) -> bool:
    """Call `replay_undrafted`."""
    found: bool = llm.collective_rpc("replay_undrafted", args=(do_replay,))[0]
    return found


def run_phase(
    llm: Any, *, requests: list[Request], length: int | None, num_steps: int
) -> list[Step]:
    """Generate for some steps.

    Args:
        length: fixed number of drafts; None: the plugin's choice.

    Returns:
        ``Recorder.steps``.
    """
    from vllm.sampling_params import RequestOutputKind

    engine, core = llm.llm_engine, llm.llm_engine.engine_core
    core.call_utility("start_phase", len(requests), length)
    names = [str(number) for number in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        params = sampling_params({"ignore_eos": True, "detokenize": False, **request["params"]})
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
    count = 0
    while count <= num_steps and engine.has_unfinished_requests():
        count += len(engine.step()) == len(requests)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return [tuple(step) for step in core.call_utility("end_phase")]


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
    prepare(folder, on_gpu, {**PLUGIN, **UTILITIES})
    phases = _sizes(options.phases)
    alone = [] if options.no_off else _sizes(options.without_drafts)
    sizes = [*alone, *phases]
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
        **{name: getattr(options, name) for name in ("input", "rounds", "steps", "texts", "turns")},
        "attention_backend": options.attention_backend,
        "goal": GOAL,
        "outputs": {},
        "engines": {},
        "without_drafts": [],
        "phases": [],
    }
    try:
        for name in ("auto", "off")[: 1 if options.no_off else 2]:
            engines[name] = _start(name, options, shape, sizes, longest, folder)
        engines["outputs"] = start_outputs(folder, on_gpu, {"draft_len": "auto"})
        found["outputs"] = compare_outputs(engines["outputs"], on_gpu, (0, None))
        engines.pop("outputs").close()
        for name, engine in engines.items():
            found["engines"][name] = engine.wait_until_ready(options.start_seconds)
        wait_for(options.wait)
        rng = random.Random(0)
        prompts = [
            [rng.randrange(2, shape["vocab_size"]) for _ in range(options.input)]
            for _ in range(max(sizes))
        ]
        params = {"temperature": 0.0, "max_tokens": longest - options.input - 1}
        requests = [{"prompt": prompt, "params": params} for prompt in prompts]
        run = partial(_run, engines, requests, num_steps=options.steps)
        for size in alone:
            found["without_drafts"].append(_without_drafts(engines, run, size, options.turns))
            _store(options, found, found["without_drafts"][-1])
        for size in phases:
            found["phases"].append(_phase(run, size, options))
            _store(options, found, found["phases"][-1])
    finally:
        for engine in engines.values():
            engine.close()
    found["complete"] = True
    store(options.json, found)
    return found


def _sizes(given: str) -> list[int]:
    return [int(size) for size in given.split(",") if size]


def _store(options: argparse.Namespace, found: dict[str, Any], row: dict[str, Any]) -> None:
    """Store the document with its newest row, which is printed."""
    row["load"] = round(load_of_others(), 3)
    phases = found["phases"]
    found["matched"] = is_equal(found["outputs"]) and all(row["matched"] for row in phases)
    found["reached"] = all(row["auto_of_best"] >= GOAL for row in phases) and all(
        row["after"][0] <= MOST_EXTRA for row in found["without_drafts"]
    )
    store(options.json, found)
    sys.stdout.write(f"{row}\n")
    sys.stdout.flush()


def _run(
    engines: dict[str, EngineProcess],
    requests: list[Request],
    name: str,
    size: int,
    length: int | None,
    *,
    num_steps: int,
) -> list[Step]:
    call = engines[name].call
    return call(run_phase, SECONDS, requests=requests[:size], length=length, num_steps=num_steps)


def _without_drafts(
    engines: dict[str, EngineProcess], run: Callable[..., list[Step]], size: int, num_turns: int
) -> dict[str, Any]:
    """Return the step of an engine without MTP in milliseconds, and what one of 0 drafts takes more
    in microseconds: median and quartiles of the turns."""
    names = ["off", "before", "after"]
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_turns + 1):
        for name in names[:: -1 if turn % 2 else 1]:
            if name != "off":
                is_shorter = engines["auto"].call(choose_graphs, SECONDS, do_replay=name == "after")
            steps = run("off" if name == "off" else "auto", size, 0)
            if turn:  # the first one compiles
                took[name].append(statistics.median(seconds for _, seconds, _ in steps))
    engines["auto"].call(choose_graphs, SECONDS, do_replay=True)
    extra = {
        name: [1e6 * (ours - off) for ours, off in zip(took[name], took["off"], strict=True)]
        for name in names[1:]
    }
    return {
        "requests": size,
        "has_shorter_graphs": is_shorter,
        "off_ms": round(1000 * statistics.median(took["off"]), 3),
        **{name: _quartiles(values) for name, values in extra.items()},
    }


def _quartiles(values: list[float]) -> list[float]:
    """Return median, lower and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(value, 1) for value in (middle, low, high)]


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
    settings["attention_backend"] = options.attention_backend
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
    return EngineProcess(name, settings, folder, before=before)


def _phase(
    run: Callable[..., list[Step]], size: int, options: argparse.Namespace
) -> dict[str, Any]:
    lengths = range(options.num_drafts + 1)
    fixed: dict[int, list[list[Step]]] = {length: [] for length in lengths}
    off: list[Step] = []
    auto: list[list[Step]] = []
    for turn in range(options.rounds):
        for length in lengths[:: -1 if turn % 2 else 1]:
            fixed[length].append(run("auto", size, length))
        if not options.no_off:
            off += run("off", size, 0)
        auto.append([step for _ in range(options.texts) for step in run("auto", size, None)])

    def rate(rounds: list[list[Step]]) -> float:
        return tokens_per_second([step for steps in rounds for step in steps], size)

    chosen_by, compared = slice(0, None, 2), slice(1, None, 2)
    best = max(lengths, key=lambda length: rate(fixed[length][chosen_by]))
    pairs = zip(auto[compared], fixed[best][compared], strict=True)
    steps = [step for steps in auto for step in steps]
    of_off = tokens_per_second(off, size) if off else None
    return {
        "requests": size,
        "tokens_per_second": {
            **{f"K = {length}": round(rate(rounds), 1) for length, rounds in fixed.items()},
            "auto": round(rate(auto), 1),
            **({"off": round(of_off, 1)} if of_off else {}),
        },
        "best": best,
        "auto_of_best": round(rate(auto[compared]) / rate(fixed[best][compared]), 3),
        "auto_of_best_by_round": [round(rate([a]) / rate([b]), 3) for a, b in pairs],
        "first_round_of_best": round(rate(auto[:1]) / rate(fixed[best]), 3),
        "auto_of_off": round(rate(auto) / of_off, 3) if of_off else None,
        "steps": len(steps),
        "steps_by_length": dict(sorted(Counter(length for length, *_ in steps).items())),
        "matched": is_as_configured(steps, size),
    }


def main() -> int:
    """Measure and print a table; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    for row in found["without_drafts"]:
        sys.stdout.write(
            f"{row['requests']} requests: {row['off_ms']} ms without MTP; 0 drafts take more, in "
            "microseconds: "
            + ", ".join(
                "{} {:.0f} ({:.0f} to {:.0f})".format(name, *row[name])
                for name in ("before", "after")
            )
            + "\n"
        )
    for row in found["phases"]:
        rates = " ".join(f"{name} {rate:.1f}" for name, rate in row["tokens_per_second"].items())
        sys.stdout.write(
            f"{row['requests']} requests, tokens/s: {rates}; auto {row['auto_of_best']:.3f} of K = "
            f"{row['best']} (rounds {row['auto_of_best_by_round']}), {row['auto_of_off']} of off; "
            f"steps by K {row['steps_by_length']}\n"
        )
    outputs = found["outputs"].get("auto", "FAILED")
    sys.stdout.write(f"outputs of the tiny model, next to 0 drafts: {outputs}\n")
    reached = "yes" if found["reached"] else "no"
    sys.stdout.write(
        f"at least {GOAL} of the best K in each phase, 0 drafts at most {MOST_EXTRA:.0f} us: "
        f"{reached}\nload of other processes, at most: "
        f"{max(row['load'] for row in (*found['without_drafts'], *found['phases']))}\n"
    )
    sys.stdout.write("matched\n" if found["matched"] else "FAILED: not matched\n")
    return 0 if found["matched"] and (found["reached"] or not has_gpu()) else 1


if __name__ == "__main__":
    sys.exit(main())

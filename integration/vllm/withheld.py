"""Cost of one request without drafts: ``python -m integration.vllm.withheld``.

One engine serves batches of greedy requests, in turn without and with one request that has
``{"mtp_speculate": false}``; exit code 1 if the median time of a step grows by more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from integration.vllm.engine_process import (
    CHECKPOINT,
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    wait_for,
)
from integration.vllm.load import Request, run_batch

MOST_RATIO = 1.03
ACCEPTANCE = [0.78, 0.605, 0.467]
"""Share of steps that accept at least 1, 2 and 3 drafts, whatever the model says."""
BATCH_SECONDS = 600.0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="folder with a config.json: random weights")
    parser.add_argument("--dtype", default="bfloat16", help="of random weights")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--most", type=float, default=MOST_RATIO, help="largest allowed ratio")
    add_common_options(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the medians with 0 and with 1 request without drafts, and their ratio."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu)
    settings = engine_settings(
        len(ACCEPTANCE),
        on_gpu,
        {},
        max_num_seqs=options.batch,
        skip_tokenizer_init=True,
        speculative_config={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": ACCEPTANCE,
        },
    )
    if options.config:
        settings |= {"model": str(options.config), "load_format": "dummy", "dtype": options.dtype}
        settings.pop("attention_backend", None)
    if on_gpu:
        settings |= {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.1}
        width = len(ACCEPTANCE) + 1
        # a full graph of the batch's size
        sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, width * options.batch}
        settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(sizes)}
    engine = EngineProcess("withheld", settings, folder)
    try:
        found: dict[str, Any] = {"engine": engine.wait_until_ready(), "model": settings["model"]}
        wait_for(options.wait)
        step_ms: dict[int, list[float]] = {0: [], 1: []}
        medians: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(options.rounds + 1):
            for withheld in (0, 1) if turn % 2 else (1, 0):
                result = engine.call(
                    run_batch,
                    BATCH_SECONDS,
                    requests=_requests(options, withheld),
                    until_first_end=True,
                )
                lengths = [len(tokens) for tokens in result["tokens"]]
                if withheld and lengths[0] != min(lengths):
                    raise EngineError(f"the request without drafts was not the slowest: {lengths}")
                if turn:  # the first one warms up
                    step_ms[withheld] += result["step_ms"]
                    medians[withheld].append(result["median_ms"])
    finally:
        engine.close()
    without, with_one = (statistics.median(step_ms[withheld]) for withheld in (0, 1))
    found |= {
        "batch": options.batch,
        "num_steps": [len(step_ms[0]), len(step_ms[1])],
        "median_ms": [round(without, 4), round(with_one, 4)],
        "median_ms_by_turn": [medians[0], medians[1]],
        "ratio": round(with_one / without, 4),
    }
    return found


def _requests(options: argparse.Namespace, withheld: int) -> list[Request]:
    rng = random.Random(0)
    vocab = json.loads(((options.config or Path(CHECKPOINT)) / "config.json").read_text())
    return [
        {
            "prompt": [rng.randrange(vocab["vocab_size"]) for _ in range(options.isl)],
            "params": {
                "temperature": 0.0,
                "max_tokens": options.osl,
                "extra_args": {"mtp_speculate": False} if number < withheld else {},
            },
        }
        for number in range(options.batch)
    ]


def main() -> int:
    """Measure and print the ratio; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    is_ok = found["ratio"] <= options.most
    sys.stdout.write(
        f"batch {found['batch']}: {found['median_ms'][0]:.3f} ms, {found['median_ms'][1]:.3f} ms "
        f"with one request without drafts, ratio {found['ratio']:.4f} (at most {options.most}), "
        f"{found['num_steps']} steps\n{'passed' if is_ok else 'FAILED'}\n"
    )
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())

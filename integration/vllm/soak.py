"""Soak test of the vLLM plugin: ``python -m integration.vllm.soak --seconds 120``.

One engine with drafts serves random requests: random arrivals, options, aborts, preemptions. At the
same time a second engine without drafts runs the requests whose output must be the same. Exit code
1: an output differs by more than a tie, an engine hung or failed, or KV blocks or slots leaked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from integration.vllm.engine_process import (
    CHECKPOINT,
    ROOT,
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    prepare,
    wait_for,
)
from integration.vllm.reference import run_reference
from integration.vllm.traffic import THINKING_TOKENS, run_traffic
from mtp_plugin.hosts.vllm.options import DRAFTERS, drafter_config

REPORTED = ("k", "drafter", "seed", "max_num_seqs", "plain", "prefix_caching", "plugin", "engine")
"""Options in the result."""
BLOCK_SIZE = 32
MAX_MODEL_LEN = 384
MIN_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 2
DRAIN_SECONDS = 600.0
"""Most seconds after the traffic until all requests have finished and are compared ..."""
DRAIN_SECONDS_ON_GPU = 120.0
"""... and on a GPU, where the engine without drafts keeps up with the traffic."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the traffic")
    parser.add_argument("--model", default=CHECKPOINT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--k", type=int, default=3, help="number of drafts per step")
    parser.add_argument(
        "--drafter",
        default="mtp",
        metavar="NAME[,MODEL]",
        help="method and draft model of vLLM's speculative_config, such as ngram",
    )
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--kv-blocks", type=int, help="default: 2 per sequence, too few on purpose")
    parser.add_argument("--longest", type=int, default=96, help="most output tokens of a request")
    parser.add_argument(
        "--methods",
        choices=("coupled", "all"),
        default="all",
        help="all: also rejection and block",
    )
    parser.add_argument(
        "--plain",
        type=int,
        default=0,
        help="begin with so many greedy requests and as many at a temperature of 0.8",
    )
    parser.add_argument("--prefix-caching", action="store_true", help="of the engine with drafts")
    parser.add_argument(
        "--plugin", type=json.loads, default={}, help="options of the plugin, as JSON"
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help='arguments of the engine with drafts, as JSON, such as {"tensor_parallel_size": 2}',
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--margin",
        type=float,
        help="change of two logits that explains a different token as a tie (default: 0.01 on a "
        "GPU, whose matrix products round to TF32, 0.001 on a CPU)",
    )
    add_common_options(parser)
    return parser.parse_args()


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both engines; returns counts and problems."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu)
    # vLLM's Triton kernels round float32 to TF32: experts that nearly tie would be chosen otherwise
    # with drafts, which changes all logits
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")
    margin = options.margin or (0.01 if on_gpu else 0.001)
    common: dict[str, Any] = {"model": options.model, "max_model_len": MAX_MODEL_LEN}
    if options.eager:
        common["enforce_eager"] = True
    seqs = options.max_num_seqs
    drafter = drafter_config(options.drafter)["method"]
    drafting = EngineProcess(
        "drafting",
        engine_settings(
            options.k,
            on_gpu,
            {**THINKING_TOKENS, **options.plugin},
            options.drafter,
            enable_prefix_caching=options.prefix_caching,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(64, 8 * seqs),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=options.kv_blocks or max(MIN_BLOCKS, 2 * seqs),
            speculative_config=(
                {"draft_sample_method": "probabilistic"}
                if options.methods == "all" and DRAFTERS[drafter]
                else {}
            ),
            **common,
        )
        | options.engine,
        folder,
        in_process=True,
    )
    reference = EngineProcess(
        "reference",
        engine_settings(0, on_gpu, {}, max_num_seqs=4 * seqs, **common),
        folder,
        in_process=True,
    )
    finished_file = str(folder / "finished.jsonl")
    Path(finished_file).unlink(missing_ok=True)
    started = time.monotonic()
    try:
        described = [engine.wait_until_ready() for engine in (drafting, reference)]
        seconds_to_start = time.monotonic() - started
        used = described[0]["drafter"]
        if used != drafter:  # a draft model of a family with MTP layers
            raise EngineError(f"vLLM drafts with {used!r} in place of {drafter!r}")
        wait_for(options.wait)
        drafting.start_call(
            run_traffic,
            seconds=options.seconds,
            seed=options.seed,
            texts=prompt_texts(),
            longest=options.longest,
            plain=options.plain,
            finished_file=finished_file,
        )
        reference.start_call(
            run_reference,
            finished_file=finished_file,
            margin=margin,
            # where rounding makes the router choose other experts, all logits change
            logprob_tolerance=1.0 if on_gpu else 5 * margin,
        )
        end = time.monotonic() + options.seconds
        end += DRAIN_SECONDS_ON_GPU if on_gpu else options.seconds + DRAIN_SECONDS
        traffic = drafting.result(end - time.monotonic())
        seconds_to_compare = -time.monotonic()
        compared = reference.result(max(0.0, end - time.monotonic()))
        seconds_to_compare += time.monotonic()
    finally:
        drafting.close()
        reference.close()
    problems = traffic["problems"] + compared["problems"]
    if compared["counts"]["compared"] != traffic["counts"]["compared"]:
        problems.append("the reference did not run all compared requests")
    return {
        "engines": described,
        "seconds": {
            "start": round(seconds_to_start, 1),
            "traffic": traffic["counts"].pop("seconds"),
            "rest of the comparison": round(seconds_to_compare, 1),
        },
        "margin": margin,
        "options": {name: getattr(options, name) for name in REPORTED},
        "methods": ["coupled", *traffic["methods"]],
        "traffic": traffic["counts"],
        "comparison": compared["counts"],
        "problems": problems,
    }


def prompt_texts() -> list[str]:
    """Return the prompts of the tiny model."""
    file = ROOT / "integration" / "tiny_model" / "prompts.json"
    return [entry["prompt"] for entry in json.loads(file.read_text())]


def main() -> int:
    """Run the soak test; returns the exit code."""
    options = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            found = soak(options, options.folder or Path(temporary))
        except EngineError as error:
            found = {"problems": [str(error)]}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for name in ("seconds", "traffic", "comparison"):
        counts = ", ".join(f"{key} {value}" for key, value in found.get(name, {}).items())
        sys.stdout.write(f"{name}: {counts}\n")
    for problem in found["problems"][:20]:
        sys.stdout.write(f"problem: {problem}\n")
    sys.stdout.write("FAILED\n" if found["problems"] else "passed\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

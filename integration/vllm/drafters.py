"""Every drafter's output is that without drafts: ``python -m integration.vllm.drafters``.

A Llama with heads of random weights, and the tiny model with its MTP layers: plain, quantized, in
an extended context. An engine without drafts runs the requests of each case too: greedy, at T =
0.8, and with top-p. A line per case and method says how many outputs are equal token by token,
near ties (see `find_ties`) and others. Requests of rejection and block are greedy or have ``min_p``
1, so that one token is possible at every position; p is the least of chi-square tests of others.
Drafts of random heads are seldom accepted but for the noise that coupled requests share with them.

Exit code 1: an engine failed, a distribution differs, or an output by more than a near tie where
none of 16 bits does without drafts at another batch.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, store
from integration.vllm.draft_models import YARN, write
from integration.vllm.engine_process import (
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
)
from integration.vllm.load import Request, run_batch, text_prompts
from integration.vllm.methods import LEAST_P, chi_square, sampled_tokens
from integration.vllm.reference import differing, find_ties
from integration.vllm.soak import prompt_texts
from mtp_plugin.hosts.vllm.options import DRAFTERS

CASES: dict[str, tuple[str, str, str]] = {
    "mtp": ("tiny", "mtp", "tiny"),
    "mtp_one_layer": ("tiny", "mtp", "one_mtp_layer"),
    "gemma4": ("gemma4", "mtp", "gemma4_assistant"),
    "draft_model": ("llama", "draft_model", "llama"),
    "eagle": ("llama", "eagle", "eagle"),
    "eagle3": ("llama", "eagle3", "eagle3"),
    "dflash": ("llama", "dflash", "dflash"),
    "dflash_full": ("llama", "dflash", "dflash_full"),
    "dflash2": ("llama", "dflash", "dflash2"),
    "dspark": ("llama", "dspark", "dspark"),
    "half": ("half", "mtp", "tiny"),
    "fp8": ("fp8", "mtp", "fp8"),
    "fp8_mtp": ("fp8", "mtp", "fp8_mtp"),
    "int4": ("int4", "mtp", "int4"),
    "int4_mtp": ("int4", "mtp", "int4_mtp"),
    "context": ("yarn", "mtp", "yarn"),
    "context_overrides": ("yarn", "mtp", "tiny"),
}
"""Model, drafter, and the checkpoint of the drafts, for MTP layers that of the model. ``_mtp``: the
MTP layers are quantized too; ``dflash_full``: attention that is not causal, which a CPU lacks;
``context_overrides``: `YARN` by ``hf_overrides``, not in config.json."""
HALF = ("half", "fp8", "int4")
"""Models of 16 bits: kernels of quantized weights have no float32."""
METHODS = ("coupled", "rejection", "block")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
)
FREE = {"temperature": 0.8, "top_k": 8}
"""Of the chi-square tests."""
NUM_DRAFTS, SECONDS = 3, 240.0
FEW = 6
"""Batch of the requests that show how much rounding alone changes 16-bit outputs."""
REQUESTS, LENGTH, SAMPLES = (48, 48, 2048) if has_gpu() else (6, 8, 24)
"""Of a batch; output tokens, at least; of a chi-square test."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--models", type=int, default=3, help="whose cases run side by side")
    parser.add_argument("--half", default="float16", help="dtype of quantized models")
    add_common_options(parser)
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    if set(options.cases) - set(CASES):
        parser.error(f"--cases: expected some of {', '.join(CASES)}")
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the cases, those of one model side by side; rows are printed and stored as they come."""
    prepare(folder, has_gpu())
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")  # see `soak`
    machine = describe_machine(torch.device("cuda" if has_gpu() else "cpu"))
    found: dict[str, Any] = {
        "kind": "drafters",
        "name": "vllm-drafters",
        "matched": False,
        "machine": machine,
        "engines": {},
        "rows": [],
    }
    names = {part for case in options.cases for part in CASES[case][::2]}
    paths = {name: write(folder, "tiny" if name == "half" else name) for name in names}
    lock = threading.Lock()

    def report(row: dict[str, Any]) -> None:
        with lock:
            found["rows"].append(row)
            store(options.json, found)
            sys.stdout.write(line_of(row))
            sys.stdout.flush()

    def run_model(model: str, cases: list[str]) -> None:
        without = f"{model}_k0"
        engines = {
            name: EngineProcess(
                name, settings_of(name, model, paths, options.half), folder, in_process=True
            )
            for name in (without, *cases)
        }
        try:
            for name in engines:
                try:
                    described = engines[name].wait_until_ready()
                    with lock:
                        found["engines"][name] = described
                    if name in cases:
                        compare(engines[name], engines[without], name, report)
                except EngineError as error:
                    report({"case": name, "error": str(error)})
        finally:
            for engine in engines.values():
                engine.close()

    models = {model: [c for c in options.cases if CASES[c][0] == model] for model in sorted(names)}
    with ThreadPoolExecutor(options.models) as pool:
        for done in [pool.submit(run_model, *each) for each in models.items() if each[1]]:
            done.result()
    found["matched"] = not any(map(is_wrong, found["rows"]))
    store(options.json, found)
    return found


def settings_of(name: str, model: str, paths: dict[str, str], half: str) -> dict[str, Any]:
    """Return the settings of the engine of a case, or of its model without drafts."""
    on_gpu, method, drafter = has_gpu(), "mtp", "mtp"
    settings: dict[str, Any] = {"model": paths[model], "max_num_seqs": 32 if on_gpu else 8}
    spec: dict[str, Any] = {}
    if model in HALF:
        settings["dtype"] = half
    if model == "yarn":
        settings["max_model_len"] = 4096
    if on_gpu:
        sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        spec["attention_backend"] = "TRITON_ATTN"
    if name in CASES:
        _, method, drafts = CASES[name]
        if method == "mtp" and model != "gemma4":
            settings["model"] = paths[drafts]
        else:
            drafter = f"{method},{paths[drafts]}"
        if DRAFTERS[method]:
            spec["draft_sample_method"] = "probabilistic"
        if name == "context_overrides":
            settings["hf_overrides"] = YARN
    settings["speculative_config"] = spec
    return engine_settings(NUM_DRAFTS if name in CASES else 0, on_gpu, {}, drafter, **settings)


def requests_of(prompts: list[list[int]], method: str) -> list[Request]:
    """Return a request per prompt; those of rejection and block have one possible token."""
    one_token = {} if method == "coupled" else {"min_p": 1.0}
    return [
        {
            "prompt": prompt,
            "params": {"max_tokens": LENGTH + n % 17, "seed": n, **SAMPLING[n % 3]}
            | (one_token if n % 3 else {}),
        }
        for n, prompt in enumerate(prompts)
    ]


def compare(engine: EngineProcess, without: EngineProcess, case: str, report: Any) -> None:
    """Run the requests of a case with both engines, method by method.

    Raises:
        EngineError: one of the engines failed.
    """
    model, drafter, _ = CASES[case]
    margin = 0.1 if model in HALF else 0.01 if has_gpu() else 0.001
    texts, length = (prompt_texts() * 4, 3000) if model == "yarn" else (prompt_texts(), 64)
    prompts = without.call(text_prompts, SECONDS, texts=texts, count=REQUESTS, length=length)
    has_all = DRAFTERS[drafter] and model not in (*HALF, "yarn")
    for method in METHODS if has_all else METHODS[:1]:
        started, requests = time.monotonic(), requests_of(prompts, method)
        extra = {"mtp_verification": method}
        by_method = [{**r, "params": {**r["params"], "extra_args": extra}} for r in requests]
        engine.start_call(run_batch, requests=by_method)
        expected = without.call(run_batch, SECONDS, requests=requests)["tokens"]
        ran = engine.result(SECONDS)
        unequal = differing(by_method, ran["tokens"], expected)
        ties = without.call(find_ties, SECONDS, unequal=unequal, margin=margin)
        others = [
            {"request": each["number"], "params": each["params"], "token": at}
            for each, _, at in unequal
            if str(each["number"]) not in ties
        ]
        row: dict[str, Any] = {
            "case": case,
            "method": method,
            "requests": len(requests),
            "equal": len(requests) - len(unequal),
            "near_ties": len(ties),
            "margin": margin,
            "others": others,
            "acceptance_length": ran["acceptance_length"],
        }
        if model in HALF and method == METHODS[0]:  # rounding alone, at another batch
            parts = [requests[n : n + FEW] for n in range(0, len(requests), FEW)]
            few = [without.call(run_batch, SECONDS, requests=part)["tokens"] for part in parts]
            unequal = differing(requests, [ids for part in few for ids in part], expected)
            ties = without.call(find_ties, SECONDS, unequal=unequal, margin=margin)
            row["without_drafts"] = {
                "batch": FEW,
                "equal": len(requests) - len(unequal),
                "near_ties": len(ties),
                "others": len(unequal) - len(ties),
            }
        if method != "coupled":
            counts, drafted = (
                sampled_tokens(each, prompts[0][:64], FREE, options, SAMPLES, first_seed=first)
                for each, options, first in ((without, {}, 0), (engine, extra, 10**6))
            )
            tests = [chi_square(drafted[key], counts[key])[0] for key in counts]
            row["least_p"] = min(1.0, min(tests) * len(tests))
        report(row | {"seconds": round(time.monotonic() - started, 1)})


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line; of an error, its first lines."""
    if "error" in row:
        first, *rest = row["error"].splitlines()
        cause = next((line for line in rest if "Error" in line), "")
        return f"{row['case']}: failed: {first}: {cause}\n"
    p = f", p {row['least_p']:.2g}" if "least_p" in row else ""
    if few := row.get("without_drafts"):
        p += ", without drafts at batch {batch} {equal} / {near_ties} / {others}".format(**few)
    return (
        f"{row['case']} {row['method']}: {row['requests']} requests, {row['equal']} equal, "
        f"{row['near_ties']} near ties (margin {row['margin']}), {len(row['others'])} others, "
        f"acceptance length {row['acceptance_length']}{p}, {row['seconds']} s\n"
    )


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a row counts as a failure, see above."""
    differs = row.get("others") and not row.get("without_drafts", {}).get("others")
    return "error" in row or bool(differs) or row.get("least_p", 1) < LEAST_P


def main() -> int:
    """Run the cases; returns the exit code."""
    found = measured(measure, arguments())
    passed = found is not None and found["matched"]
    sys.stdout.write("passed\n" if passed else "FAILED\n")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())

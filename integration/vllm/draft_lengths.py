"""Tokens per second by draft length K: ``python -m integration.vllm.draft_lengths --json FILE``.

vLLM with the plugin, dummy weights, the same synthetic acceptance for all K. One engine has all of
them: its list of K by batch size is rewritten. K = 0 still runs the first pass of the MTP layer,
which fills its KV cache, so that "off", an engine without MTP, is measured too. Routing is
simulated in the shape "sparse" (see `integration.vllm.routing`); every number names its routing.

The trained tiny model generates with every K in float32: outputs must be those of K = 0 (rounding
ties are counted). A number of dummy weights is ``matched`` if all ids are valid and the
acceptance length is the configured one. Exit code 1: one of these fails.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, store
from integration.shapes import ACCEPTANCE, vllm_config, write_config
from integration.vllm.engine_process import (
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    write_one_mtp_layer,
)
from integration.vllm.load import Request, run_batch, text_prompts
from integration.vllm.reference import differing, find_ties
from integration.vllm.routing import PLUGIN, ROUTINGS, choose, set_draft_len
from integration.vllm.soak import prompt_texts
from mtp_plugin.hosts.vllm.scheduled_draft_len import lengths_of
from mtp_plugin.hosts.vllm.wrapping import LENGTHS as LENGTHS_OF

LENGTHS = (0, 1, 3, 5, 7)
PROMPTS = {"short": 128, "16k": 16384}
BATCHES = {"short": (1, 8, 32, 64, 128), "16k": (1, 8, 32)}
GREEDY, SAMPLING = {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.95}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
"""The shape on a CPU, to try the command."""
KV_BYTES = {"sparse": 29 << 30, "8gb": 42 << 30}
"""For 32 requests of 16k tokens."""
START_SECONDS, SECONDS = 300.0, 120.0
"""Until an engine is ready, by default, and of one batch."""
STANDARD_ERRORS = 4.0
"""Difference of a measured acceptance length from the configured one, at most."""
MARGIN = 0.01
"""See `find_ties`."""


def arguments() -> argparse.Namespace:
    """Read the command line; without a GPU everything is small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("sparse", "8gb"), default="sparse")
    parser.add_argument("--routing", help="of the shape sparse, default: third,random")
    parser.add_argument("--prompts", default=",".join(PROMPTS))
    parser.add_argument("--batches", help="default: " + str(BATCHES))
    parser.add_argument("--osl", type=int, default=192)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--sampled", action="store_true", help="T = 0.6, top-p 0.95, not greedy")
    parser.add_argument("--attention-backend", help="of vLLM, as TRITON_ATTN (vLLM's choice)")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--kv-gib", type=int, help="KV cache, default: for 32 prompts of 16k")
    parser.add_argument("--start-seconds", type=float, default=START_SECONDS)
    add_common_options(parser)
    options = parser.parse_args()
    if options.routing and options.shape != "sparse":
        parser.error("--routing is of the shape sparse; leave it out")
    options.routing = options.routing or ",".join(ROUTINGS)
    for option, known in (("routing", ROUTINGS), ("prompts", PROMPTS)):
        if set(getattr(options, option).split(",")) - set(known):
            parser.error(f"--{option}: expected some of {', '.join(known)}")
    return options


def expected_length(k: int, num_tokens: int = 1) -> tuple[float, float]:
    """Return the configured tokens per step, and their standard error in so many tokens."""
    length = 1 + sum(ACCEPTANCE[:k])
    squares = sum((2 * i - 1) * share for i, share in enumerate(ACCEPTANCE[:k], 1))
    return length, math.sqrt((squares - (length - 1) ** 2) * length / num_tokens)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare outputs, then measure with drafts and without; cells are stored as they come."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu, PLUGIN)
    model = vllm_config(options.shape) | ({} if on_gpu else SMALL | {"torch_dtype": "float32"})
    found: dict[str, Any] = {
        "kind": "draft-lengths",
        "name": f"vllm-draft-lengths-{options.shape}",
        "complete": False,
        "matched": False,
        "machine": describe_machine(torch.device("cuda" if on_gpu else "cpu")),
        "shape": options.shape,
        "model": {"weights": "dummy", "num_mtp_layers": 1, **model},
        "synthetic_acceptance": ACCEPTANCE,
        "sampling": SAMPLING if options.sampled else GREEDY,
        "prompt_tokens": PROMPTS if on_gpu else dict.fromkeys(PROMPTS, 16),
        "output_tokens": options.osl,
        "turns": options.turns,
        "attention_backend": options.attention_backend,
        "prefix_caching": not options.no_prefix_caching,
        "kv_bytes": _kv_bytes(options),
        "routing": _routings(options),
        "timed": "median of steps in which all requests generate, then of the turns; tokens per "
        "second by the configured acceptance length",
        "outputs": {},
        "engines": {},
        "cells": [],
    }
    for name in ("drafts", "off"):
        with contextlib.ExitStack() as stack:
            # both start at the same time
            engine = _start(name, options, model, folder, on_gpu)
            stack.callback(engine.close)
            if name == "drafts":
                outputs = start_outputs(folder, on_gpu, {}, _schedule)
                stack.callback(outputs.close)
                found["outputs"] = compare_outputs(outputs, on_gpu, LENGTHS)
            found["engines"][name] = engine.wait_until_ready(options.start_seconds)
            store(options.json, found)
            for cell in _cells(options, name, found):
                _measure(engine, options, cell, found["model"]["vocab_size"])
                found["cells"].append(cell)
                found["matched"] = is_equal(found["outputs"]) and all(
                    cell["matched"] for cell in found["cells"]
                )
                store(options.json, found)
                of = " ".join(map(str, list(cell.values())[:5]))
                sys.stdout.write(f"{of}: {cell['step_ms']} ms, matched: {cell['matched']}\n")
                sys.stdout.flush()
            if options.shape == "sparse":
                found["engines"][name]["routed_rows"] = engine.call(routed_rows, SECONDS)
    found["complete"] = True
    store(options.json, found)
    return found


def _routings(options: argparse.Namespace) -> dict[str, str]:
    if options.shape != "sparse":
        return {"router": "the model's own router, with dummy weights"}
    described = {
        "third": "each row shares a third of its experts with the row before it in its request",
        "random": "rows are independent, a bound",
    }
    return {name: described[name] for name in options.routing.split(",")}


# --- outputs of the trained tiny model ---


def start_outputs(
    folder: Path,
    on_gpu: bool,
    plugin: dict[str, Any],
    speculative: Callable[[int], dict[str, Any]] = lambda _: {},
) -> EngineProcess:
    """Start an engine of the tiny model for `compare_outputs`.

    Args:
        plugin: options of the plugin.
        speculative: more of ``speculative_config``, by ``max_num_seqs``.
    """
    # experts that nearly tie would change all logits, see `soak`
    os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")
    most = max(2 * _num_prompts(on_gpu)[0], max(LENGTHS) + 1)
    settings = engine_settings(
        max(LENGTHS),
        on_gpu,
        plugin,
        model=write_one_mtp_layer(folder / "one_mtp_layer"),
        max_num_seqs=most,
        speculative_config=speculative(most),
    )
    if on_gpu:
        sizes = sorted({most * (k + 1) for k in range(max(LENGTHS) + 1)})
        settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return EngineProcess("outputs", settings, folder, in_process=True)


def _num_prompts(on_gpu: bool) -> tuple[int, int]:
    """Return the number of prompts and the length of their outputs."""
    return (32, 96) if on_gpu else (2, 6)


def compare_outputs(
    engine: EngineProcess, on_gpu: bool, lengths: tuple[int | None, ...]
) -> dict[str, dict[str, Any]]:
    """Return counts by K of outputs that equal those of K = 0, greedy and at T = 0.8; empty: the
    engine failed, which is printed.

    Args:
        lengths: see `outputs_by_length`.
    """
    count, length = _num_prompts(on_gpu)
    try:
        engine.wait_until_ready(START_SECONDS)
        prompts = engine.call(text_prompts, SECONDS, texts=prompt_texts(), count=count, length=64)
        common = {"max_tokens": length, "ignore_eos": True}
        requests: list[Request] = [
            {"prompt": prompt, "params": {**common, "seed": number, **sampling}}
            for sampling in (GREEDY, {"temperature": 0.8})
            for number, prompt in enumerate(prompts)
        ]
        found: dict[str, dict[str, Any]] = engine.call(
            outputs_by_length, SECONDS, requests=requests, lengths=lengths
        )
        return found
    except EngineError as error:
        sys.stdout.write(f"{error}\n")
        return {}


def is_equal(outputs: dict[str, dict[str, Any]]) -> bool:
    """Whether all outputs of `compare_outputs` are those of K = 0, or differ by a tie."""
    return bool(outputs) and all(
        each["equal"] + each["ties"] == each["compared"] for each in outputs.values()
    )


def outputs_by_length(
    llm: Any, *, requests: list[Request], lengths: tuple[int | None, ...]
) -> dict[str, dict[str, Any]]:
    """Run the requests with every K in the engine's process.

    Args:
        lengths: the first one is 0, the reference. None: the plugin chooses.
    """
    core = llm.llm_engine.engine_core.engine_core
    expected: list[list[int]] = []
    found = {}
    for k in lengths:
        setattr(core.scheduler, LENGTHS_OF, lengths_of(core.vllm_config) if k is None else None)
        set_draft_len(core, k or 0)
        ran = run_batch(llm, requests=requests)
        if k == 0:
            expected = ran["tokens"]
            continue
        unequal = differing(requests, ran["tokens"], expected)
        setattr(core.scheduler, LENGTHS_OF, None)
        set_draft_len(core, 0)
        ties = find_ties(llm, unequal, MARGIN)
        found["auto" if k is None else f"K = {k}"] = {
            "compared": len(requests),
            "equal": len(requests) - len(unequal),
            "ties": len(ties),
            "acceptance_length": ran["acceptance_length"],
        }
    return found


# --- times with dummy weights ---


def _schedule(most: int) -> dict[str, Any]:
    """Return a list by batch size with every K: vLLM captures graphs of those that it names."""
    ranges = [[n, n, k] for n, k in enumerate(LENGTHS[:-1], 1)]
    return {"num_speculative_tokens_per_batch_size": [*ranges, [len(LENGTHS), most, LENGTHS[-1]]]}


def _kv_bytes(options: argparse.Namespace) -> int:
    return int(options.kv_gib << 30) if options.kv_gib else KV_BYTES[options.shape]


def _batches(options: argparse.Namespace, prompts: str) -> tuple[int, ...]:
    return tuple(map(int, options.batches.split(","))) if options.batches else BATCHES[prompts]


def _start(
    name: str, options: argparse.Namespace, model: dict[str, Any], folder: Path, on_gpu: bool
) -> EngineProcess:
    lengths = LENGTHS if name == "drafts" else (0,)
    names = options.prompts.split(",")
    batches = {batch for each in names for batch in _batches(options, each)}
    most = max(*batches, len(LENGTHS))
    settings = engine_settings(
        max(lengths),
        on_gpu,
        {},
        model=write_config(folder / "model", model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=model["torch_dtype"],
        max_num_seqs=most,
        enable_prefix_caching=not options.no_prefix_caching,  # long prompts are computed once
        speculative_config={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": ACCEPTANCE,
            **_schedule(most),
        },
    )
    settings["attention_backend"] = options.attention_backend
    if on_gpu:
        # a full graph of every batch and K
        sizes = sorted({batch * (k + 1) for batch in batches for k in lengths})
        settings |= {
            "max_model_len": max(PROMPTS[each] for each in names) + options.osl + 16,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.1,  # `kv_cache_memory_bytes` counts
            "kv_cache_memory_bytes": _kv_bytes(options),
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }
    route = options.routing.split(",")[0] if options.shape == "sparse" else None
    return EngineProcess(name, settings, folder, before=partial(choose, route))


def _cells(options: argparse.Namespace, name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"routing": route, "prompts": prompts, "batch": batch, "k": k, "engine": name}
        for route in found["routing"]
        for prompts in options.prompts.split(",")
        for batch in _batches(options, prompts)
        for k in (LENGTHS if name == "drafts" else (0,))
    ]


def _measure(
    engine: EngineProcess, options: argparse.Namespace, cell: dict[str, Any], vocab_size: int
) -> None:
    """Add the times of a cell; ``matched``: valid ids and the configured acceptance length."""
    rng = random.Random(0)
    isl = PROMPTS[cell["prompts"]] if has_gpu() else 16
    params = {"max_tokens": options.osl, **(SAMPLING if options.sampled else GREEDY)}
    requests: list[Request] = [
        {"prompt": [rng.randrange(2, vocab_size) for _ in range(isl)], "params": params}
        for _ in range(cell["batch"])
    ]
    times, lengths, num_tokens, is_valid = [], [], 0, True
    for turn in range(options.turns + 1):
        ran = engine.call(
            run_cell,
            SECONDS,
            requests=requests,
            draft_len=cell["k"] if cell["engine"] == "drafts" else None,
            routing=cell["routing"],
        )
        if not ran["step_ms"]:
            cell |= {"step_ms": None, "matched": False, "error": "never did all requests generate"}
            return
        is_valid &= all(0 <= token < vocab_size for ids in ran["tokens"] for token in ids)
        if turn:  # the first one compiles
            times.append(ran["median_ms"])
            num_tokens = sum(map(len, ran["tokens"]))  # each turn may have the same random numbers
            lengths.append(ran["acceptance_length"] or 1.0)
    tokens, error = expected_length(cell["k"], num_tokens)
    length = statistics.fmean(lengths)
    step_ms = statistics.median(times)
    cell |= {
        "step_ms": round(step_ms, 3),
        "step_ms_by_turn": times,
        "tokens_per_second": round(1000 * cell["batch"] * tokens / step_ms, 1),
        "acceptance_length": round(length, 3),
        "matched": is_valid and abs(length - tokens) <= STANDARD_ERRORS * error,
    }


def run_cell(
    llm: Any, *, requests: list[Request], draft_len: int | None, routing: str
) -> dict[str, Any]:
    """Run a batch with this K and routing until the first request ends."""
    if routing in ROUTINGS:
        llm.collective_rpc("set_routing", args=(routing,))
    if draft_len is not None:
        llm.llm_engine.engine_core.call_utility("set_draft_len", draft_len)
    found: dict[str, Any] = run_batch(llm, requests=requests, until_first_end=True)
    return found


def routed_rows(llm: Any) -> list[list[int]]:
    """Return [rows, rows per request] of steps whose routing was simulated."""
    found: list[list[int]] = llm.collective_rpc("routed_rows")[0]
    return found


# --- report ---


def table(found: dict[str, Any]) -> str:
    """Return tokens per second by routing, prompts, batch and K, and the best of a row."""
    lines = [f"{'routing':8} {'prompts':7} {'batch':>5} {'off':>9}"]
    lines[0] += "".join(f" {f'K = {k}':>9}" for k in LENGTHS) + "  best"
    rows: dict[tuple[str, str, int], dict[Any, dict[str, Any]]] = {}
    for cell in found["cells"]:
        column = "off" if cell["engine"] == "off" else cell["k"]
        rows.setdefault((cell["routing"], cell["prompts"], cell["batch"]), {})[column] = cell
    for (route, prompts, batch), cells in rows.items():
        valid = {k: cell["tokens_per_second"] for k, cell in cells.items() if cell["matched"]}
        shown = [f"{valid[k]:.0f}" if k in valid else "-" for k in ("off", *LENGTHS)]
        best = max(valid, key=valid.__getitem__, default="-")
        gain = f" ({valid[best] / valid['off']:.2f}x off)" if "off" in valid else ""
        cells_shown = "".join(f" {each:>9}" for each in shown)
        lines.append(f"{route:8} {prompts:7} {batch:5}{cells_shown}  {best}{gain}")
    outputs = [
        f"{k}: {each['equal']} of {each['compared']} outputs of the tiny model are those of K = 0, "
        f"{each['ties']} ties"
        for k, each in found["outputs"].items()
    ]
    return "\n".join([*lines, *outputs, ""])


def main() -> int:
    """Measure and print a table; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    sys.stdout.write(table(found))
    sys.stdout.write("matched\n" if found["matched"] else "FAILED: not all numbers are matched\n")
    return 0 if found["matched"] else 1


if __name__ == "__main__":
    sys.exit(main())

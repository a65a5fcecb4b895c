"""Acceptance, time and distribution by method: ``python -m integration.vllm.methods``.

vLLM alone (greedy drafts, and ``draft_sample_method: probabilistic``) and the plugin (coupled,
rejection, block) on the tiny model. Chi-square tests compare sampled tokens with those of an engine
without drafts. Exit code 1: an engine failed, or a distribution differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from integration.vllm.engine_process import (
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    prepare,
    wait_for,
)
from integration.vllm.load import Request, run_batch, text_prompts
from integration.vllm.soak import prompt_texts

SAMPLING: dict[str, dict[str, Any]] = {
    "t0.8": {"temperature": 0.8},
    "t0.8-p0.95": {"temperature": 0.8, "top_p": 0.95},
}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"plugin": None},
    "vllm_probabilistic": {"plugin": None, "speculative_config": PROBABILISTIC},
    "coupled": {"plugin": {}},
    "by_probability": {"plugin": {}, "speculative_config": PROBABILISTIC},
}
METHODS = {
    "vllm": ("vllm", {}),
    "vllm_probabilistic": ("vllm_probabilistic", {}),
    "coupled": ("coupled", {}),
    "rejection": ("by_probability", {"mtp_verification": "rejection"}),
    "block": ("by_probability", {"mtp_verification": "block"}),
}
"""Engine and options of the requests."""
NUM_DRAFTS = 3
LEAST_P = 1e-4
LEAST_EXPECTED = 8
"""Values that are rarer in both samples together are one cell of the chi-square test."""
NUM_TESTED = 4
"""Output tokens per request of the chi-square tests; the first is sampled without drafts."""
SHORT, LONG = 120.0, 600.0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--isl", type=int, default=64)
    parser.add_argument("--osl", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="timed turns of every method")
    parser.add_argument(
        "--samples",
        type=int,
        default=4096,
        help="requests of a chi-square test; with less than 200 the control fails",
    )
    parser.add_argument("--only", help="comma-separated methods (default: all)")
    add_common_options(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all engines, then let them take turns; returns results by method and problems."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu)
    names = options.only.split(",") if options.only else list(METHODS)
    wanted = dict.fromkeys(METHODS[name][0] for name in names)
    common: dict[str, Any] = {"max_num_seqs": options.batch}
    engines = {
        name: EngineProcess(
            name, engine_settings(NUM_DRAFTS, on_gpu, **ENGINES[name], **common), folder
        )
        for name in wanted
    }
    engines["k0"] = EngineProcess("k0", engine_settings(0, on_gpu, {}, **common), folder)
    found: dict[str, Any] = {"engines": {}, "methods": {}, "chi_square": {}, "problems": []}
    try:
        for name in list(engines):
            try:
                found["engines"][name] = engines[name].wait_until_ready()
            except EngineError as error:
                found["problems"].append(str(error))
                engines.pop(name).close()
        wait_for(options.wait)
        if "k0" in engines:
            prompts = engines["k0"].call(
                text_prompts, SHORT, texts=prompt_texts(), count=options.batch, length=options.isl
            )
            _time_all(options, engines, names, prompts, found)
            _compare_distributions(options, engines, names, prompts[0], found)
    except EngineError as error:
        found["problems"].append(str(error))
    finally:
        for engine in engines.values():
            engine.close()
    return found


def _time_all(
    options: argparse.Namespace,
    engines: dict[str, EngineProcess],
    names: list[str],
    prompts: list[list[int]],
    found: dict[str, Any],
) -> None:
    for turn in range(options.rounds):
        for name in names:
            engine_name, extra = METHODS[name]
            if engine_name in engines:
                try:
                    _time(options, engines[engine_name], prompts, name, extra, turn == 0, found)
                except EngineError as error:
                    found["problems"].append(str(error))
                    engines.pop(engine_name).close()


def _time(
    options: argparse.Namespace,
    engine: EngineProcess,
    prompts: list[list[int]],
    name: str,
    extra: dict[str, Any],
    is_first: bool,
    found: dict[str, Any],
) -> None:
    if is_first:  # warm up
        requests = _requests(prompts, 24, {"temperature": 0.8}, extra)
        engine.call(run_batch, LONG, requests=requests)
    for label, sampling in SAMPLING.items():
        requests = _requests(prompts, options.osl, sampling, extra)
        result = engine.call(run_batch, LONG, requests=requests)
        kept = found["methods"].setdefault(name, {}).setdefault(label, {"median_ms": []})
        kept["median_ms"].append(result["median_ms"])
        kept["acceptance_length"] = result["acceptance_length"]


def _compare_distributions(
    options: argparse.Namespace,
    engines: dict[str, EngineProcess],
    names: list[str],
    prompt: list[int],
    found: dict[str, Any],
) -> None:
    for label, sampling in SAMPLING.items():
        expected = sampled_tokens(
            engines["k0"], prompt, sampling, {}, options.samples, first_seed=0
        )
        others = {"without drafts": ("k0", sampling, {})}
        # must be found different, or the test shows nothing
        others["control: higher temperature"] = ("k0", {**sampling, "temperature": 1.2}, {})
        for name in names:
            if METHODS[name][0] in engines and not name.startswith("vllm"):
                others[name] = (METHODS[name][0], sampling, METHODS[name][1])
        for name, (engine_name, options_of, extra) in others.items():
            got = sampled_tokens(
                engines[engine_name], prompt, options_of, extra, options.samples, first_seed=10**6
            )
            tests = {key: chi_square(got[key], expected[key]) for key in expected}
            found["chi_square"].setdefault(label, {})[name] = tests
            least = min(p for p, _ in tests.values()) * len(tests)
            if name.startswith("control") != (least < LEAST_P):
                found["problems"].append(f"chi-square, {label}, {name}: p-values {tests}")


def _requests(
    prompts: list[list[int]], osl: int, sampling: dict[str, Any], extra: dict[str, Any]
) -> list[Request]:
    return [
        {
            "prompt": prompt,
            "params": {"max_tokens": osl, "seed": 7 + number, "extra_args": extra, **sampling},
        }
        for number, prompt in enumerate(prompts)
    ]


def sampled_tokens(
    engine: EngineProcess,
    prompt: list[int],
    sampling: dict[str, Any],
    extra: dict[str, Any],
    samples: int,
    first_seed: int,
) -> dict[str, Counter[Any]]:
    """Return how often each token, and each pair of tokens, is sampled at each position."""
    requests = _requests([prompt] * samples, NUM_TESTED, sampling, extra)
    for number, request in enumerate(requests):
        request["params"]["seed"] = first_seed + number
    tokens = engine.call(run_batch, LONG, requests=requests)["tokens"]
    counts: dict[str, Counter[Any]] = {}
    for position in range(1, NUM_TESTED):
        counts[f"token {position}"] = Counter(output[position] for output in tokens)
        pairs = Counter(tuple(output[position - 1 : position + 1]) for output in tokens)
        counts[f"tokens {position - 1} and {position}"] = pairs
    return counts


def chi_square(one: Counter[Any], other: Counter[Any]) -> tuple[float, int]:
    """Return p-value and degrees of freedom of the two-sample chi-square test."""
    import torch

    cells: Counter[Any] = Counter()
    rows: dict[Any, list[int]] = {}
    for value in {**one, **other}:
        both = (one[value], other[value])
        cell = value if sum(both) >= LEAST_EXPECTED else None
        cells[cell] += sum(both)
        rows.setdefault(cell, [0, 0])
        rows[cell][0] += both[0]
        rows[cell][1] += both[1]
    sizes = (one.total(), other.total())
    whole = sum(sizes)
    statistic = 0.0
    for cell, counts in rows.items():
        for count, size in zip(counts, sizes, strict=True):
            expected = cells[cell] * size / whole
            statistic += (count - expected) ** 2 / expected
    freedom = len(rows) - 1
    if not freedom:
        return 1.0, 0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), freedom


def main() -> int:
    """Measure and print a table; returns the exit code."""
    options = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options, options.folder or Path(temporary))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for name, by_label in found["methods"].items():
        row = "  ".join(
            f"{label}: {values['acceptance_length']:.2f} tokens, "
            + "/".join(f"{ms:.2f}" for ms in values["median_ms"])
            + " ms"
            for label, values in by_label.items()
        )
        sys.stdout.write(f"{name:20}{row}\n")
    for label, by_name in found["chi_square"].items():
        for name, tests in by_name.items():
            least = min(p for p, _ in tests.values())
            sys.stdout.write(f"chi-square {label}, {name}: least p {least:.2g}\n")
    for problem in found["problems"]:
        sys.stdout.write(f"problem: {problem}\n")
    sys.stdout.write("FAILED\n" if found["problems"] else "passed\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs Megatron's dynamic engine on one GPU, with its functions and with ours.

Needs megatron-core 0.19.2, einops and FlashAttention 3 (tokenspeed-fa3 3.0.0.post20260810, whose
``flash_attn_interface.py`` Megatron expects in the folder ``flash_attn_3``)::

    python -m tests.megatron.on_gpu

The model is in bfloat16, as FlashAttention 3 requires. Ours and theirs must give the same tokens
for every number of speculative tokens; the exit status is 1 otherwise. Other lines are reported
only: sampled output for K = 0..3, which rounding may change, and seconds per step.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

import torch

from mtp_plugin.hosts import megatron
from tests.megatron import engine

SETTINGS = {"greedy": {"top_k": 1}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
SHARED = [7, 8, 9, 10] * 80


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=160)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    engine.initialize(given.device)
    model, config = engine.make_model(given.device, torch.bfloat16)
    write(f"torch {torch.__version__}, {device_name(given.device)}")
    failed = 0
    for title, prompts, options in (
        ("mixed arrivals", engine.PROMPTS * 2, {}),
        ("prefix caching", [[*SHARED, n] for n in range(8)], {"enable_prefix_caching": True}),
    ):
        write(f"\n{title}")
        runs: dict[tuple[str, int, str], tuple[list[list[int]], float]] = {}
        for mode in ("theirs", "ours", "ours, sampling=True"):
            if mode != "theirs":
                megatron.install(sampling=mode.endswith("True"))
            for num_drafts in range(4):
                for setting in SETTINGS:
                    key = (mode, num_drafts, setting)
                    runs[key] = measure(model, config, given, prompts, num_drafts, setting, options)
            if mode != "theirs":
                megatron.uninstall()
        failed += report(runs)
    write("\nFAILED" if failed else "\nequal tokens with theirs and ours")
    return int(failed > 0)


def measure(
    model: Any,
    config: Any,
    given: argparse.Namespace,
    prompts: list[list[int]],
    num_drafts: int,
    setting: str,
    options: dict[str, Any],
) -> tuple[list[list[int]], float]:
    """Return the tokens of a second run, and its seconds per step."""
    from megatron.core.inference.sampling_params import SamplingParams

    params = SamplingParams(
        num_tokens_to_generate=given.tokens, termination_id=-1, **SETTINGS[setting]
    )
    arrivals = [0, 0, 3, 5, 5, 9, 9, 12]
    for _ in range(2):  # the first run compiles kernels
        made = engine.make_engine(
            model,
            config,
            num_drafts,
            block_size_tokens=256,
            max_tokens=1024,
            max_sequence_length=1024,
            **options,
        )
        started = time.perf_counter()
        run = engine.generate(made, params, prompts, arrivals)
        seconds = time.perf_counter() - started
    return run.tokens, seconds / run.steps


def report(runs: dict[tuple[str, int, str], tuple[list[list[int]], float]]) -> int:
    """Print a table; return the number of runs in which ours differs from theirs."""
    failed = 0
    write("K  setting  ms/step theirs  ours  sampling=True  same tokens  tokens of K = 0")
    for num_drafts in range(4):
        for setting in SETTINGS:
            theirs, ours, sampling = (
                runs[mode, num_drafts, setting]
                for mode in ("theirs", "ours", "ours, sampling=True")
            )
            is_same = theirs[0] == ours[0]
            failed += not is_same
            plain = runs["ours, sampling=True", 0, setting][0]
            equal = sum(a == b for a, b in zip(sampling[0], plain, strict=True))
            times = "  ".join(f"{1000 * each[1]:6.2f}" for each in (theirs, ours, sampling))
            write(f"{num_drafts}  {setting:8} {times}  {is_same}  {equal} of {len(plain)} requests")
    return failed


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())

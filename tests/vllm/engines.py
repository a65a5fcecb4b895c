"""The engines of the tests: settings, and the requests that each runs, phase by phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.random_requests import random_requests

ROOT = Path(__file__).parents[2]
CHECKPOINT = "integration/tiny_model/checkpoint"
PROMPTS = [
    entry["prompt"] for entry in json.loads((ROOT / CHECKPOINT / "../prompts.json").read_text())
]
PLUGIN = {"kernels": "reference"}

Request = dict[str, Any]
"""``prompt`` and ``params``."""
Phases = dict[str, list[Request]]


def request(prompt: str, max_tokens: int = 32, **params: Any) -> Request:
    """Return a request; greedy without other options."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    return {"prompt": prompt, "params": params}


def greedy_and_sampled(prompts: list[str] = PROMPTS, max_tokens: int = 32) -> list[Request]:
    """Return each prompt greedy and at T = 0.8 with a seed, some with top-p and top-k."""
    truncation: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_p": 0.95, "top_k": 50},
    ]
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(request(prompt, max_tokens))
        options = {"temperature": 0.8, "seed": 1000 + number, **truncation[number % 4]}
        requests.append(request(prompt, max_tokens, **options))
    return requests


def job(
    num_drafts: int,
    phases: Phases,
    *,
    plugin: dict[str, Any] | None = PLUGIN,
    env: dict[str, str] | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """Return the settings of one engine.

    Args:
        num_drafts: K; 0: no speculative decoding.
        plugin: options of the plugin; None: off.
        env: more environment variables.
    """
    settings: dict[str, Any] = {
        "model": CHECKPOINT,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if plugin is not None:
        settings["additional_config"] = {"mtp_plugin": plugin}
    if num_drafts:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    return {"engine": settings | engine, "phases": phases, "env": env or {}}


PLAIN: Phases = {"plain": greedy_and_sampled()}
LONG: Phases = {"long": greedy_and_sampled(["".join(PROMPTS[n : n + 4]) for n in range(4)])}
"""Prompts of 110 to 140 tokens, each in two requests."""
FEW: Phases = {
    "plain": [
        request(prompt, 16, **options)
        for prompt in PROMPTS[:4]
        for options in ({}, {"temperature": 0.8, "seed": 3})
    ]
}
"""vLLM's own top-k and top-p do not run under Triton's interpreter."""
RANDOM = random_requests(PROMPTS, 60)
UNSEEDED: Phases = {
    "unseeded": [request(PROMPTS[0], 24, temperature=1.0) for _ in range(4)],
    "n": [
        request(PROMPTS[1], 16, temperature=0.8, seed=5, n=3),
        request(PROMPTS[1], 16, temperature=0.8, n=3),
    ],
}
NO_PLUGINS = {"VLLM_PLUGINS": ""}

JOBS: dict[str, dict[str, Any]] = {
    "k0": job(0, {**PLAIN, **LONG, **UNSEEDED, "random": RANDOM}),
    "k3": job(3, {**PLAIN, **UNSEEDED, "random": RANDOM}),
    "k1": job(1, PLAIN),
    "k2": job(2, PLAIN),
    "few_slots": job(3, PLAIN, max_num_seqs=3, max_num_batched_tokens=20),
    "few_blocks": job(
        3,
        PLAIN | LONG,
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=13,
        max_model_len=256,
    ),
    "triton_k3": job(3, {"random": RANDOM[:20]}, plugin={"kernels": "triton"}),
    "off": job(3, FEW, plugin=None),
    "without_package": job(3, FEW, plugin=None, env=NO_PLUGINS),
    "without_package_k0": job(0, FEW, plugin=None, env=NO_PLUGINS),
}
"""Name -> engine, in the order in which they start."""

EMBEDDED = {
    "engine": {
        "model": CHECKPOINT,
        "max_batch_size": 8,
        "max_num_tokens": 512,
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 8192},
        "attn_backend": "sdpa",
        "speculative_config": {
            "decoding_type": "MTP",
            "max_draft_len": 3,
            "mtp": {"kernels": "reference"},
        },
    },
    "phases": PLAIN,
    "env": {},
    "module": "tests.vllm.run_embedded",
}
"""The package's own executor."""
JOBS["embedded"] = EMBEDDED

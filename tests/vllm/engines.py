"""The engines of the tests: settings, and the requests that each runs, phase by phase."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from integration.vllm.random_requests import random_requests
from tests.vllm.options import BIAS, KEPT, REFUSED, TRUNCATION, WRONG_XARGS

ROOT = Path(__file__).parents[2]
CHECKPOINT = "integration/tiny_model/checkpoint"
PROMPTS = [
    entry["prompt"] for entry in json.loads((ROOT / CHECKPOINT / "../prompts.json").read_text())
]
PLUGIN = {"kernels": "reference"}
MAX_MODEL_LEN = 256
RANDOM_MODELS = "RANDOM_MODELS"
"""Replaced by a folder of the engine, with the checkpoints ``random_models`` of its job."""

Request = dict[str, Any]
"""``prompt`` and ``params``."""
Phases = dict[str, list[Request] | dict[str, Any]]
"""By name: requests, or the arguments of `run_engine.continuations` with the phase ``of``."""


def request(prompt: str | list[int], max_tokens: int = 32, **params: Any) -> Request:
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
        "max_model_len": MAX_MODEL_LEN,
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
    "few": [
        request(prompt, 16, **options)
        for prompt in PROMPTS[:4]
        for options in ({}, {"temperature": 0.8, "seed": 3})
    ]
}
"""vLLM's own top-k and top-p do not run under Triton's interpreter."""
RANDOM = random_requests(PROMPTS, 60)
LONGEST = ["".join((PROMPTS[n:] + PROMPTS[:n])[:7]) + PROMPTS[n][:25] for n in range(len(PROMPTS))]
"""Prompts of 224 to 242 tokens: some of their outputs end at `MAX_MODEL_LEN`."""
MIXED = random_requests(
    [*PROMPTS, *(each["prompt"] for each in LONG["long"]), *LONGEST], 40, seed=10, longest=48
)
FEW_GREEDY = [request(prompt, 16) for prompt in PROMPTS[:3]]
STARTED = (
    "whole",
    "experts as one tensor",
    "MTP layers of another model size",
    "projection transposed",
    "larger vocab_size",
    "MTP layers of another vocabulary",
    "no head, nothing said of it",
    "a projection of the target is missing",
    "no last norm",
    "a file of 0 bytes",
    "a stale index",
    "an index of absent files",
    "a file of its own for the MTP layers",
    "a stale whole file",
    "a tensor in two files",
)
"""Forms of checkpoints that are started."""
UNSEEDED: Phases = {
    "unseeded": [request(PROMPTS[0], 24, temperature=1.0) for _ in range(4)],
    "n": [
        request(PROMPTS[1], 16, temperature=0.8, seed=5, n=3),
        request(PROMPTS[1], 16, temperature=0.8, n=3),
    ],
}
OPTIONS_GREEDY: Phases = {
    "options greedy": [request(PROMPTS[2], 16, **options) for options in KEPT.values()]
}
OPTIONS: Phases = {
    **OPTIONS_GREEDY,
    "options sampled": [
        request(PROMPTS[2], 16, **{"temperature": 0.9, "seed": 11, **options})
        for options in (KEPT | TRUNCATION).values()
    ],
    "refused": [request(PROMPTS[0], 4, **options) for options, _ in REFUSED.values()],
    "token logprobs": [request(PROMPTS[0], 8, logprob_token_ids=[5, 6, 7])],
}
BIASED_OPTIONS = ("min_p", "logit_bias", "min_p and logit_bias")
BIASED: Phases = {
    phase: [{**each, "params": each["params"] | changes} for each in PLAIN["plain"]]
    for phase, changes in {
        "bias": {"logit_bias": BIAS},
        "min_p": {"min_p": 0.1},
        "both": {"min_p": 0.1, "logit_bias": BIAS},
    }.items()
}
ONE_TOKEN = [
    {**each, "params": each["params"] | more}
    for each in BIASED["both"][::2]
    for more in ({}, {"temperature": 0.8, "seed": 5, "min_p": 1.0})
]
"""Requests with one possible token at every position, whatever the method."""
NUM_SAMPLES = 160
SAMPLING = {"temperature": 0.8, "min_p": 0.05, "logit_bias": BIAS}


def samples(count: int, first_seed: int, *lengths: int) -> list[Request]:
    """Return requests with one prompt and a seed each; ``max_tokens`` are ``lengths`` in turn."""
    return [
        request(PROMPTS[1], lengths[n % len(lengths)], seed=first_seed + n, **SAMPLING)
        for n in range(count)
    ]


def of_many_lengths(requests: list[Request]) -> list[Request]:
    """Return the requests with lengths at which a batch of 8 shrinks one by one."""
    return [
        {**each, "params": each["params"] | {"max_tokens": 4 + 4 * (number % 8)}}
        for number, each in enumerate(requests)
    ]


NO_PLUGINS = {"VLLM_PLUGINS": ""}

TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "begin": "<call>",
                "content": {
                    "type": "json_schema",
                    "json_schema": KEPT["json"]["structured_outputs"]["json"],
                },
                "end": "</call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
PROCESSORS: Phases = {
    "thinking": [
        request(f"{PROMPTS[3]}\n<think>", 20, thinking_token_budget=budget, **options)
        for budget in (0, 1, 5, 9)
        for options in ({}, {"temperature": 0.9, "seed": budget})
    ],
    "custom": [
        request(prompt, 20, extra_args={"even": number % 3 != 2}, **options)
        for number, prompt in enumerate(PROMPTS[:3])
        for options in ({}, {"temperature": 0.9, "seed": number})
    ],
    "processed logprobs": [
        request(prompt, 12, temperature=0.7, seed=number, logprobs=2, frequency_penalty=number % 2)
        for number, prompt in enumerate(PROMPTS[:4])
    ],
    "structure after thinking": [
        request(f"{prompt}<think>", 48, ignore_eos=False, structured_outputs=structure, **options)
        for structure in (
            KEPT["json"]["structured_outputs"],
            KEPT["regex"]["structured_outputs"],
            {"structural_tag": json.dumps(TAG)},
        )
        for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])
        for options in (
            {},
            {"temperature": 0.9, "seed": 1},
            {"temperature": 0.9, "seed": 2},
            {"temperature": 0.9, "seed": 3},
        )
    ],
}
PROCESSOR_SETTINGS: dict[str, Any] = {
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
        "reasoning_parser": "newline",
        "reasoning_parser_plugin": "tests.vllm.reasoning",
    },
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    "logits_processors": ["tests.vllm.processors:EvenWithoutRepeats"],
    "logprobs_mode": "processed_logprobs",
}

LIMITS: list[dict[str, Any]] = [
    {},
    {"mtp_speculate": False},
    {"mtp_max_draft_len": 1},
    {"mtp_max_draft_len": 0},
    {"mtp_speculate": 1, "mtp_max_draft_len": 2},
]
"""Options that withhold drafts."""
RELAXED = {"mtp_relaxed_topk": 5, "mtp_relaxed_delta": 0.9}


def with_extra(requests: list[Request], *extra: dict[str, Any]) -> list[Request]:
    """Return the requests with these options of the plugin, in turn."""
    return [
        {**each, "params": {**each["params"], "extra_args": extra[number % len(extra)]}}
        for number, each in enumerate(requests)
    ]


SAMPLED = [
    request(prompt, 48, temperature=0.8, seed=seed)
    for number, prompt in enumerate(PROMPTS)
    for seed in (number, 100 + number)
]
MIXED_WITH_METHODS = with_extra(
    MIXED, *LIMITS, {"mtp_verification": "rejection"}, {"mtp_verification": "block"}
)
THINKING = [request(f"{prompt}\n<think>", 32) for prompt in PROMPTS]
LONG_THINKING = [
    request(f"{prompt}{middle}<think>", 48) for prompt in PROMPTS for middle in ("", "\n")
]
BANNED = range(200, 320)
BANS = {"logit_bias": dict.fromkeys(map(str, BANNED), -100.0), "logprobs": 20}
THINKING_BANNED = [{**each, "params": each["params"] | BANS} for each in THINKING]
RELAXED_BANNED = {"mtp_relaxed_topk": 5, "mtp_relaxed_delta": 0.3}
NEWLINE = 201
"""A token that ends the thinking phase in some outputs."""
METHODS: Phases = {
    "withheld": with_extra(PLAIN["plain"], *LIMITS),
    **{
        method: with_extra(SAMPLED, {"mtp_verification": method})
        for method in ("coupled", "rejection", "block")
    },
    # one batch; coupled requests among them
    "mixed": with_extra(
        PLAIN["plain"], {}, {"mtp_verification": "rejection"}, {}, {"mtp_verification": "block"}, {}
    ),
    **{
        f"{method} {name}": with_extra(requests, {"mtp_verification": method})
        for first_seed, method in ((10_000, "rejection"), (20_000, "block"))
        for name, requests in (
            ("one token", ONE_TOKEN),
            ("samples", samples(NUM_SAMPLES, first_seed, 5)),
        )
    },
    "strict": THINKING,
    "relaxed banned": with_extra(THINKING_BANNED, RELAXED_BANNED),
    "relaxed": with_extra(THINKING, RELAXED),
    "relaxed outside": with_extra(
        [
            request(prompt, 32, **options)
            for prompt in PROMPTS
            for options in ({}, {"temperature": 0.8, "seed": 3})
        ],
        RELAXED,
    ),
    "strict outside": [
        request(prompt, 32, **options)
        for prompt in PROMPTS
        for options in ({}, {"temperature": 0.8, "seed": 3})
    ],
}
TOP2: Phases = {
    "top2": [
        request(prompt, 32, logprobs=1, extra_args=options)
        for prompt in PROMPTS[:6]
        for options in (
            {},
            {"mtp_verification": "coupled"},
            {"mtp_verification": "top2", "mtp_max_draft_len": 0},
        )
    ]
}
"""For an engine with the method of ``integration/examples/top2.py``."""
_TEXT = "".join(PROMPTS[:3])
_COPYING = [f"{_TEXT}\n{_TEXT}\n{_TEXT[: len(_TEXT) // 3 + 5 * number]}" for number in range(4)]
"""The model goes on copying a text that the prompt has twice."""
COPIES: Phases = {
    "copies": [
        request(prompt, 48, **options)
        for number, prompt in enumerate(_COPYING)
        for options in ({}, {"temperature": 0.2, "seed": number})
    ],
}
ONE_COPY = with_extra(
    [
        request(prompt, 48, temperature=0.8, min_p=1.0, seed=number)
        for prompt in _COPYING
        for number in range(2)
    ],
    {"mtp_verification": "rejection"},
    {"mtp_verification": "block"},
)
"""With one possible token at every position, that of the greedy requests of `COPIES`."""
DRAFTS_BY_BATCH = [[1, 3, 0], [4, 5, 3], [6, 7, 2], [8, 8, 1]]
"""First and last batch size, and the drafts of a request."""
THINKING_TOKENS = {"thinking_begin_token": 1, "thinking_end_token": 2}
"""Token ids of ``<think>`` and ``</think>``."""


def keeps_probs(num_drafts: int) -> dict[str, Any]:
    """Return the setting that rejection sampling needs."""
    return {
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": num_drafts,
            "draft_sample_method": "probabilistic",
        }
    }


MODELS = {"deepseek_v3": "float32", "qwen3_5": "bfloat16"}
"""Configuration of a tiny model with dummy weights -> dtype that vLLM runs on the CPU."""


def model_job(name: str, num_drafts: int, *, wide: bool = False, on: bool = True) -> dict[str, Any]:
    """Return an engine with dummy weights, which has no tokenizer.

    Args:
        wide: weights of which logits differ by about 1; vLLM's own give nearly equal logits.
        on: with the plugin; else vLLM without the package, greedy requests alone.
    """
    temperatures = {"greedy": 0.0, "sampled": 0.8} if on else {"greedy": 0.0}
    phases = {
        phase: [
            {
                "prompt": list(range(start, 4 * start)),
                "params": {
                    "temperature": temperature,
                    "seed": start,
                    "max_tokens": 16,
                    "ignore_eos": True,
                    "detokenize": False,
                    "logprobs": 1,
                },
            }
            for start in (3, 7, 11, 15)
        ]
        for phase, temperature in temperatures.items()
    }
    made = job(
        num_drafts,
        phases,
        plugin=PLUGIN if on else None,
        env=None if on else NO_PLUGINS,
        model=f"tests/vllm/models/{name}",
        dtype=MODELS[name],
        max_model_len=256,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        load_format="dummy",
    )
    return made | {"wide_dummy_weights": wide}


HEADS = ("draft_model", "eagle", "eagle3", "dflash", "dflash2", "dspark")
"""Drafters of the Llama of `draft_models`, which is its own draft model."""
OF_NGRAM: Phases = {
    **PLAIN,
    "both": BIASED["both"],
    **{phase: OPTIONS[phase] for phase in ("options greedy", "options sampled")},
}
_OF_HEADS = {
    name: [
        request(list(range(start, 4 * start)), 24, detokenize=False, **options)
        for start in (3, 5, 7, 11, 15)
        for options in each
    ]
    for name, each in {
        "greedy": ({}, {"presence_penalty": 0.7}),
        "sampled": (
            {"temperature": 0.8, "seed": 1},
            {"temperature": 0.8, "seed": 2, "top_p": 0.9, "frequency_penalty": 0.5},
            {"temperature": 1.2, "seed": 3, "min_p": 0.05, "logit_bias": BIAS},
        ),
    }.items()
}
OF_HEADS: Phases = dict(_OF_HEADS)
MIXED_METHODS = ({}, {"mtp_verification": "rejection"}, {}, {"mtp_verification": "block"})


def head_job(name: str, num_drafts: int) -> dict[str, Any]:
    """Return an engine with a drafter of `HEADS`; ``llama``: none."""
    engine: dict[str, Any] = {"model": f"{RANDOM_MODELS}/llama", "skip_tokenizer_init": True}
    models, phases = ["llama"], dict(OF_HEADS)
    if num_drafts:
        drafts = "llama" if name == "draft_model" else name
        models.append(drafts)
        engine["speculative_config"] = {
            "method": name.removesuffix("2"),
            "model": f"{RANDOM_MODELS}/{drafts}",
            "num_speculative_tokens": num_drafts,
        }
        if name in MIXED_HEADS:
            engine["speculative_config"]["draft_sample_method"] = "probabilistic"
            phases["mixed"] = with_extra(_OF_HEADS["sampled"], *MIXED_METHODS)
    return job(0, phases, **engine) | {"random_models": models}


MIXED_HEADS = ("draft_model", "eagle3", "dspark")
"""With requests of ``rejection`` and ``block``."""

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

WAVES: Phases = {
    f"wave {number}": with_extra(
        samples(8, 30_000 + 8 * number, 4, 4, 6, 6, 9, 9, 9, 9),
        {"mtp_verification": ("rejection", "block")[number % 2]},
    )
    for number in range(NUM_SAMPLES // 8)
}
"""Requests of one batch, whose size falls from 8 to 6 to 4."""
TWO_RANKS: dict[str, Any] = {
    "env": {"TORCHDYNAMO_DISABLE": "1"},
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
}
REDUCED = 512
"""Of 2,048 ids."""
COUNTED_FILES = 60


def counted_ids(size: int) -> list[int]:
    """Return the most frequent ids of the training corpus, the standard library."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / CHECKPOINT / "tokenizer.json"))
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:COUNTED_FILES]
    encoded = tokenizer.encode_batch([file.read_text(encoding="utf-8") for file in files])
    counts = Counter(token for each in encoded for token in each.ids)
    return [token for token, _ in counts.most_common(size)]


JOBS: dict[str, dict[str, Any]] = {
    "k0": job(
        0,
        {
            **PLAIN,
            **LONG,
            **FEW,
            **UNSEEDED,
            **OPTIONS,
            **BIASED,
            "random": RANDOM,
            "mixed": MIXED,
            "samples": samples(NUM_SAMPLES, 0, 9),
            "other samples": [
                {**each, "params": each["params"] | {"logit_bias": {}}}
                for each in samples(NUM_SAMPLES, 0, 3)
            ],
            "strict banned": THINKING_BANNED,
        },
    ),
    "embedded": EMBEDDED,
    "k3": job(3, {**PLAIN, **UNSEEDED, **OPTIONS, **BIASED, "random": RANDOM}),
    "dynamic": job(
        3,
        {
            **{phase: of_many_lengths(each) for phase, each in {**PLAIN, **BIASED}.items()},
            **{
                f"{method} one token": of_many_lengths(
                    with_extra(ONE_TOKEN, {"mtp_verification": method})
                )
                for method in ("rejection", "block")
            },
            **WAVES,
        },
        speculative_config={
            **keeps_probs(3)["speculative_config"],
            "num_speculative_tokens_per_batch_size": DRAFTS_BY_BATCH,
        },
    ),
    "copies_k0": job(0, COPIES),
    "tail_k7": job(
        7,
        {
            **PLAIN,
            **COPIES,
            "mixed": METHODS["mixed"],
            "one copy": ONE_COPY,
        },
        plugin=PLUGIN | {"tail": {"ngram": 4}},
        model=f"{RANDOM_MODELS}/one_mtp_layer",
        **keeps_probs(7),
    )
    | {"random_models": ["one_mtp_layer"]},
    "auto": job(
        3,
        {**PLAIN, "both": BIASED["both"], "random": RANDOM},
        plugin=PLUGIN | {"draft_len": "auto"},
    ),
    "k1": job(1, PLAIN),
    "k2": job(2, PLAIN),
    "few_slots": job(3, PLAIN, max_num_seqs=3, max_num_batched_tokens=20),
    "reduced_k3": job(3, PLAIN, plugin=PLUGIN | {"draft_vocab": 512}),
    "counted_k3": job(
        3,
        {**PLAIN, "mixed": METHODS["mixed"]},
        plugin=PLUGIN | {"thinking_begin_token": 1, "thinking_end_token": 2047},
        **keeps_probs(3),
    )
    | {"counted_ids": REDUCED},
    # a list, so that rows are copied
    "reload_k1": job(1, {**PLAIN, **FEW, "negative": PLAIN["plain"]})
    | {
        "counted_ids": REDUCED,
        "weights": {"plain": "reloaded", "few": "draft", "negative": "target"},
    },
    "few_blocks": job(
        3,
        {
            **PLAIN,
            **LONG,
            "mixed": MIXED_WITH_METHODS,
        },
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=12,
        **keeps_probs(3),
    ),
    "off": job(3, FEW, plugin=None),
    "without_package": job(3, FEW, plugin=None, env=NO_PLUGINS),
    "without_package_k0": job(0, {**FEW, **OPTIONS_GREEDY}, plugin=None, env=NO_PLUGINS),
    "processors_k0": job(0, PROCESSORS, **PROCESSOR_SETTINGS),
    "processors_k3": job(3, PROCESSORS, **PROCESSOR_SETTINGS),
    "triton_k3": job(3, {"random": RANDOM[:10]}, plugin={"kernels": "triton"}),
    "two_ranks": job(3, FEW, **TWO_RANKS),
    "counted_two_ranks": job(3, FEW, **TWO_RANKS) | {"counted_ids": REDUCED - 1},
    "methods_k3": job(3, METHODS, plugin=PLUGIN | THINKING_TOKENS, **keeps_probs(3)),
    "relaxed_k3": job(
        3,
        {
            "strict": LONG_THINKING,
            "relaxed": with_extra(LONG_THINKING, RELAXED),
            "continued": {
                "of": "relaxed",
                "options": {
                    "after": NEWLINE,
                    "params": {"temperature": 0.0, "ignore_eos": True},
                },
            },
        },
        plugin=PLUGIN | {"thinking_begin_token": 1, "thinking_end_token": NEWLINE},
    ),
    "rejection_k1": job(
        1,
        {"plain": PLAIN["plain"][:8], **LONG},
        plugin=PLUGIN | {"verification": "rejection"},
        enable_prefix_caching=True,
        block_size=32,
        num_gpu_blocks_override=13,
        **keeps_probs(1),
    ),
    # the engine core, a process of its own, finds the method by the entry point in this folder
    "top2_k3": job(
        3,
        TOP2,
        plugin=PLUGIN | {"verification": "top2"},
        env={
            "PYTHONPATH": os.pathsep.join(("tests/vllm/shim", ".", "tests/vllm/top2")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        },
    ),
    "server": job(
        3,
        {
            **FEW,
            "options": [
                {**each, "params": {**each["params"], "vllm_xargs": LIMITS[number % len(LIMITS)]}}
                for number, each in enumerate(FEW["few"])
            ],
            "methods": [
                request(PROMPTS[0], 8, temperature=0.8, vllm_xargs=options)
                for options in ({"mtp_verification": "rejection"}, RELAXED, {"other": 1})
            ],
            "biased": [
                request(PROMPTS[2], 16, **{"temperature": 0.9, "seed": 11, **KEPT[option]})
                for option in BIASED_OPTIONS
            ],
            "refused": [request(PROMPTS[0], 4, vllm_xargs=options) for options, _ in WRONG_XARGS],
        },
        plugin=PLUGIN | THINKING_TOKENS,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        **keeps_probs(3),
    )
    | {"module": "tests.vllm.run_server"},
    "checkpoints": job(2, dict.fromkeys(STARTED, FEW_GREEDY), plugin=None)
    | {"module": "tests.vllm.run_checkpoints"},
    "ngram": job(
        3,
        OF_NGRAM,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 3,
        },
    ),
    **{name: head_job(name, 3) for name in HEADS},
    "llama_k0": head_job("llama", 0),
    **{f"{name}_k{k}": model_job(name, k) for name in MODELS for k in (0, 2)},
    **{f"{name}_wide_k2": model_job(name, 2, wide=True) for name in MODELS},
    **{f"{name}_without_package_k2": model_job(name, 2, wide=True, on=False) for name in MODELS},
}
"""Name -> engine, in the order in which they start."""

"""Requests with random options that vLLM serves with drafts."""

from __future__ import annotations

import random
from typing import Any

VOCAB_SIZE = 2048
STRUCTURES: list[dict[str, Any]] = [
    {"regex": "[a-z]{3,9}(, [a-z]{3,9}){2,6}"},
    {"choice": ["return None", "raise ValueError", "return result", "pass"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]


def random_requests(
    prompts: list[str], count: int, seed: int = 34, longest: int = 16
) -> list[dict[str, Any]]:
    """Return ``count`` requests; the same for every call with these arguments."""
    rng = random.Random(seed)
    return [
        {"prompt": rng.choice(prompts), "params": random_options(rng, number, longest)}
        for number in range(count)
    ]


def random_options(rng: random.Random, number: int, longest: int = 16) -> dict[str, Any]:
    """Return keyword arguments of vLLM's ``SamplingParams``.

    Args:
        number: determines the seed. longest: maximum of ``max_tokens``.
    """

    def chance(share: float) -> bool:
        return rng.random() < share

    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.6, 0.8, 1.0, 1.3]),
        "max_tokens": rng.randint(6, longest),
        "seed": 7000 + number,
    }
    if chance(0.3):
        options["top_k"] = rng.choice([1, 5, 40])
    if chance(0.3):
        options["top_p"] = rng.choice([0.5, 0.9, 0.97])
    if chance(0.25):
        options["presence_penalty"] = rng.uniform(-1, 2)
    if chance(0.25):
        options["frequency_penalty"] = rng.uniform(-1, 2)
    if chance(0.25):
        options["repetition_penalty"] = rng.uniform(0.8, 1.6)
    if chance(0.2):
        options["bad_words"] = rng.sample(["self", " the", "(", "return", " =", ":"], 3)
    if chance(0.35):
        options["logprobs"] = rng.choice([0, 2])
    if chance(0.15):
        options["prompt_logprobs"] = rng.choice([0, 2])
    if chance(0.2):
        options["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 100)
    if chance(0.2):
        options["stop"] = rng.choice([["\n"], [")", "self"], ["e "]])
        options["include_stop_str_in_output"] = chance(0.5)
    if chance(0.2):
        options["ignore_eos"] = True
    if chance(0.2):
        options["min_tokens"] = rng.randint(1, 5)
    if chance(0.2):
        options["structured_outputs"] = rng.choice(STRUCTURES)
    elif chance(0.2):
        options["allowed_token_ids"] = rng.sample(range(VOCAB_SIZE), rng.choice([3, 400]))
    if chance(0.2):
        options["min_p"] = rng.choice([0.02, 0.1, 0.5])
    if chance(0.2):
        biased = rng.sample(range(VOCAB_SIZE), rng.choice([5, 100]))
        options["logit_bias"] = {str(token): rng.uniform(-5, 5) for token in biased}
    return options

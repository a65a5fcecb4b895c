"""Batches of requests that are greedy, sampled, processed, or think under a budget."""

from __future__ import annotations

from typing import Any

from mtp_plugin.hosts.embedded import SamplingParams

BEGIN, END = 5, 6
VOCAB = 128
LOGPROBS = (5, None, 0, 20, 1)
PROMPT_LOGPROBS = (3, None, 0, 20)
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {},
    {"temperature": 0.9, "min_p": 0.2},
    {"top_p": 0.5},
    {"top_k": 9, "temperature": 0.4, "min_p": 0.01},
]
BUDGETS = (0, 1, 2, 3, 5, 7, None, 11)


def _edits(place: int, prompt: list[int]) -> dict[str, Any]:
    several: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.7, "prompt_ignore_length": 3, "frequency_penalty": -0.2},
        {"logit_bias": {token: (-1) ** token * 1.5 for token in range(0, VOCAB, 3)}},
        {"allowed_token_ids": tuple(range(1, VOCAB, 4))},
        {"bad_words": tuple((prompt[-1], b) for b in range(0, VOCAB, 2))[:60]},
        {"bad_token_ids": tuple(range(64)), "repetition_penalty": 1.1},
        {"frequency_penalty": 0.8, "presence_penalty": 0.5, "prompt_ignore_length": 100},
    ]
    return several[place % len(several)]


def _options(kind: str, place: int, prompt: list[int]) -> dict[str, Any]:
    if kind == "sampled":
        reported = {
            "logprobs": LOGPROBS[place % len(LOGPROBS)],
            "prompt_logprobs": PROMPT_LOGPROBS[place % len(PROMPT_LOGPROBS)],
        }
        return {**SAMPLED[place % len(SAMPLED)], "seed": 100 + place, **reported}
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7 + place}
    if kind == "processed":
        return {**_edits(place, prompt), **(sampled if place % 2 else {})}
    if kind == "thinking":
        budget = BUDGETS[place % len(BUDGETS)]
        return {"thinking_token_budget": budget, **(sampled if place % 3 == 2 else {})}
    return {}


KINDS = ("greedy", "sampled", "processed", "thinking")


def sampled_params(place: int, num_tokens: int, **more: Any) -> SamplingParams:
    """Return a request that samples, without log-probabilities."""
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
    options |= {**SAMPLED[place % len(SAMPLED)], "seed": 100 + place}
    return SamplingParams(**{**options, **more})


def thinking_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """Most think from the start, one from amid its prompt; one has thought already."""
    clean = [[t for t in prompt if t not in (BEGIN, END)] for prompt in prompts]
    thinking = [[BEGIN, *prompt] for prompt in clean]
    thinking[4] = [BEGIN, END, *clean[4]]
    thinking[5] = [*clean[5][:4], BEGIN, *clean[5][4:]]
    return thinking


def make_batch(
    kind: str, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of a batch of one kind."""
    prompts = thinking_prompts(prompts) if kind == "thinking" else prompts
    always = {"max_new_tokens": num_tokens, "ignore_eos": True}
    return prompts, [
        SamplingParams(**always, **_options(kind, place, prompt))
        for place, prompt in enumerate(prompts)
    ]

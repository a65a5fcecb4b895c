"""One request for each option of vLLM's ``SamplingParams``."""

from __future__ import annotations

from typing import Any

BIAS = {str(token): 5.0 for token in range(300, 320)}
"""As JSON has it; vLLM wants integers as keys."""

KEPT: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "bad_words": {"bad_words": ["self", " if", ".", "("]},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 2048, 3))},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": list(range(1, 121)), "ignore_eos": False},
    "stop": {"stop": ["self", "\n", ")"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": list(range(200, 300)), "ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "logprobs of the sampled token": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "flat_logprobs": {"logprobs": 2, "flat_logprobs": True},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,9}(, [a-z]{3,9}){2,6}"}},
    "choice": {"structured_outputs": {"choice": ["return None", "raise ValueError", "pass"]}},
    "json": {
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
            }
        }
    },
    "json_object": {"structured_outputs": {"json_object": True}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= ("ab" | "c" root "d")+'}},
    "min_p": {"min_p": 0.1},
    "logit_bias": {"logit_bias": BIAS},
    "min_p and logit_bias": {"min_p": 0.2, "logit_bias": BIAS},
    "min_p of one": {"min_p": 1.0},
    "logit_bias and presence_penalty": {"logit_bias": BIAS, "presence_penalty": 1.5},
    "logit_bias and regex": {
        "logit_bias": BIAS,
        "structured_outputs": {"regex": "[a-z]{3,9}(, [a-z]{3,9}){2,6}"},
    },
    "detokenize": {"detokenize": False},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}},
}
"""Served with drafts; greedy output equals that of vLLM without the package."""

TRUNCATION: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "thinking_token_budget": (
        {"thinking_token_budget": 3},
        "thinking_token_budget is set but reasoning_config is not configured",
    ),
    "trace_decode_token_ids": (
        {"trace_decode_token_ids": [1, 2]},
        "trace_decode_token_ids is not supported with speculative decoding",
    ),
    "extra_args": (
        {"extra_args": {"mtp_relaxed_topk": 3}},
        "extra_args: mtp_relaxed_topk: relaxed acceptance needs additional_config.mtp_plugin.",
    ),
    "unknown extra_args": (
        {"extra_args": {"mtp_x": 3}},
        "extra_args: mtp_x: unknown option of mtp_plugin; known ones are mtp_verification, ",
    ),
}
"""Options, and the start of the message with drafts."""

WRONG_XARGS: list[tuple[dict[str, Any], str]] = [
    ({"mtp_relaxed_topk": 0}, "mtp_relaxed_topk: expected an integer from 1 to 2147483647, got 0"),
    ({"mtp_verification": "typical"}, "mtp_verification: expected one of coupled, rejection, "),
    ({"mtp_max_draft_len": 4}, "mtp_max_draft_len: expected at most num_speculative_tokens = 3"),
    ({"mtp_speculate": "no"}, "mtp_speculate: expected True or False, got 'no'"),
    ({"mtp_relaxed_delta": -1, "mtp_x": 1}, "mtp_relaxed_delta: expected a number >= 0, got -1"),
]
"""Options of the plugin for a server, and part of the message of HTTP 400."""

"""Requests and outputs of vLLM as JSON values, and its counters."""

from __future__ import annotations

from typing import Any

_COUNTERS = ("num_preemptions", "prefix_cache_hits", "external_prefix_cache_hits")


def record(result: dict[str, Any], output: Any) -> None:
    """Add what a step returned for a request, whose outputs are cumulative."""
    completions = {completion.index: completion for completion in output.outputs}
    kept = result.setdefault("completions", {})
    if 0 in completions:
        before = len(kept[0]["tokens"]) if 0 in kept else 0
        result["new_tokens"].append(len(completions[0].token_ids) - before)
    for index, completion in completions.items():
        kept[index] = {
            "tokens": list(completion.token_ids),
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": plain(completion.logprobs),
        }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = plain(output.prompt_logprobs)
    result["prompt_token_ids"] = list(output.prompt_token_ids)
    if 0 in kept:
        result["tokens"] = kept[0]["tokens"]


def plain(logprobs: Any) -> Any:
    """Return log-probabilities as a list of [token id, value, rank] per position."""
    if logprobs is None:
        return None
    return [
        None if at is None else [[token, value.logprob, value.rank] for token, value in at.items()]
        for at in logprobs
    ]


def prompt_of(request: dict[str, Any]) -> Any:
    """Return a prompt as vLLM expects it: a text, or token ids."""
    prompt = request["prompt"]
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def sampling_params(options: dict[str, Any]) -> Any:
    """Return vLLM's ``SamplingParams`` of JSON values."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    options = dict(options)
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    if "logit_bias" in options:
        options["logit_bias"] = {int(key): value for key, value in options["logit_bias"].items()}
    if "repetition_detection" in options:
        detection = options["repetition_detection"]
        options["repetition_detection"] = RepetitionDetectionParams(**detection)
    return SamplingParams(**options)


def counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's counters of speculative decoding, preemptions and found KV blocks."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith("spec_decode") or name in _COUNTERS:
            found[name] = metric.values if hasattr(metric, "values") else metric.value
    return found


def acceptance_length(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return tokens per request and step between two `counters`; None: no drafts."""
    accepted, drafts = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
    )
    return round(1 + accepted / drafts, 3) if drafts else None


def difference(after: Any, before: Any) -> Any:
    """Return ``after - before`` of numbers or lists of numbers."""
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before

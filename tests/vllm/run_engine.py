"""Start one vLLM engine, run its phases and write the results as JSON.

``python -m tests.vllm.run_engine JOB RESULT``, in a process of its own: vLLM keeps global state.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the job in the file of the first argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    if job.get("wide_dummy_weights"):
        widen_dummy_weights()
    started = time.monotonic()
    llm = LLM(**job["engine"])
    config = llm.llm_engine.vllm_config
    result: dict[str, Any] = {
        "v2_runner": config.use_v2_model_runner,
        "start_seconds": time.monotonic() - started,
    }
    for name, requests in job["phases"].items():
        if isinstance(requests, dict):
            requests = continuations(result[requests["of"]]["outputs"], **requests["options"])
        before, started = counters(llm), time.monotonic()
        outputs = generate(llm, requests)
        seconds, after = time.monotonic() - started, counters(llm)
        result[name] = {
            "outputs": outputs,
            "seconds": seconds,
            "counters": {key: difference(after[key], before.get(key, 0)) for key in after},
        }
    Path(sys.argv[2]).write_text(json.dumps(result))


def continuations(
    outputs: list[dict[str, Any]], after: int, params: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return requests that continue outputs from the first token ``after`` on."""
    found = []
    for output in outputs:
        end = output["tokens"].index(after) + 1 if after in output["tokens"] else 0
        rest = len(output["tokens"]) - end
        if end and rest:
            prompt = output["prompt_token_ids"] + output["tokens"][:end]
            found.append({"prompt": prompt, "params": {**params, "max_tokens": rest}})
    return found


def widen_dummy_weights() -> None:
    """Make dummy weights that give logits which differ by about 1, instead of 1e-6."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    @torch.no_grad()
    def initialize(parameter: torch.Tensor) -> None:
        if torch.is_floating_point(parameter):
            rng = torch.Generator().manual_seed(parameter.numel())
            low, high = (0.5, 1.5) if parameter.ndim < 2 else (-0.15, 0.15)
            parameter.uniform_(low, high, generator=rng)

    dummy_loader.initialize_single_dummy_weight = initialize


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the requests in one batch; one that vLLM refuses gets ``{"error": message}``."""
    from vllm.exceptions import VLLMValidationError

    engine = llm.llm_engine
    results: list[dict[str, Any]] = []
    numbers = {}
    for number, request in enumerate(requests):
        results.append({"new_tokens": []})
        numbers[str(number)] = number
        try:
            engine.add_request(str(number), prompt_of(request), sampling_params(request["params"]))
        except (ValueError, VLLMValidationError) as error:
            results[number] = {"error": str(error)}
    while engine.has_unfinished_requests():
        for output in engine.step():
            record(results[numbers[output.request_id]], output)
    return results


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
    """Return vLLM's counters of speculative decoding and preemptions."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name.startswith("spec_decode") or name in ("num_preemptions", "prefix_cache_hits"):
            found[name] = metric.values if hasattr(metric, "values") else metric.value
    return found


def difference(after: Any, before: Any) -> Any:
    """Return ``after - before`` of numbers or lists of numbers."""
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


if __name__ == "__main__":
    main()

"""Start one vLLM engine, run its phases and write the results as JSON.

``python -m tests.vllm.run_engine JOB RESULT``, in a process of its own: vLLM keeps global state.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from integration.vllm.requests import (
    counters,
    difference,
    prompt_of,
    record,
    sampling_params,
)


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
    def initialize(parameter: torch.Tensor, **_: Any) -> None:
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


if __name__ == "__main__":
    main()

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
        if name in job.get("weights", {}):
            load_weights(llm, job["engine"]["model"], job["weights"][name])
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


def load_weights(llm: Any, checkpoint: str, how: str) -> None:
    """Load weights into the models of a running engine with one draft pass.

    With negative weights of the LM head and of the norms around it both models compute what they
    did. ``reloaded``: those of both again, after all were lost; ``draft``: negative norms of the
    draft model, and the head, which trainers send to both; ``target``: negative weights of the
    target.
    """
    from safetensors.torch import load_file

    if how == "reloaded":
        llm.collective_rpc(_lose_weights)
        llm.collective_rpc("reload_weights")
        return
    weights = load_file(f"{checkpoint}/model.safetensors")
    norms = [f"model.layers.12.{name}.weight" for name in ("hnorm", "shared_head.norm")]
    of_draft = [("lm_head.weight", weights["lm_head.weight"]), *((n, -weights[n]) for n in norms)]
    if how == "draft":
        llm.collective_rpc(
            lambda worker: worker.model_runner.speculator.model.load_weights(of_draft)
        )
        return
    for name in ("lm_head.weight", "model.norm.weight"):
        weights[name].neg_()
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})


def _lose_weights(worker: Any) -> None:
    """What sleep of level 2 does."""
    for model in (worker.model_runner.model, worker.model_runner.speculator.model):
        for parameter in model.parameters():
            parameter.data.zero_()


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

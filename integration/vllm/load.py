"""Functions that run in an engine's process: whole batches, their step times and outputs."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from integration.vllm.requests import acceptance_length, counters, sampling_params

Request = dict[str, Any]
"""``prompt`` (token ids) and ``params``."""


def text_prompts(llm: Any, texts: list[str], count: int, length: int) -> list[list[int]]:
    """Return prompts of ``length`` token ids: the texts in random order, without end."""
    rng = random.Random(0)
    tokenizer = llm.get_tokenizer()
    whole = [tokenizer.encode(text) for text in texts]
    prompts = []
    for _ in range(count):
        ids = [token for _ in range(8) for text in rng.sample(whole, len(whole)) for token in text]
        start = rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


NUM_UNTRACED = 5
"""Steps in which all requests generate before the traced ones."""


def run_batch(
    llm: Any, *, requests: list[Request], until_first_end: bool = False, num_traced: int = 0
) -> Any:
    """Run one batch.

    Args:
        until_first_end: abort the rest when the first request has finished.
        num_traced: trace so many steps with vLLM's profiler, then abort all.

    Returns:
        tokens of each request, ``step_ms`` of the steps in which every request generates, the
        median, and the acceptance length by vLLM's counters.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    before = counters(llm)
    for number, request in enumerate(requests):
        params = sampling_params({"ignore_eos": True, "detokenize": False, **request["params"]})
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, params)
    tokens: list[list[int]] = [[] for _ in requests]
    step_ms: list[float] = []
    last, finished = None, 0
    while engine.has_unfinished_requests():
        were_running = all(tokens) and not finished
        emitted = 0
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            emitted += bool(new)
            tokens[int(output.request_id.split("-")[0])] += new
            finished += output.finished
        now = time.perf_counter()
        if emitted:
            if were_running and emitted == len(requests) and last is not None and not finished:
                step_ms.append(1000 * (now - last))
                if num_traced and len(step_ms) == NUM_UNTRACED:
                    llm.start_profile()
            last = now
        is_traced = num_traced > 0 and len(step_ms) == NUM_UNTRACED + num_traced
        if is_traced:
            llm.stop_profile()
        if is_traced or (until_first_end and finished):
            engine.abort_request([str(number) for number in range(len(requests))])
    return {
        "tokens": tokens,
        "step_ms": step_ms,
        "median_ms": round(statistics.median(step_ms), 3) if step_ms else None,
        "acceptance_length": acceptance_length(before, counters(llm)),
    }

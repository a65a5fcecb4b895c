"""Functions that run in an engine's process: whole batches and prompts that arrive, their times."""

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


def run_arrivals(llm: Any, *, running: list[list[int]], new: list[list[int]]) -> dict[str, Any]:
    """Return times of prompts that arrive among running requests, in milliseconds.

    One prompt arrives after every third step. ``first_token_ms`` has one value per prompt;
    ``first_token_steps`` is the median number of steps from arrival to first token, ``gap`` the
    longest time between two steps.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def add(identifier: str, prompt: list[int], length: int) -> None:
        params = sampling_params({"ignore_eos": True, "detokenize": False, "max_tokens": length})
        params.temperature, params.output_kind = 0.0, RequestOutputKind.DELTA
        engine.add_request(identifier, {"prompt_token_ids": prompt}, params)

    for number, prompt in enumerate(running):
        add(f"r{number}", prompt, 350)
    waiting: dict[str, tuple[float, int]] = {}
    first: list[float] = []
    steps: list[int] = []
    gaps: list[float] = []
    last, count, num_added = time.perf_counter(), 0, 0
    while len(first) < len(new):
        outputs = [o for o in engine.step() if o.outputs[0].token_ids]
        now = time.perf_counter()
        if not outputs:
            continue
        count += 1
        if count > 20:  # all running requests generate
            gaps.append(now - last)
            if count % 3 == 0 and num_added < len(new):
                waiting[f"n{num_added}"] = time.perf_counter(), count
                add(f"n{num_added}", new[num_added], 8)
                num_added += 1
        last = now
        for output in outputs:
            begun = waiting.pop(output.request_id.split("-")[0], None)
            if begun is not None:
                first.append(now - begun[0])
                steps.append(count - begun[1])
    engine.abort_request([f"r{number}" for number in range(len(running))])
    while engine.has_unfinished_requests():
        engine.step()
    tenths = statistics.quantiles(first, n=10)
    return {
        "first_token_ms": [1000 * each for each in first],
        "first_token_median": round(1000 * statistics.median(first), 2),
        "first_token_p90": round(1000 * tenths[-1], 2),
        "first_token_steps": statistics.median(steps),
        "gap": round(1000 * max(gaps), 2),
    }

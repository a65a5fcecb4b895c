"""Random requests to an engine with drafts: arrivals, options, aborts."""

from __future__ import annotations

import faulthandler
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integration.vllm.random_requests import random_options
from integration.vllm.requests import (
    acceptance_length,
    counters,
    prompt_of,
    record,
    sampling_params,
)

STALL_SECONDS = 180.0
"""Without any output for so long, an engine with requests hangs."""
ABORTED = 0.1
"""Share of requests that are aborted, if they have not finished by then."""
NOT_COMPARED = 0.3
"""Share of requests whose output may differ from that without drafts."""
LIMITED = 0.2
"""Share of the compared requests whose drafts are withheld, all or some."""
SEVERAL = 0.1
"""Share of the others with three outputs."""
THINKING_TOKENS = {"thinking_begin_token": 1, "thinking_end_token": 2}
"""``<think>`` and ``</think>`` of the tiny model."""
Request = dict[str, Any]
"""``number``, ``prompt``, ``params``, ``is_compared``, ``num_drafts`` (K), ``limit`` (most drafts
of a step) and ``patience`` (steps after which it is aborted; None: never)."""


def make_requests(
    texts: list[str],
    seed: int,
    num_drafts: int,
    longest: int,
    methods: tuple[str, ...],
    plain: int = 0,
) -> Iterator[Request]:
    """Yield requests without end, the same for the same arguments.

    Args:
        texts: prompts are pieces of them in a row. longest: maximum of ``max_tokens``.
        methods: verification methods of requests that are not compared.
        plain: so many greedy requests come first, then as many at a temperature of 0.8.
    """
    rng = random.Random(seed)
    number = 0
    while number < 2 * plain:
        yield {
            "number": number,
            "prompt": texts[number % len(texts)],
            "params": {
                "temperature": 0.0 if number < plain else 0.8,
                "max_tokens": longest,
                "seed": number,
                "ignore_eos": True,
            },
            "is_compared": True,
            "num_drafts": num_drafts,
            "limit": num_drafts,
            "patience": None,
        }
        number += 1
    while True:
        text = "".join(rng.choices(texts, k=rng.choice([1, 1, 2, 4])))
        request = {
            "number": number,
            "prompt": text[-rng.randint(10, 400) :],
            "params": random_options(rng, number, longest),
            "is_compared": rng.random() >= NOT_COMPARED,
            "num_drafts": num_drafts,
            "limit": num_drafts,
            "patience": rng.randint(0, longest // 2) if rng.random() < ABORTED else None,
        }
        if not request["is_compared"]:
            _make_incomparable(request, rng, methods)
        elif rng.random() < LIMITED:
            limit = rng.randrange(num_drafts)
            request["limit"] = limit
            extra = {"mtp_max_draft_len": limit} if limit else {"mtp_speculate": False}
            request["params"]["extra_args"] = extra
        elif rng.random() < SEVERAL and request["params"]["temperature"]:
            request["params"]["n"] = 3
        yield request
        number += 1


def _make_incomparable(request: Request, rng: random.Random, methods: tuple[str, ...]) -> None:
    params = request["params"]
    kind = rng.choice(["unseeded", "relaxed", *methods])
    if kind == "unseeded":
        del params["seed"]
    elif kind == "relaxed":
        request["prompt"] += "<think>"
        params["temperature"] = 0.0
        params["extra_args"] = {"mtp_relaxed_topk": 5, "mtp_relaxed_delta": 0.9}
    else:
        params["extra_args"] = {"mtp_verification": kind}


class Watchdog:
    """Ends the process if an engine hangs; prints the stacks first."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._last = time.monotonic()
        self._armed = 0.0

    def check(self, has_output: bool) -> None:
        """Report a step.

        Raises:
            RuntimeError: no output for `STALL_SECONDS`; describes the requests.
        """
        now = time.monotonic()
        if has_output:
            self._last = now
        if now - self._last > STALL_SECONDS:
            raise RuntimeError(
                f"no output for {STALL_SECONDS:.0f} s; requests: {_scheduled(self._llm)}"
            )
        if now - self._armed > STALL_SECONDS / 20:
            self._armed = now
            faulthandler.dump_traceback_later(STALL_SECONDS, exit=True)

    def stop(self) -> None:
        """End the supervision."""
        faulthandler.cancel_dump_traceback_later()


def _scheduled(llm: Any) -> list[str]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return [
        f"{request.request_id} {request.status.name}, computed {request.num_computed_tokens} of "
        f"{request.num_tokens} tokens, {len(request.spec_token_ids)} drafts, "
        f"{request.num_output_tokens} of {request.max_tokens} output tokens"
        for request in scheduler.requests.values()
    ]


def run_traffic(
    llm: Any,
    *,
    seconds: float,
    seed: int,
    texts: list[str],
    longest: int,
    finished_file: str,
    plain: int = 0,
) -> dict[str, Any]:
    """Serve random traffic, then all requests that are left.

    Args:
        plain: see `make_requests`; they are submitted at once.
        finished_file: each compared request and its output is appended to it as a line of JSON,
            and ``{"end": true}`` at the end.

    Returns:
        counts, and problems (one line each).
    """
    engine = llm.llm_engine
    config = engine.vllm_config
    num_drafts = config.speculative_config.num_speculative_tokens
    num_seqs = config.scheduler_config.max_num_seqs
    methods: tuple[str, ...] = ()
    if config.speculative_config.draft_sample_method == "probabilistic":
        methods = ("rejection", "block")
    requests = make_requests(texts, seed, num_drafts, longest, methods, plain)
    rng = random.Random(seed + 1)
    running: dict[str, tuple[Request, dict[str, Any]]] = {}
    counts = dict.fromkeys(("requests", "tokens", "aborted", "compared", "steps"), 0)
    problems: list[str] = []
    before, started, load, watchdog = counters(llm), time.monotonic(), 0, Watchdog(llm)
    with Path(finished_file).open("w") as file:

        def finish(identifier: str, is_aborted: bool) -> None:
            request, result = running.pop(identifier)
            tokens = result.get("tokens", [])
            counts["tokens"] += len(tokens)
            counts["aborted"] += is_aborted
            problems.extend(_problems(request, result, is_aborted))
            for line in outputs_of(request, result) if request["is_compared"] else ():
                counts["compared"] += 1
                file.write(json.dumps({**line, "is_aborted": is_aborted}) + "\n")
                file.flush()

        while time.monotonic() - started < seconds or running:
            if counts["steps"] % 40 == 0:  # from an idle engine to one with a long queue
                load = rng.randint(0, 3 * num_seqs)
            if time.monotonic() - started >= seconds:
                load = 0
            is_plain = counts["requests"] < 2 * plain
            while is_plain or (len(running) < load and rng.random() < 0.7):
                request = next(requests)
                counts["requests"] += 1
                is_plain = counts["requests"] < 2 * plain
                identifier = str(request["number"])
                running[identifier] = (request, {"new_tokens": [], "since": counts["steps"]})
                params = sampling_params(request["params"])
                engine.add_request(identifier, prompt_of(request), params)
            for identifier, (request, result) in list(running.items()):
                patience = request["patience"]
                if patience is not None and counts["steps"] - result["since"] > patience:
                    engine.abort_request([identifier])
                    finish(identifier, True)
            counts["steps"] += 1
            outputs = engine.step()
            watchdog.check(bool(outputs) or not running)
            for output in outputs:
                identifier = output.request_id.split("-")[0]
                if identifier in running:
                    record(running[identifier][1], output)
                    if output.finished:
                        finish(identifier, False)
        file.write(json.dumps({"end": True}) + "\n")
    watchdog.stop()
    counts["seconds"] = round(time.monotonic() - started, 1)
    after = counters(llm)
    counts["preemptions"] = after["num_preemptions"] - before["num_preemptions"]
    counts["acceptance_length"] = acceptance_length(before, after)
    return {"counts": counts, "problems": problems + leaks(llm), "methods": methods}


def outputs_of(request: Request, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each output as that of a request with one output, whose seed vLLM counts up."""
    params = dict(request["params"])
    if params.pop("n", 1) == 1:
        return [{**request, "result": result}]
    return [
        {
            **request,
            "number": f"{request['number']}.{index}",
            "params": {**params, "seed": params["seed"] + index},
            "result": {**result, "tokens": completion["tokens"], "completions": {0: completion}},
        }
        for index, completion in result.get("completions", {}).items()
    ]


def _problems(request: Request, result: dict[str, Any], is_aborted: bool) -> list[str]:
    """Return what is wrong with an output whatever the model says."""
    tokens = result.get("tokens", [])
    found = []
    most = request["limit"] + 1
    if any(count > most for count in result["new_tokens"]):
        found.append(f"{max(result['new_tokens'])} tokens in a step, at most {most} are allowed")
    if not is_aborted:
        reason, wanted = result["completions"][0]["finish_reason"], request["params"]["max_tokens"]
        # vLLM ends requests by an error that ignore the end of their grammar, without drafts too
        is_structured = "structured_outputs" in request["params"]
        is_expected = {
            "length": len(tokens) == wanted,
            "stop": 0 < len(tokens) <= wanted,
            "error": is_structured,
        }
        if not is_expected.get(reason, False):
            found.append(f"{len(tokens)} of {wanted} tokens, finish reason {reason}")
    return [f"request {request['number']}: {problem}" for problem in found]


def leaks(llm: Any) -> list[str]:
    """Return which KV blocks and slots an engine without requests holds."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(4):  # the worker frees slots in the step after the last
        llm.llm_engine.step()
    pool = core.scheduler.kv_cache_manager.block_pool
    free = {
        # one block is never used
        "KV blocks": (pool.get_num_free_blocks(), pool.num_gpu_blocks - 1)
    }
    for rank, slots in enumerate(core.model_executor.collective_rpc(_free_slots)):
        free[f"slots of rank {rank}"] = slots
    return [
        f"{name}: {count} of {whole} free without requests"
        for name, (count, whole) in free.items()
        if count != whole
    ]


def _free_slots(worker: Any) -> tuple[int, int]:
    states = worker.model_runner.req_states
    return len(set(states.free_indices)), states.max_num_reqs


def model_runner(llm: Any) -> Any:
    """Return vLLM's model runner of an engine without a process of its own."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.model_runner

"""Further checks of ``integration.sglang.proof``: random requests, distributions, the embedded
executor, planted defects and a soak."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import traceback
from collections import Counter
from importlib.metadata import version
from typing import Any

from integration.sglang.engine_process import CHECKPOINT, EngineError
from integration.vllm.methods import LEAST_P, NUM_TESTED, chi_square
from integration.vllm.random_requests import random_options

Request = dict[str, Any]
Prompts = list[list[int]]
NUM_RANDOM = 150
SAMPLES = 4096
"""Requests of a chi-square test."""
EXECUTOR_KINDS = (
    "greedy",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "bias",
    "min_p_top_p",
)
"""Cases whose options mean the same in the embedded executor, with one output."""
SECONDS = 300.0
SOAKED, GRACE = 2000, 60.0
"""Different requests of a soak; seconds in which it has to end."""
_OTHER_NAMES = {
    "sampling_seed": "seed",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
_SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos")


def random_requests(
    prompts: Prompts, count: int, *, longest: int, grammars: bool, seed: int = 34
) -> list[Request]:
    """Return requests with random options, without penalties and ``min_new_tokens``, which are
    SGLang's own; the same for every call with these arguments."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        given = random_options(rng, number, longest)
        params = {name: given[name] for name in _SAME_NAME if name in given}
        params |= {"max_new_tokens": given["max_tokens"], "sampling_seed": given["seed"]}
        if "logit_bias" in given:
            params["logit_bias"] = given["logit_bias"]
        structure = given.get("structured_outputs", {})
        if grammars and "regex" in structure:
            params["regex"] = structure["regex"]
        made.append({"input_ids": rng.choice(prompts), "sampling_params": params})
    return made


def compare_random(proof: Any, prompts: Prompts) -> None:
    """Compare random requests with the engine without drafts."""
    grammars = proof.given.grammar != "none"
    requests = random_requests(prompts, NUM_RANDOM, longest=64, grammars=grammars)
    proof.compare_engines("random", requests)


class Executor:
    """The embedded executor in a process of its own, which begins at once with all cases."""

    def __init__(self, dtype: str, cases: dict[str, list[Request]]) -> None:
        self.cases = cases
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_executor, args=(theirs, dtype, cases))
        self._process.start()
        theirs.close()

    def result(self, seconds: float) -> list[list[int]]:
        """Return the tokens of the next case."""
        try:
            if not self._pipe.poll(seconds):
                raise EngineError(f"the embedded executor does not answer after {seconds:.0f} s")
            is_ok, found = self._pipe.recv()
        except EOFError:
            is_ok, found = False, "ended"
        if not is_ok:
            raise EngineError(f"the embedded executor: {found}")
        tokens: list[list[int]] = found
        return tokens

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def compare_executor(proof: Any, executor: Executor) -> None:
    """Compare the engine without drafts with the embedded executor, for the same seeds."""
    for case, requests in executor.cases.items():
        expected = proof.engines["k0"].call("run", SECONDS, requests=requests)
        # reasons are written otherwise
        found = [
            {"tokens": [tokens], "finish": output.get("finish")}
            for tokens, output in zip(executor.result(SECONDS), expected, strict=True)
        ]
        report = proof.compare(f"{case}, executor", requests, expected, found, None)
        proof.result.setdefault("executor", {})[case] = report


def executor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a request of SGLang under the names of this package."""
    made = dict(options)
    for theirs, ours in _OTHER_NAMES.items():
        if theirs in made:
            made[ours] = made.pop(theirs)
    if made.get("logit_bias"):
        made["logit_bias"] = {int(token): value for token, value in made["logit_bias"].items()}
    return made


def _run_executor(pipe: Any, dtype: str, cases: dict[str, list[Request]]) -> None:
    if version("sglang") == "0.5.17":  # it needs an older transformers than the executor
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path.sort(key=added.__contains__)
    try:
        import torch

        from mtp_plugin import LLM, SamplingParams

        device = "cuda" if torch.cuda.is_available() else "cpu"
        llm = LLM(
            model=str(CHECKPOINT),  # SGLang's copy declares fewer MTP layers than it has
            dtype=dtype,
            device=device,
            max_batch_size=32,
            kv_cache_config={"max_tokens": 40000},
        )
        for requests in cases.values():
            options = [executor_options(request["sampling_params"]) for request in requests]
            params = [SamplingParams(**each) for each in options]
            prompts = [request["input_ids"] for request in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            pipe.send((True, [list(output.outputs[0].token_ids) for output in outputs]))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def compare_distributions(proof: Any, prompt: list[int], samples: int) -> None:
    """Test tokens sampled with drafts against tokens without drafts and with other seeds; with
    another temperature, which has to be found, as a control."""
    drafted = f"k{proof.drafts[0]}"
    runs = [("k0", 0.8, 0), (drafted, 0.8, 10**6), (drafted, 0.9, 2 * 10**6)]
    counts = []
    for name, temperature, first_seed in runs:
        requests = [
            {
                "input_ids": prompt,
                "sampling_params": {
                    "temperature": temperature,
                    "sampling_seed": first_seed + number,
                    "max_new_tokens": NUM_TESTED,
                    "ignore_eos": True,
                },
            }
            for number in range(samples)
        ]
        outputs = proof.engines[name].call("run", SECONDS, requests=requests)
        tokens = [output["tokens"][0] for output in outputs]
        by_position: dict[str, Counter[Any]] = {}
        for position in range(1, NUM_TESTED):
            by_position[f"token {position}"] = Counter(each[position] for each in tokens)
            pairs = Counter(tuple(each[position - 1 : position + 1]) for each in tokens)
            by_position[f"tokens {position - 1} and {position}"] = pairs
        counts.append(by_position)
    tests = [
        {name: chi_square(each[name], counts[0][name]) for name in counts[0]} for each in counts[1:]
    ]
    equal, control = (min(p for p, _ in each.values()) * len(each) for each in tests)
    proof.result["chi_square"] = {
        "samples": samples,
        "tests": tests[0],
        "control": tests[1],
        "compared": samples,
        "different": int(equal < LEAST_P) + int(control >= LEAST_P),
    }


def find_defects(proof: Any, requests: list[Request]) -> None:
    """Check that the comparison finds each planted defect."""
    names = [name for name in proof.engines if name.startswith("defect-")]
    proof.run_all(names, requests[::-1])  # the second time, slots have had another request
    outputs = proof.run_all(["k0", *names], requests)
    for name in names:
        report = proof.compare(name, requests, outputs["k0"], outputs[name], name, keeps=False)
        report["found"] = report["different"]
        report["different"] = int(not report["found"])  # the proof fails if it is not found
        proof.result.setdefault("defects", {})[name.removeprefix("defect-")] = report


def soak(proof: Any, prompts: Prompts) -> None:
    """Serve random traffic with aborts in few slots and a small cache for ``--seconds``, compare
    its outputs, and let SGLang check its pools when it is idle."""
    seconds, grammars = proof.given.seconds, proof.given.grammar != "none"
    requests = random_requests(prompts, SOAKED, longest=96, grammars=grammars, seed=9)
    engine = proof.engines["small"]
    engine.send("soak", requests=requests, seconds=seconds, seed=1)
    known: list[Any] = []
    for first in range(0, SOAKED, 256):  # meanwhile
        part = requests[first : first + 256]
        known += proof.engines["k0"].call("run", SECONDS, requests=part)
    served = engine.result(seconds + GRACE)
    kept = [(number % SOAKED, output) for number, output in served if not output["aborted"]]
    chosen, expected = [requests[i] for i, _ in kept], [known[i] for i, _ in kept]
    report = proof.compare("soak", chosen, expected, [output for _, output in kept], "small")
    leaks = engine.log_lines("leak detected")
    again = engine.call("run", GRACE, requests=chosen[:4])  # it ended if a slot leaked
    report |= {
        "seconds": seconds,
        "requests": len(served),
        "aborted": len(served) - len(kept),
        "retractions": sum(output.get("retractions", 0) for _, output in kept),
        "leaks": leaks,
    }
    report["different"] += len(leaks) + sum("error" in output for output in again)
    proof.result["soak"] = report

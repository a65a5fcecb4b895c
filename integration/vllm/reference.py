"""Runs requests without drafts and compares the outputs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from integration.vllm.requests import prompt_of, record, sampling_params
from integration.vllm.traffic import Request, Watchdog, leaks, model_runner

Unequal = tuple[Request, dict[str, Any], int]
"""A request, its output without drafts, and the position of the first token that differs."""


def run_reference(
    llm: Any, *, finished_file: str, margin: float, logprob_tolerance: float
) -> dict[str, Any]:
    """Run the requests of a file, which may still grow, and compare the outputs.

    Args:
        finished_file: of `run_traffic`.
        margin: see `find_ties`.
        logprob_tolerance: maximum difference of log-probabilities.

    Returns:
        counts, and problems (one line each).
    """
    engine = llm.llm_engine
    most = 4 * engine.vllm_config.scheduler_config.max_num_seqs
    counts = dict.fromkeys(("compared", "tokens", "equal", "ties", "failures"), 0)
    problems: list[str] = []
    running: dict[str, tuple[Request, dict[str, Any]]] = {}
    unequal: list[Unequal] = []
    lines, watchdog, is_complete = _Lines(Path(finished_file)), Watchdog(llm), False
    while running or not is_complete:
        while len(running) < most and not is_complete:
            request = lines.next()
            if request is None:
                break
            is_complete = "end" in request
            if not is_complete:
                identifier = str(request["number"])
                running[identifier] = (request, {"new_tokens": []})
                engine.add_request(identifier, prompt_of(request), _params(request))
        if not running:
            time.sleep(0.01)
            watchdog.check(True)
            continue
        outputs = engine.step()
        watchdog.check(bool(outputs))
        for output in outputs:
            identifier = output.request_id.split("-")[0]
            record(running[identifier][1], output)
            if not output.finished:
                continue
            request, expected = running.pop(identifier)
            counts["compared"] += 1
            counts["tokens"] += len(request["result"].get("tokens", []))
            position = first_difference(request, expected)
            if position is not None:
                unequal.append((request, expected, position))
                continue
            found = other_differences(request, expected, logprob_tolerance)
            problems += [f"request {request['number']}: {line}" for line in found]
            counts["failures" if found else "equal"] += 1
    watchdog.stop()
    problems += leaks(llm)
    ties = find_ties(llm, unequal, margin)
    for request, expected, position in unequal:
        is_tie = str(request["number"]) in ties
        counts["ties" if is_tie else "failures"] += 1
        if not is_tie:
            got, wanted = (
                result.get("tokens", [])[position : position + 4]
                for result in (request["result"], expected)
            )
            problems.append(
                f"request {request['number']}: token {position}: {got} with drafts, {wanted} "
                f"without; options {request['params']}"
            )
    return {"counts": counts, "problems": problems}


def _params(request: Request, **changed: Any) -> Any:
    """Without our options, which only concern drafts."""
    options = {k: v for k, v in request["params"].items() if k != "extra_args"}
    return sampling_params(options | changed)


def first_difference(request: Request, expected: dict[str, Any]) -> int | None:
    """Return the position of the first token that differs; None: the outputs are equal.

    An aborted request must have the first tokens of the expected output. The tokens of a step that
    follow a stop string, or a token that the grammar rejects, are no difference: vLLM may append
    them.
    """
    got, wanted = request["result"].get("tokens", []), expected["tokens"]
    ends = [expected["completions"][0], *request["result"].get("completions", {}).values()]
    if isinstance(ends[0]["stop_reason"], str) or any(
        end["finish_reason"] == "error" for end in ends
    ):
        got = got[: max(len(wanted), len(got) - request["num_drafts"])]
    for position, (token, other) in enumerate(zip(got, wanted, strict=False)):
        if token != other:
            return position
    shorter = min(len(got), len(wanted))
    is_whole = len(got) == len(wanted) or (request["is_aborted"] and len(got) == shorter)
    return None if is_whole else shorter


def differing(
    requests: list[Request], got: list[list[int]], expected: list[list[int]]
) -> list[Unequal]:
    """Return the requests of a batch whose tokens ``got`` are not those ``expected``; their prompts
    are token ids."""
    found: list[Unequal] = []
    for number, (request, ours, wanted) in enumerate(zip(requests, got, expected, strict=True)):
        if ours != wanted:
            pairs = enumerate(zip(ours, wanted, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(wanted)))
            given = {**request, "number": number, "result": {"tokens": ours}}
            found.append((given, {"tokens": wanted, "prompt_token_ids": request["prompt"]}, at))
    return found


def other_differences(
    request: Request, expected: dict[str, Any], logprob_tolerance: float
) -> list[str]:
    """Return how outputs with the same tokens differ."""
    if request["is_aborted"]:
        return []
    got, wanted = request["result"]["completions"]["0"], expected["completions"][0]
    is_same_end = _ends_in_same_step(request, got, wanted)
    names = [] if is_same_end else ["text", "finish_reason", "stop_reason"]
    found = [
        f"{name} is {got[name]!r} with drafts, {wanted[name]!r} without"
        for name in names
        if got[name] != wanted[name]
    ]
    for name, ours, theirs in (
        ("logprobs", got["logprobs"], wanted["logprobs"]),
        (
            "prompt_logprobs",
            request["result"].get("prompt_logprobs"),
            expected.get("prompt_logprobs"),
        ),
    ):
        # see `first_difference` about tokens after a stop string
        ours = ours[: len(theirs)] if ours and theirs else ours
        difference = logprob_difference(ours, theirs)
        if difference > logprob_tolerance:
            found.append(f"{name} differ by {difference:.2g}")
    return found


def _ends_in_same_step(request: Request, got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the outputs differ only since with drafts one step has more of their tokens.

    A step with a token that the grammar rejects ends with an error even if a stop token follows or
    precedes it, but with "stop" if a token of the step completes a stop string.
    """
    stops = request["params"].get("stop", [])
    text = got["text"]
    if got["stop_reason"] in stops and not request["params"].get("include_stop_str_in_output"):
        text += got["stop_reason"]
    if not text.startswith(wanted["text"]):
        return False
    reasons = (got["finish_reason"], wanted["finish_reason"])
    ends = [each["stop_reason"] for each in (got, wanted)]
    if reasons == ("stop", "error"):
        return ends[0] in stops
    if reasons == ("stop", "stop") and all(end in stops for end in ends):
        return bool(stops.index(ends[0]) < stops.index(ends[1]))
    return reasons in (("error", "error"), ("error", "stop"))


def logprob_difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of log-probabilities of the tokens that both lists hold."""
    if ours is None or theirs is None or len(ours) != len(theirs):
        return 0.0 if ours is None and theirs is None else float("inf")
    largest = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        values = {token: value for token, value, _ in mine or []}
        for token, value, _ in other or []:
            if token in values:
                largest = max(largest, abs(values[token] - value))
        if (mine is None) != (other is None):
            return float("inf")
    return largest


def find_ties(llm: Any, unequal: list[Unequal], margin: float) -> set[str]:
    """Return the numbers of the requests whose different token is a tie.

    Runs the requests again, each to the position of its difference, with the tokens that both
    outputs have before it. There the logit (after the logits processors) of the token with drafts
    is raised by ``margin``, that of the token without drafts is lowered by it, and our op samples
    again with the request's options and noise: at a tie, that gives the token with drafts. This
    covers greedy and sampled requests, and tokens at the border of top-k or top-p.
    """
    engine, runner = llm.llm_engine, model_runner(llm)
    ops, original = runner.sampler.ops, runner.sampler.ops.sample
    again, ties = {}, set()
    for request, expected, position in unequal:
        if position < min(len(request["result"].get("tokens", [])), len(expected["tokens"])):
            again[str(request["number"])] = (request, expected, position)

    def sample(logits: Any, indices: Any, positions: Any, *rest: Any) -> Any:
        tokens = original(logits, indices, positions, *rest).clone()
        identifiers = runner.req_states.index_to_req_id
        for row, (slot, at) in enumerate(zip(indices.tolist(), positions.tolist(), strict=True)):
            if slot not in identifiers:  # a row that pads the batch
                continue
            number = identifiers[slot].split("-")[0]
            request, expected, position = again[number]
            index = at + 1 - len(expected["prompt_token_ids"])
            if 0 <= index < position:
                tokens[row] = expected["tokens"][index]
            elif index == position:
                got, wanted = request["result"]["tokens"][index], expected["tokens"][index]
                changed = logits[row : row + 1].float().clone()
                changed[0, got] += margin
                changed[0, wanted] -= margin
                other = original(changed, indices[row : row + 1], positions[row : row + 1])
                if int(other[0]) == got:
                    ties.add(number)
        return tokens

    ops.sample = sample
    try:
        for number, (request, _, position) in again.items():
            length = position + 1
            least = min(request["params"].get("min_tokens", 0), length)
            params = _params(request, max_tokens=length, min_tokens=least)
            engine.add_request(number, prompt_of(request), params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        del ops.sample
    return ties


class _Lines:
    """The lines of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._lines: list[bytes] = []

    def next(self) -> Request | None:
        """Return the next line's value; None: not written yet."""
        if not self._lines and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
            self._offset += len(data)
            *self._lines, self._rest = (self._rest + data).split(b"\n")
        if not self._lines:
            return None
        line: Request = json.loads(self._lines.pop(0))
        return line

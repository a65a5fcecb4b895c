"""Proof on a GPU: SGLang with the plugin gives one output per seed, whatever the number of drafts.

python -m integration.sglang.proof --json result.json               # storm, then all cases
python -m integration.sglang.proof --only storm                      # aborts and retractions alone
python -m integration.sglang.proof --only random,executor,chi_square,defects
python -m integration.sglang.proof --only soak --seconds 240
python -m integration.sglang.proof --only cases --options '{"tp_size": 2}'   # two GPUs
python -m integration.sglang.proof --only cases --dtype float32 --grammar xgrammar
python -m integration.sglang.proof --options '{"disable_overlap_schedule": true}'

Engines run at the same time on one GPU, each in a process of its own. A token that differs is a
near tie, and no failure, if the engine without drafts samples the other token once its logit is
raised and that of the first lowered by half of ``--margin``. `integration.sglang.open_outputs`
looks into other differences, which are no failure if the router of that token has a tie. The exit
status is 1 if an output differs, hangs or is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import re
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from integration.bench.machine import describe_machine, store
from integration.sglang import checks
from integration.sglang.defects import DEFECTS, VARIABLE
from integration.sglang.engine_process import (
    ROOT,
    START_SECONDS,
    EngineError,
    EngineProcess,
    prepare,
)
from integration.sglang.open_outputs import (
    first_difference,
    look_into,
    penalty_bias,
    signed_seed,
    without_limits,
)

NUM_PROMPTS = 64
NEW_TOKENS = 128
AT_LEAST = {"min_new_tokens": 24, "ignore_eos": False, "stop_token_ids": [14, 16, 201, 264, 290]}
"""Frequent tokens end the output, once it is long enough."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "bias": {"temperature": 0.8, "logit_bias": {"5": 3.0, "100": -100.0, "300": 2.0}},
    "n": {"temperature": 0.8, "n": 2},
    "stop_strings": {"temperature": 0.8, "stop": ["return", "\n\n"]},
    "all_options": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.02},
    "top_k_top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p_top_p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.8, "repetition_penalty": 1.2},
    "presence_penalty": {"temperature": 0.8, "presence_penalty": 0.6},
    "frequency_penalty": {"temperature": 0.8, "frequency_penalty": 0.4},
    "min_new_tokens": {"temperature": 0.8, **AT_LEAST},
    "all_penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        **AT_LEAST,
    },
    "logit_processor": {"temperature": 0.8, "custom_params": {"token_ids": [201, 264, 290]}},
}
PROCESSORS = {"logit_processor": "DisallowedTokensLogitsProcessor"}
"""Logit processors of SGLang by case."""
GRAMMAR_CASE = {"temperature": 0.8, "regex": "[a-z ]{8,40}", "ignore_eos": False}
LIFT = 80.0
"""Added to the logits of both tokens of a near tie where a grammar forbade others."""
MOST_ALONE = 3
"""Outputs of a case that are sent again alone."""
CHECKS = ("storm", "cases", "random", "executor", "chi_square", "defects", "soak")
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
"""SGLang ends if memory or a slot leaked."""
COUNTS = ("steps", "proposed", "accepted")
_LOGGED = re.compile(r"\baccept len: ([\d.]+)").findall
STORM_REQUESTS = 150
STORM_TOKENS = 2000
"""KV tokens of the engine of the storm: fewer than its running requests need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proof; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file of the result")
    parser.add_argument("--folder", type=Path, default=Path("sglang_proof"), help="of logs")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=("storm", "cases"),
        help=f"checks, of {', '.join(CHECKS)} (default: storm,cases)",
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="duration of the soak")
    parser.add_argument(
        "--samples", type=int, default=checks.SAMPLES, help="requests of a chi-square test"
    )
    parser.add_argument(
        "--drafts",
        default="3,1",
        help="K of engines with drafts, the first one's is that of the storm",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--margin",
        type=float,
        default=None,
        help="of near ties, in logits (default: 0.5, which is two steps of bfloat16 between logits "
        "of 16 and 32 on either side; float32: 0.01)",
    )
    parser.add_argument("--grammar", default="none", help="grammar backend; none: without grammars")
    parser.add_argument("--attention", default="triton", help="attention backend")
    parser.add_argument("--alone", action="store_true", help="also SGLang without the plugin")
    parser.add_argument("--in-turn", action="store_true", help="start engines one after the other")
    parser.add_argument(
        "--port", type=int, default=21000, help="first port: two per engine, for runs side by side"
    )
    parser.add_argument("--commit", help="of the result, where git does not know it")
    parser.add_argument("--plugin", default="{}", help="options of the plugin")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of engines")
    given = parser.parse_args(arguments)
    if unknown := set(given.only) - set(CHECKS):
        parser.error(f"--only: unknown check {', '.join(sorted(unknown))}")
    given.margin = given.margin or (0.01 if given.dtype == "float32" else 0.5)
    result = Proof(given).result_of_run()
    sys.stdout.write(f"{json.dumps({k: v for k, v in result.items() if k != 'beyond_margin'})}\n")
    return 0 if result["matched"] else 1


class Proof:
    """Engines, and what was found of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.engines: dict[str, EngineProcess] = {}
        self.drafts = [int(k) for k in given.drafts.split(",")]
        self.executor: checks.Executor | None = None
        self.counts: dict[str, Counter[str]] = {}
        self.result: dict[str, Any] = {
            "kind": "sglang-proof",
            **describe(given, "proof"),
            "beyond_margin": [],
            "not_run": [],
        }
        self.open: list[tuple[dict[str, Any], str | None, dict[str, Any]]] = []
        """Reports, engines and details of differences beyond the margin."""

    def run(self) -> None:
        """Start all engines, then serve and compare."""
        given, model = self.given, prepare(self.given.folder)
        options = {
            "model_path": str(model),
            "dtype": given.dtype,
            "attention_backend": given.attention,
            "sampling_backend": "pytorch",
            "grammar_backend": given.grammar,
            "mem_fraction_static": 0.5,  # of what is free; engines that start together share it
            "max_running_requests": 64,
            "max_total_tokens": 40000,
            "disable_radix_cache": True,
            "random_seed": 0,
            "enable_custom_logit_processor": True,
            "log_level": "info",
            # some sizes, of which batches are padded to the next one: all of them take longer
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48, 64],
            "cuda_graph_bs_prefill": [16, 64, 256, 1024],  # below `STORM_TOKENS`
            **given.options,
        }
        first = self.drafts[0]
        wanted: list[tuple[str, int, bool, dict[str, Any], dict[str, str]]] = []
        wanted.append(("k0", 0, True, {}, {}))
        small = {
            "max_total_tokens": STORM_TOKENS,
            "max_running_requests": 16,
            "schedule_conservativeness": 0.1,
        }
        if {"storm", "soak"} & set(given.only):
            wanted.append(("small", first, True, small, STRICT))
        if {"cases", "random", "chi_square"} & set(given.only):
            wanted += [(f"k{k}", k, True, {}, {}) for k in self.drafts]
        if "cases" in given.only and given.alone:
            wanted.append(("alone-k0", 0, False, {}, {}))
            wanted.append((f"alone-k{first}", first, False, {}, {}))
        if "defects" in given.only:
            wanted += [
                (f"defect-{name}", first, True, {"max_running_requests": 16}, {VARIABLE: name})
                for name in DEFECTS
            ]
        kinds = {kind: cases_requests({kind: CASES[kind]}) for kind in checks.EXECUTOR_KINDS}
        if "executor" in given.only:
            self.executor = checks.Executor(given.dtype, kinds)
        for index, (name, drafts, is_on, more, environment) in enumerate(wanted):
            port = ports(given.port, index)
            self.engines[name] = EngineProcess(
                name,
                given.folder,
                {**options, **more, **port},
                drafts,
                given.plugin if is_on else None,
                environment,
            )
            if given.in_turn:
                self._started(name)
        if not given.in_turn:
            for name in self.engines:
                self._started(name)
        for name, _, is_on, *_ in wanted:
            lines = self.engines[name].log_lines("mtp_plugin on: verification")
            if bool(lines) != is_on:
                raise EngineError(f"{name}: expected the line 'mtp_plugin on' {is_on}: {lines}")
        prompts, defects = _prompts(), {kind: CASES[kind] for kind in ("temperature", "min_p")}
        run: dict[str, Callable[[], None]] = {
            "storm": self._storm,
            "cases": self._cases,
            "random": lambda: checks.compare_random(self, prompts),
            "chi_square": lambda: checks.compare_distributions(self, prompts[0], given.samples),
            "defects": lambda: checks.find_defects(self, cases_requests(defects)),
            "executor": lambda: checks.compare_executor(self, self.executor),
            "soak": lambda: checks.soak(self, prompts),
        }
        for check in [check for check in run if check in given.only]:
            started = time.monotonic()
            try:
                run[check]()
            except Exception:  # the others may still hold
                self.result.setdefault("errors", {})[check] = traceback.format_exc()
                traceback.print_exc()
            seconds = round(time.monotonic() - started, 1)
            self.result.setdefault("seconds", {})[check] = seconds
            sys.stderr.write(f"{check} took {seconds} s\n")
            self.store()  # what follows may be cut off
        self._settle()
        self._count()

    def _started(self, name: str) -> None:
        seconds = self.engines[name].result(START_SECONDS)
        self.result.setdefault("seconds_to_start", {})[name] = seconds
        sys.stderr.write(f"{name} is ready after {seconds} s\n")

    def _storm(self) -> None:
        requests, engine = storm_requests(), self.engines["small"]
        arguments = {"requests": requests, "aborted": 0.3, "seed": 1}
        started = time.monotonic()
        outputs = engine.call("storm", 300.0, **arguments)
        seconds = round(time.monotonic() - started, 1)
        plain = [without_limits(request) for request in requests]
        expected = self.engines["k0"].call("run", 300.0, requests=plain)
        kept = [i for i, output in enumerate(outputs) if not output["aborted"]]
        report = self.compare(
            "storm",
            [requests[i] for i in kept],
            [expected[i] for i in kept],
            [outputs[i] for i in kept],
            "small",
        )
        report["seconds"] = seconds
        report["aborted"] = len(outputs) - len(kept)
        report["retractions"] = sum(output.get("retractions", 0) for output in outputs)
        # rows of slots that were used again
        again = cases_requests({"greedy": CASES["greedy"], "min_p": CASES["min_p"]})
        found = engine.call("run", 300.0, requests=again)
        expected = self.engines["k0"].call("run", 300.0, requests=again)
        if not report["retractions"]:
            self.result["not_run"].append("retractions")
        report["after"] = self.compare("after the storm", again, expected, found, "small")
        self.result["storm"] = report

    def _cases(self) -> None:
        cases = dict(CASES)
        if self.given.grammar != "none":
            cases["grammar"] = GRAMMAR_CASE
        if self.given.grammar == "none":
            self.result["not_run"].append("grammar")
        others = ("small", "defect-")
        names = [name for name in self.engines if not name.startswith(others)]
        for case, options in cases.items():
            requests = cases_requests({case: options})
            outputs = self.run_all(names, requests)
            reports = self.result.setdefault("cases", {}).setdefault(case, {})
            for name in names:
                if name == "k0":
                    continue
                base = "alone-k0" if name.startswith("alone") else "k0"
                if name == base:
                    continue
                report = self.compare(
                    f"{case}, {name}",
                    requests,
                    outputs[base],
                    outputs[name],
                    name,
                    counts=base == "k0",
                )
                tokens = sum(len(t) for o in outputs[name] for t in o.get("tokens", ()))
                counts = self.counts.setdefault(name, Counter())
                added = {key: sum(o.get(key, 0) for o in outputs[name]) for key in COUNTS}
                counts.update(added)
                steps = added["steps"]
                report["acceptance_length"] = round(tokens / steps, 3) if steps else None
                reports[name] = report
            sys.stderr.write(f"{case}: {json.dumps(reports)}\n")
        wrong = cases_requests({"": {"custom_params": {"mtp_verificaton": "coupled"}}})[:1]
        name = f"k{self.drafts[0]}"
        (output,) = self.engines[name].call("run", 60.0, requests=wrong)
        self.result["refused"] = output.get("error")

    def compare_engines(self, what: str, requests: list[dict[str, Any]]) -> None:
        """Compare each engine with drafts with the one without."""
        names = [f"k{k}" for k in self.drafts]
        outputs = self.run_all(["k0", *names], requests)
        for name in names:
            report = self.compare(f"{what}, {name}", requests, outputs["k0"], outputs[name], name)
            self.result.setdefault(what, {})[name] = report

    def run_all(self, names: list[str], requests: list[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the outputs of engines that serve the same requests at the same time.

        Engines with tensor parallelism take turns: on shared GPUs, ranks of one wait for each other
        in time slices of the others.
        """
        if self.given.options.get("tp_size", 1) > 1:
            return {
                n: self.engines[n].call("run", checks.SECONDS, requests=requests) for n in names
            }
        for name in names:
            self.engines[name].send("run", requests=requests)
        return {name: self.engines[name].result(checks.SECONDS) for name in names}

    def compare(
        self,
        what: str,
        requests: list[dict[str, Any]],
        expected: list[Any],
        found: list[Any],
        engine: str | None,
        counts: bool = True,
        keeps: bool = True,
    ) -> dict[str, Any]:
        """Count equal outputs; a difference is a near tie or a failure.

        Args:
            engine: that gave ``found``; None: the embedded executor.
            counts: whether differences are looked into. keeps: whether their details are kept.
        """
        report = {"compared": 0, "equal": 0, "ties": 0, "different": 0}
        others: list[dict[str, Any]] = []
        unclear: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for request, left, right in zip(requests, expected, found, strict=True):
            outputs = max(len(left.get("tokens", ())), len(right.get("tokens", ())), 1)
            for index in range(outputs):
                report["compared"] += 1
                one, two = _at(left, index), _at(right, index)
                if one is not None and one == two:
                    report["equal"] += 1
                    continue
                details = {"case": what, "request": request, "output": index}
                details |= {
                    "expected": one,
                    "found": two,
                    "errors": [left.get("error"), right.get("error")],
                }
                report["different"] += 1
                if counts and one is not None and two is not None:
                    details["is_tie"] = False
                    again = self._again(request, index, one[0], two[0], details)
                    if again is not None:
                        unclear.append((details, again))
                if counts and keeps:
                    others.append(details)
        if unclear:
            requests = [again for _, again in unclear]
            outputs = self.engines["k0"].call("run", checks.SECONDS, requests=requests)
            for (details, _), output in zip(unclear, outputs, strict=True):
                wanted = details["found"][0][details["at"]]
                details["is_tie"] = output.get("tokens") == [[wanted]]
                report["ties"] += details["is_tie"]
                report["different"] -= details["is_tie"]
        others = [details for details in others if not details.pop("is_tie", False)]
        self.result["beyond_margin"] += others
        self.open += [(report, engine, details) for details in others]
        return report

    def _settle(self) -> None:
        """Look into what is beyond the margin; a tie of the router is no failure."""
        sent: Counter[str] = Counter()
        for report, engine, details in self.open:
            if details.get("at") is None:
                continue
            sent[details["case"]] += 1
            is_sent = sent[details["case"]] <= MOST_ALONE
            try:
                look_into(self, engine if is_sent else None, details)
            except EngineError as error:
                self.result.setdefault("errors", {})["beyond the margin"] = str(error)
                return
            if details["router"]["is_tie"]:
                report["different"] -= 1
                report["router_ties"] = report.get("router_ties", 0) + 1
            elif details["decided"] == "near tie":
                report["different"] -= 1
                report["ties"] += 1

    def _count(self) -> None:
        """Compare the counts of drafts, which the plugin corrects, with SGLang's log."""
        for name, counts in self.counts.items():
            engine = self.engines[name]
            logged = [float(n) for line in engine.log_lines("accept len") for n in _LOGGED(line)]
            self.result.setdefault("counts", {})[name] = {
                **counts,
                "num_drafts": engine.num_drafts,
                "logged_accept_len": {
                    "lines": len(logged),
                    "least": min(logged, default=None),
                    "median": statistics.median(logged) if logged else None,
                    "most": max(logged, default=None),
                },
                "collapses": len(engine.log_lines("acceptance collapsed")),
            }

    def _again(
        self,
        request: dict[str, Any],
        index: int,
        one: list[int],
        two: list[int],
        details: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Return the request of the first other token, with its logit raised: where the engine
        without drafts samples it, it is a near tie. None: no token differs."""
        at = details["at"] = first_difference(one, two)
        if at is None:
            return None
        options = {**without_limits(request)["sampling_params"], "max_new_tokens": 1, "n": 1}
        options.pop("stop", None)
        # it would begin again; both tokens are allowed
        lift = LIFT if options.pop("regex", None) else 0.0
        penalties = penalty_bias(options, request["input_ids"], one[:at])
        if "min_new_tokens" in options:
            options["min_new_tokens"] = int(options["min_new_tokens"] > at)
        seed = options.get("sampling_seed")
        options["sampling_seed"] = signed_seed(seed, index)
        bias = {int(k): v for k, v in (options.get("logit_bias") or {}).items()}
        for token, value in penalties.items():
            bias[token] = bias.get(token, 0.0) + value
        half = self.given.margin / 2
        bias[two[at]] = bias.get(two[at], 0.0) + lift + half
        bias[one[at]] = bias.get(one[at], 0.0) + lift - half
        options["logit_bias"] = {str(k): v for k, v in bias.items()}
        prompt = [*request["input_ids"], *one[:at]]
        return {**request, "input_ids": prompt, "sampling_params": options}

    def result_of_run(self) -> dict[str, Any]:
        """Run, end all engines, store what was found, also of a run that failed, and return it."""
        try:
            self.run()
        except EngineError as error:
            self.result.setdefault("errors", {})["start"] = str(error)
            sys.stderr.write(f"{error}\n")
        finally:
            self.stop()
        return self.store()

    def stop(self) -> None:
        """End all engines."""
        for engine in filter(None, [self.executor, *self.engines.values()]):
            engine.stop()

    def store(self) -> dict[str, Any]:
        """Write what was found so far, and return it."""
        result = self.finished()
        store(self.given.json, result)
        return result

    def finished(self) -> dict[str, Any]:
        """Return the result with ``matched``."""
        self.result["matched"] = is_matched(self.result, self.given.only)
        return self.result


def is_matched(result: dict[str, Any], checks_of_run: Iterable[str]) -> bool:
    """Whether all outputs of a run are equal, up to near ties and ties of the router."""
    reports: list[dict[str, Any]] = []
    storm = result.get("storm")
    if storm:
        reports += [storm, storm["after"]]
    for name_of_engine in result.get("cases", {}).values():
        reports += [r for name, r in name_of_engine.items() if not name.startswith("alone")]
    for name in ("random", "executor", "defects"):
        reports += result.get(name, {}).values()
    reports += [result[name] for name in ("chi_square", "soak") if name in result]
    return (
        "errors" not in result
        and all(check in result for check in checks_of_run)
        and bool(reports)
        and all(r["compared"] and not r["different"] for r in reports)
        and all(map(_are_sane, result.get("counts", {}).values()))
        and (
            "cases" not in result
            or "mtp_verificaton: unknown option" in (result.get("refused") or "")
        )
    )


def _are_sane(counts: dict[str, Any]) -> bool:
    """Whether accept lengths are between 1 and K + 1, and K drafts a step were proposed."""
    logged, most = counts["logged_accept_len"], counts["num_drafts"] + 1
    return bool(
        logged["lines"]
        and 1 <= logged["least"] <= logged["most"] <= most
        and counts["proposed"] == counts["steps"] * counts["num_drafts"]
        and 0 < counts["accepted"] <= counts["proposed"]
    )


def _at(output: dict[str, Any], index: int) -> tuple[list[int], Any] | None:
    """Return tokens and finish reason of one output; None: there is none."""
    tokens = output.get("tokens", ())
    return None if index >= len(tokens) else (tokens[index], output["finish"][index])


def cases_requests(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `NUM_PROMPTS` requests of every case, each with a seed."""
    prompts = _prompts()
    return [
        {
            **({"processor": PROCESSORS[case]} if case in PROCESSORS else {}),
            "input_ids": prompts[i % len(prompts)],
            "sampling_params": {
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
                "sampling_seed": 1000 + i,
                **options,
            },
        }
        for case, options in cases.items()
        for i in range(NUM_PROMPTS)
    ]


def storm_requests() -> list[dict[str, Any]]:
    """Return random requests of many lengths and options."""
    chosen, prompts = random.Random(7), _prompts()
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"temperature": 0.0},
        lambda: {"temperature": 0.8},
        lambda: {"temperature": 1.0, "min_p": chosen.choice((0.02, 0.1))},
        lambda: {"temperature": 0.9, "top_p": 0.9, "top_k": chosen.choice((5, 40))},
        lambda: {"temperature": 0.8, "logit_bias": {str(chosen.randrange(2, 2000)): 3.0}},
        lambda: {"temperature": 0.8, "custom_params": {"mtp_speculate": False}},
        lambda: {"temperature": 0.8, "custom_params": {"mtp_max_draft_len": 1}},
    ]
    requests = []
    for index in range(STORM_REQUESTS):
        prompt = [token for _ in range(chosen.randint(1, 6)) for token in chosen.choice(prompts)]
        options = {**chosen.choice(kinds)(), "sampling_seed": 5000 + index, "ignore_eos": True}
        options["max_new_tokens"] = chosen.randint(16, 320)
        requests.append({"input_ids": prompt, "sampling_params": options})
    return requests


def _prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    folder = ROOT / "integration" / "tiny_model"
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    texts = [line["prompt"] for line in json.loads((folder / "prompts.json").read_text())]
    given = [tokenizer(text)["input_ids"] for text in texts]
    # a different end for every use of a text
    return [given[i % len(given)][: -(i // len(given)) or None] for i in range(NUM_PROMPTS)]


def ports(first: int, index: int) -> dict[str, int]:
    """Return options of the ports of an engine; no other port is opened on one host."""
    return {"port": first + 2 * index, "nccl_port": first + 2 * index + 1}


def describe(given: argparse.Namespace, what: str) -> dict[str, Any]:
    """Return what was run and when, and the machine with versions and commit."""
    import torch

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("sglang", "sglang-kernel", "flashinfer-python", "transformers")
    machine = describe_machine(device) | {name: version(name) for name in names}
    return {
        "name": f"sglang-{machine['sglang']}-{what}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": [*sys.argv[1:]],
        "dtype": given.dtype,
        "margin": given.margin,
        "machine": machine | ({"commit": given.commit} if given.commit else {}),
    }


if __name__ == "__main__":
    sys.exit(main())

"""The comparison of ``integration.sglang.proof``, with engines that make up their tokens."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from types import SimpleNamespace
from typing import ClassVar

import pytest

from integration import figures
from integration.sglang import checks, open_outputs, proof, steps
from integration.sglang.engine_process import EngineError, EngineProcess
from mtp_plugin import SamplingParams
from mtp_plugin.infer.sampling_rule import SamplingRule


class Engine:
    """Answers as an engine does; ``wrong`` has another token in one output of one case."""

    wrong = ""
    ties = False
    biases: ClassVar = []
    leaks = ()
    differs_alone = False
    accept_len = 2.0

    def __init__(self, name, _folder, _options, num_drafts, *_rest):
        self.name, self.num_drafts = name, num_drafts

    def result(self, _seconds):
        return vars(self).pop("outputs", 1.0)

    def send(self, command, requests, **_):
        self.outputs = self.call(command, 0, requests)

    def call(self, command, _seconds, requests, **_):
        if command == "steps":
            return {"median_ms": len(requests) * (1.0 if self.name == "sglang" else 0.9)}
        if command == "soak":
            served = enumerate(self.call("storm", 0, requests[:90]), start=len(requests))
            return list(served)
        self.is_wrong = self.name == self.wrong and (len(requests) > 1 or self.differs_alone)
        return [self.output(command, i, **request) for i, request in enumerate(requests)]

    def output(self, command, index, input_ids, sampling_params, top_logprobs=0, **_):
        custom = str(sampling_params.get("custom_params"))
        if "mtp_verificaton" in custom:
            return {"error": "custom_params: mtp_verificaton: unknown option", "aborted": False}
        assert self.num_drafts or "mtp_" not in custom, "without drafts their limits are refused"
        bias = sampling_params.get("logit_bias") or {}
        if sampling_params["max_new_tokens"] == 1:  # is it a tie?
            token = int(max([*bias][-2:], key=bias.get))
            Engine.biases.append(list(bias.values()))
            tokens = [[token if self.ties else -1]]
        else:
            known = input_ids, sampling_params["sampling_seed"], sampling_params["temperature"]
            made = random.Random(str(known))
            if self.name == "defect-stale_row":
                made.random()
            count = range(sampling_params.get("n", 1))
            ids = 2000 if sampling_params["max_new_tokens"] != checks.NUM_TESTED else known[2] * 10
            tokens = [[made.randrange(int(ids)) for _ in range(8)] for _ in count]
            if self.is_wrong and index == (0 if top_logprobs else 1):
                tokens[-1][3] += 1
        return {
            "tokens": tokens,
            "finish": [{"type": "length"}] * len(tokens),
            "retractions": 1,
            "steps": 4 * len(tokens),
            "proposed": 4 * len(tokens) * self.num_drafts,
            "accepted": 4 * len(tokens) * (self.num_drafts > 0),
            "top_logprobs": [[(t, -1.0), (1, -1.5)] for t in tokens[0]] if top_logprobs else [],
            "aborted": command == "storm" and index % 3 == 0,
        }

    def log_lines(self, part):
        if part == "leak detected":
            return self.leaks
        if part == "accept len":
            return [f"#token: 9, accept len: {self.accept_len:.2f}, accept rate: 0.33,"]
        if part == "acceptance collapsed":
            return []
        return [] if self.name.startswith("alone") else ["mtp_plugin on"]

    def stop(self):
        pass


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(proof, "EngineProcess", Engine)
    monkeypatch.setattr(proof, "prepare", lambda folder: folder)
    monkeypatch.setattr(proof, "_prompts", lambda: [[i, i + 1, i + 2] for i in range(4)])

    def run(*arguments, wrong="", ties=False):
        monkeypatch.setattr(Engine, "wrong", wrong)
        monkeypatch.setattr(Engine, "ties", ties)
        file = tmp_path / "result.json"
        code = proof.main(["--json", str(file), "--folder", str(tmp_path), *arguments])
        return SimpleNamespace(code=code, **json.loads(file.read_text()))

    return run


def test_equal_outputs_match(run):
    found = run("--alone")
    assert found.code == 0
    assert found.matched
    assert found.storm["compared"] + found.storm["aborted"] == proof.STORM_REQUESTS
    assert found.cases["n"]["k1"] == {
        "compared": 2 * proof.NUM_PROMPTS,
        "equal": 2 * proof.NUM_PROMPTS,
        "ties": 0,
        "different": 0,
        "acceptance_length": 2.0,
    }
    assert found.cases["logit_processor"]["k1"]["equal"] == proof.NUM_PROMPTS
    assert found.counts["k3"]["logged_accept_len"]["median"] == 2.0
    assert found.counts["k3"]["accepted"] == found.counts["k3"]["steps"]
    assert found.not_run == ["grammar"]


@pytest.mark.parametrize("wrong", ["small", "k1", "k3"])
def test_one_other_token_fails(run, wrong):
    found = run(wrong=wrong)
    assert found.code == 1
    assert not found.matched
    assert {each["at"] for each in found.beyond_margin} == {3}
    assert {each["decided"] for each in found.beyond_margin} == {"batch"}  # alone it is equal


def test_a_tie_is_counted(run):
    found = run("--only", "cases", wrong="k3", ties=True)
    assert found.code == 0
    assert found.cases["greedy"]["k3"]["ties"] == 1
    assert found.beyond_margin == []


def test_a_difference_is_looked_into_alone(run, monkeypatch):
    monkeypatch.setattr(Engine, "differs_alone", True)
    (found,) = run("--only", "cases", "--drafts", "3", wrong="k3").beyond_margin[:1]
    assert found["decided"] == "defect"
    assert found["alone"]["as_in_the_batch"] == [True, True]
    one, two = (found[name][0][3] for name in ("expected", "found"))
    assert found["alone"]["logits"] == [[one, 0.0, None], [1, -0.5, -0.5], [two, None, 0.0]]
    assert not found["router"]["is_tie"]


def test_a_tie_of_the_router_is_no_failure(run, monkeypatch):
    monkeypatch.setitem(open_outputs.EPSILON, "bfloat16", 1.0)
    found = run("--only", "cases", wrong="k3")
    assert found.matched
    assert found.cases["greedy"]["k3"]["router_ties"] == 1
    assert found.cases["greedy"]["k3"]["different"] == 0


@pytest.mark.parametrize(
    ("is_equal_alone", "gap", "decided"),
    [(True, 0.0, "batch"), (False, 9e-4, "router tie"), (False, 1.1e-3, "defect")],
)
def test_what_decided_a_difference(is_equal_alone, gap, decided):
    epsilon = open_outputs.EPSILON["float16"]
    found = open_outputs.decide(is_equal_alone=is_equal_alone, gap=gap, epsilon=epsilon)
    assert found == decided


def test_the_open_output_of_the_results_is_a_tie_of_the_router():
    """Each of both choices of experts gives the token of one engine."""
    details = copy.deepcopy(
        figures.result("sglang-0.5.17-earlier")["third_run"]["beyond_margin"][0]
    )
    settings = SimpleNamespace(given=SimpleNamespace(dtype="float16", margin=0.0625))
    open_outputs.look_into(settings, None, details)
    assert details["decided"] == "router tie"
    (router,) = details["router"]["positions"]
    assert router["gap"] < 1e-4
    at = details["at"]
    tokens = {details[name][0][at] for name in ("expected", "found")}
    assert set(router["tokens"]) == tokens
    details["at"] = at - 1
    details["found"][0][at - 1] = 5
    open_outputs.look_into(settings, None, details)
    assert details["decided"] == "not sent again"


def test_a_near_tie_is_one_on_the_plain_model():
    found = figures.result("sglang-0.5.23-proof")["beyond_margin"]
    details = copy.deepcopy(next(each for each in found if each["decided"] == "near tie"))
    assert open_outputs.is_near_tie(details, 0.0625)
    assert not open_outputs.is_near_tie(details, 0.001)
    for name in ("expected", "found"):
        details[name][0] = details[name][0][::-1]
    assert not open_outputs.is_near_tie(details, 0.0625)


@pytest.mark.parametrize("accept_len", [0.5, 4.01])
def test_an_impossible_accept_length_in_the_log_fails(run, monkeypatch, accept_len):
    monkeypatch.setattr(Engine, "accept_len", accept_len)
    assert not run("--only", "cases", "--drafts", "3").matched


def test_a_bias_equals_penalties():
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.8}
    assert open_outputs.penalty_bias(options, [1], [7, 8, 7]) == {7: -1.0, 8: -0.75}
    assert options == {"temperature": 0.8}
    _, logits, _ = open_outputs.expert_choices([1, 7, 8])
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5)
    wanted = SamplingRule(params, []).edited(logits, [7, 8])
    bias = open_outputs.penalty_bias(
        {"repetition_penalty": 1.5, "presence_penalty": 0.5}, [1], [7, 8]
    )
    for token, value in bias.items():
        assert float(logits[token]) + value == pytest.approx(float(wanted[token]), abs=1e-4)


def test_a_tie_under_a_grammar_is_between_its_two_tokens(run):
    Engine.biases.clear()
    assert run("--only", "cases", "--grammar", "xgrammar", wrong="k3", ties=True).code == 0
    assert [min(bias) for bias in Engine.biases if min(bias) > 0] == [proof.LIFT - 0.25]


def test_a_check_that_fails_leaves_the_others(run, monkeypatch):
    def fails(*_):
        raise EngineError("k3 does not answer")

    monkeypatch.setattr(checks, "compare_random", fails)
    found = run("--only", "random,cases,defects")
    assert not found.matched
    assert list(found.errors) == ["random"]
    assert "k3 does not answer" in found.errors["random"]
    assert found.cases["n"]["k3"]["equal"]
    assert found.defects["stale_row"]["found"] > 0


def test_results_name_their_package(run):
    found = run("--only", "random")
    assert found.kind
    assert found.machine["package_tree"]


def test_results_of_both_versions_are_tables(run, monkeypatch, tmp_path):
    steps_file = figures.RESULTS / "sglang-0.5.17-steps.json"
    found = run("--only", "storm,cases,random,soak")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    shutil.copy(steps_file, tmp_path)
    assert "(CPU alone)" in figures.sglang_summary()
    assert "outputs of K = 0" not in figures.in_sglang()
    shutil.copy(tmp_path / "result.json", tmp_path / "sglang-0.5.23-proof.json")
    measured = json.loads(steps_file.read_text())
    penalties = "t0.6-p0.95-penalties"
    for values in (measured["step_ms"], measured["ratio"]):
        values[penalties] = values["greedy"]
    measured["busy"] = True
    (tmp_path / "sglang-0.5.23-steps.json").write_text(json.dumps(measured))
    page, summary = figures.in_sglang(), " ".join(figures.sglang_summary().split())
    assert "| 0.5.23, K = 3 | 0.5.23, K = 1 | 0.5.23, embedded executor |" in page
    assert "| all penalties | 64 + 0 of 64 | 64 + 0 of 64 | - |" in page
    assert "| logit processor | 64 + 0 of 64 | 64 + 0 of 64 | - |" in page
    assert f"| soak | {found.soak['equal']} + 0 of {found.soak['compared']} | - | - |" in page
    assert "three penalties: 0.5.23 with the plugin | 4.53 (1.01x)" in page
    assert page.count("`busy`") == 1
    assert "(CPU alone)" not in summary
    count = 2 * proof.NUM_PROMPTS * (len(proof.CASES) + 1)  # `n` has two outputs
    assert f"{count:,} of {count:,} outputs are those without drafts" in summary
    assert "0.66 (0.5.17) and 0.99 / 0.90 / 0.66 (0.5.23) of SGLang's time" in summary
    assert "`sglang-0.5.17-steps.json`, `sglang-0.5.23-proof.json`" in figures.sglang_files()


SERVES = """
import time
class Engine:
    def __init__(self, **options):
        print("mtp_plugin on", options["port"], flush=True)
        self.loop, self.number = self, 0
    def run_until_complete(self, coroutine):
        coroutine.close()
        self.number += 1
        if self.number == 4:
            time.sleep(60)
        return self.number
"""


def test_an_engine_that_hangs_is_ended_with_its_log(tmp_path, monkeypatch):
    (tmp_path / "sglang.py").write_text(SERVES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = EngineProcess("k0", tmp_path, proof.ports(21000, 1), 3, "{}")
    try:
        assert engine.result(60) < 5
        engine.send("run", requests=[])
        with pytest.raises(EngineError, match="unexpected keyword argument 'wrong'"):
            engine.call("run", 60, wrong=[])
        engine.send("run", requests=[])
        assert engine.call("run", 60, requests=[]) == 3  # not an earlier result
        with pytest.raises(EngineError, match="k0 does not answer after 1 s:\nmtp_plugin on 21002"):
            engine.call("run", 1.0, requests=[])
        with pytest.raises(EngineError, match="k0 ended"):
            engine.call("run", 1.0, requests=[])
    finally:
        engine.stop()


def test_random_requests_have_no_option_that_is_not_compared():
    made = checks.random_requests([[1, 2]], 60, longest=16, grammars=True)
    assert made == checks.random_requests([[1, 2]], 60, longest=16, grammars=True)
    names = {name for request in made for name in request["sampling_params"]}
    assert names >= {"temperature", "top_k", "min_p", "stop", "stop_token_ids", "regex"}
    assert not {name for name in names if "penalty" in name or name.startswith("min_new")}
    kinds = [request["sampling_params"] for request in made if "stop" in request["sampling_params"]]
    assert {bool(kind.get("ignore_eos")) for kind in kinds} == {True, False}


def test_random_requests_are_compared_with_every_engine(run):
    assert run("--only", "random").random["k1"]["equal"] == checks.NUM_RANDOM
    assert not run("--only", "random", wrong="k1").matched


def test_a_soak_fails_by_a_leak_and_by_another_token(run, monkeypatch):
    found = run("--only", "soak")
    assert found.matched
    assert found.soak["compared"] == 60
    assert not run("--only", "soak", wrong="small").matched
    monkeypatch.setattr(Engine, "leaks", ["req_to_token_pool memory leak detected!"])
    assert not run("--only", "soak").matched


def test_a_defect_that_is_not_found_fails(run):
    found = run("--only", "defects")
    assert not found.matched
    assert found.defects["stale_row"]["found"] > 0
    assert found.defects["wrong_position"]["found"] == 0


def test_a_distribution_is_compared_with_a_control(run):
    found = run("--only", "chi_square", "--samples", "400")
    assert found.matched
    assert set(found.chi_square["tests"]) == set(found.chi_square["control"])
    assert not run("--only", "chi_square", "--samples", "40").matched  # nothing is found


def test_unknown_checks_are_named(run, capsys):
    with pytest.raises(SystemExit):
        run("--only", "storms")
    assert "unknown check storms" in capsys.readouterr().err


def test_step_times_are_ratios_of_turns():
    engines = {name: Engine(name, None, None, 3) for name in steps.ENGINES}
    loads = []
    times = steps.take_turns(engines, {}, [1, 8], turns=2, loads=loads)
    assert len(loads) == 3
    assert times == {"sglang": {1: [1, 1], 8: [8, 8]}, "plugin": {1: [0.9] * 2, 8: [7.2] * 2}}

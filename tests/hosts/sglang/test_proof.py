"""The comparison of ``integration.sglang.proof``, with engines that make up their tokens."""

from __future__ import annotations

import json
import os
import random
from types import SimpleNamespace
from typing import ClassVar

import pytest

from integration.sglang import checks, proof, steps
from integration.sglang.engine_process import EngineError, EngineProcess


class Engine:
    """Answers as an engine does; ``wrong`` has another token in one output of one case."""

    wrong = ""
    ties = False
    biases: ClassVar = []
    leaks = ()

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
        return [self.output(command, i, **request) for i, request in enumerate(requests)]

    def output(self, command, index, input_ids, sampling_params):
        custom = sampling_params.get("custom_params") or {}
        if "mtp_verificaton" in custom:
            return {"error": "custom_params: mtp_verificaton: unknown option", "aborted": False}
        assert self.num_drafts or not custom, "an engine without drafts refuses limits of drafts"
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
            if self.name == self.wrong and index == 1:
                tokens[-1][3] += 1
        return {
            "tokens": tokens,
            "finish": [{"type": "length"}] * len(tokens),
            "retractions": 1,
            "steps": 4 * len(tokens),
            "aborted": command == "storm" and index % 3 == 0,
        }

    def log_lines(self, part):
        if part == "leak detected":
            return self.leaks
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
    assert found.not_run == ["grammar"]


@pytest.mark.parametrize("wrong", ["storm", "k1", "k3"])
def test_one_other_token_fails(run, wrong):
    found = run(wrong=wrong)
    assert found.code == 1
    assert not found.matched
    assert found.differences[0]["at"] == 3
    assert not found.differences[0]["is_tie"]


def test_a_tie_is_counted_and_named(run):
    found = run("--only", "cases", wrong="k3", ties=True)
    assert found.code == 0
    assert found.cases["greedy"]["k3"]["ties"] == 1
    assert found.differences[0]["is_tie"]


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
    assert not run("--only", "soak", wrong="soak").matched
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
    times = steps.take_turns(engines, {}, [1, 8], turns=2)
    assert times == {"sglang": {1: [1, 1], 8: [8, 8]}, "plugin": {1: [0.9] * 2, 8: [7.2] * 2}}

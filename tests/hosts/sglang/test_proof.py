"""The comparison of ``integration.sglang.proof``, with engines that make up their tokens."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from integration.sglang import proof


class Engine:
    """Answers as an engine does; ``wrong`` has another token in one output of one case."""

    wrong = ""
    ties = False

    def __init__(self, name, _folder, _options, num_drafts, *_rest):
        self.name, self.num_drafts = name, num_drafts

    def result(self, _seconds):
        return vars(self).pop("outputs", 1.0)

    def send(self, command, requests, **_):
        self.outputs = self.call(command, 0, requests)

    def call(self, command, _seconds, requests, **_):
        return [self.output(command, i, **request) for i, request in enumerate(requests)]

    def output(self, command, index, input_ids, sampling_params):
        custom = sampling_params.get("custom_params") or {}
        if "mtp_verificaton" in custom:
            return {"error": "custom_params: mtp_verificaton: unknown option", "aborted": False}
        assert self.num_drafts or not custom, "an engine without drafts refuses limits of drafts"
        bias = sampling_params.get("logit_bias") or {}
        if sampling_params["max_new_tokens"] == 1:  # is it a tie?
            token = [int(t) for t, value in bias.items() if value > 0][-1]
            tokens = [[token if self.ties else -1]]
        else:
            known = input_ids, sampling_params["sampling_seed"], sampling_params["temperature"]
            made = random.Random(str(known))
            count = range(sampling_params.get("n", 1))
            tokens = [[made.randrange(2000) for _ in range(8)] for _ in count]
            if self.name == self.wrong and index == 1:
                tokens[-1][3] += 1
        return {
            "tokens": tokens,
            "finish": [{"type": "length"}] * len(tokens),
            "retractions": 1,
            "steps": 4 * len(tokens),
            "aborted": command == "storm" and index % 3 == 0,
        }

    def log_lines(self, _part):
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

"""No figure without the right tokens: what is compared, and what the gate lets through."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from integration.bench.e2e.batch import Run, TimedStep
from integration.bench.e2e.gate import Gate
from integration.bench.e2e.subject import Subject, make_shape
from mtp_plugin.tools.parity import TIE_ULPS
from tests.greedy import greedy_decode

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
NUM_TOKENS = 8


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return make_shape("toy", CPU, request.param, 0, fused=False)


@pytest.fixture(scope="module")
def truth(subject: Subject) -> Run:
    texts = [greedy_decode(subject.model.target, prompt, NUM_TOKENS) for prompt in PROMPTS]
    return run_of(texts)


def run_of(texts: list[list[int]], steps: int = 0, requests: int = 1) -> Run:
    return Run(texts, [TimedStep(0.1, [1] * requests, True)] * steps, 1.0, 0.1)


def changed(run: Run, request: int, position: int, subject: Subject) -> Run:
    """One token replaced by the worst one, so that no rounding explains it."""
    texts = [list(tokens) for tokens in run.token_ids]
    ids = torch.tensor([PROMPTS[request] + texts[request][:position]])
    texts[request][position] = int(subject.model.target(input_ids=ids).logits[0, -1].argmin())
    return dataclasses.replace(run, token_ids=texts)


@pytest.fixture
def gate(subject: Subject) -> Gate:
    return Gate(subject, 2, TIE_ULPS)


def test_target_only_decoding_matches(gate: Gate, truth: Run) -> None:
    match = gate.match_off(PROMPTS, [truth, truth])
    assert match.holds
    assert (match.num_tokens, match.compared_with) == (16, "target-only decoding of 2 requests")
    match = gate.match_on(PROMPTS, [truth, truth], truth)
    assert match.holds
    assert match.num_tokens == 16  # equal runs are compared once


def test_a_wrong_token_without_mtp_is_found(gate: Gate, truth: Run, subject: Subject) -> None:
    wrong = changed(truth, 1, 5, subject)
    match = gate.match_off(PROMPTS, [wrong, wrong])
    assert [line.split(":")[0] for line in match.mismatches] == ["request 1, token 6"]


def test_two_runs_without_mtp_must_agree(gate: Gate, truth: Run, subject: Subject) -> None:
    match = gate.match_off(PROMPTS, [truth, truth, changed(truth, 0, 3, subject)])
    assert match.mismatches == ["request 0: two runs without MTP differ from token 4 on"]


def test_a_wrong_token_with_mtp_is_found(gate: Gate, truth: Run, subject: Subject) -> None:
    match = gate.match_on(PROMPTS, [truth, changed(truth, 0, 7, subject)], truth)
    (line,) = match.mismatches
    assert line.startswith("request 0, token 8: ")


def test_a_shorter_output_is_found(gate: Gate, truth: Run) -> None:
    short = run_of([truth.token_ids[0][:-1], truth.token_ids[1]])
    (line,) = gate.match_on(PROMPTS, [short], truth).mismatches
    assert line.startswith("request 0, token 8: None, expected ")


def test_half_precision_excuses_ties_alone(truth: Run, subject: Subject) -> None:
    wrong = changed(truth, 0, 7, subject)
    match = Gate(subject, 2, 1e9).match_on(PROMPTS, [wrong], truth)
    half = subject.dtype is torch.bfloat16
    assert match.holds is half
    assert match.num_ties == int(half)


# --- synthetic ---


def synthetic(gate: Gate, texts: list[list[int]], share: float, found: float, steps: int):
    return gate.match_synthetic([run_of(texts, steps)], 4, [share], lambda _: [found])


GOOD = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_every_synthetic_run_is_looked_at(gate: Gate) -> None:
    """Each by itself: runs may repeat each other's draws."""
    runs = [run_of(GOOD, 100)] * 20
    assert gate.match_synthetic(runs, 4, [0.8], lambda _: [0.8 + 0.16]).holds
    bad = run_of([[1, 2, 3, 4], [5, 6, 7, -1]], 100)
    match = gate.match_synthetic([*runs, bad], 4, [0.8], lambda _: [0.8])
    assert match.mismatches == ["request 1: -1 is no id below 256"]
    odd = gate.match_synthetic([*runs, bad], 4, [0.8], lambda run: [0.2 if run is bad else 0.8])
    assert len(odd.mismatches) == 2


def test_valid_ids_and_configured_acceptance_match(gate: Gate) -> None:
    assert synthetic(gate, GOOD, 0.8, 0.8, 100).holds
    # four standard errors of a hundred draws, and one step
    assert synthetic(gate, GOOD, 0.8, 0.8 + 0.16, 100).holds
    match = synthetic(gate, GOOD, 0.8, 0.8 - 0.18, 100)
    (line,) = match.mismatches
    assert line == "drafts 1..1 were accepted in 0.620 of the steps, expected 0.800 within 0.170"


def test_every_request_draws_for_itself(gate: Gate) -> None:
    """64 requests over 100 steps are 6400 draws: four standard errors of them, and one step."""
    many = [run_of(GOOD, 100, requests=64)]
    assert gate.match_synthetic(many, 4, [0.8], lambda _: [0.8 + 0.029]).holds
    (line,) = gate.match_synthetic(many, 4, [0.8], lambda _: [0.8 + 0.031]).mismatches
    assert line.endswith("expected 0.800 within 0.030")


def test_certain_acceptance_has_no_error(gate: Gate) -> None:
    assert synthetic(gate, GOOD, 1.0, 1.0, 1000).holds
    assert not synthetic(gate, GOOD, 1.0, 0.99, 1000).holds


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([GOOD[0], [5, 6, 7]], "request 1: 3 tokens, not 4"),
        ([[1, -1, 3, 4], GOOD[1]], "request 0: -1 is no id below 256"),
        ([[1, 2, 3, 256], GOOD[1]], "request 0: 256 is no id below 256"),
    ],
)
def test_odd_outputs_are_named(gate: Gate, texts: list[list[int]], message: str) -> None:
    assert synthetic(gate, texts, 0.5, 0.5, 100).mismatches == [message]

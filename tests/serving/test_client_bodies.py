"""Bodies in the forms that public clients send are served, also with fields that change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Running, running, tiny_llm

BODIES = json.loads((Path(__file__).parent / "client_bodies.json").read_text(encoding="utf-8"))
COMPLETION = {"prompt": "class A:\n", "max_tokens": 4}


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """A server with few tokens for bodies without a maximum."""
    with tiny_llm(max_seq_len=64) as llm, running(llm) as server:
        yield server


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"])
def test_body_of_a_client_is_served(short: Running, sent: dict[str, Any]) -> None:
    response = short.post(sent["route"], **sent["body"])
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text
    count = sent["body"].get("max_tokens")
    if not sent["body"].get("stream") and count in (-1, 100000):
        assert response.json()["usage"]["total_tokens"] == 64


def test_seed_minus_one_is_unset(short: Running) -> None:
    """Sequences of one prompt differ, and so do two requests."""
    body = {**COMPLETION, "max_tokens": 16, "temperature": 1.5}
    texts = {
        short.post("/v1/completions", **body, seed=seed).json()["choices"][0]["text"]
        for seed in (-1, -1, -1.0, -1.0)
    }
    assert len(texts) == 4


def test_integral_floats_give_what_integers_give(short: Running) -> None:
    body = {"temperature": 1.0, "stop_token_ids": [5], "seed": 3, "top_k": 20, "logprobs": 2}
    floats = {**body, "stop_token_ids": [5.0], "seed": 3.0, "top_k": 20.0, "logprobs": 2.0}
    found = [
        short.post("/v1/completions", **{**COMPLETION, "max_tokens": 12, **given}).json()["choices"]
        for given in (body, {**floats, "max_tokens": 12.0})
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_maximum_number_of_tokens(short: Running, name: str) -> None:
    body = {"prompt": "class A:\n", "ignore_eos": True, name: 3}
    assert short.post("/v1/completions", **body).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("place", ["vllm_xargs", "custom_params"])
@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"mtp_speculate": True}, 3),
        ({"mtp_max_draft_len": 1}, 1),
        ({"mtp_speculate": False}, 0),
        ({"mtp_speculate": 0}, 0),
    ],
)
def test_plugin_options_as_in_vllm_and_sglang(
    short: Running, place: str, given: dict[str, Any], most: int
) -> None:
    body = {"prompt": "class A:\n", "temperature": 0, "ignore_eos": True, "max_tokens": 12}
    answer = short.post("/v1/completions", **body, **{place: given}).json()
    found = answer["metrics"]["speculative_decoding"]
    assert found["num_draft_tokens"] <= most * found["num_spec_steps"]
    assert (found["num_draft_tokens"] > 0) == (most > 0)

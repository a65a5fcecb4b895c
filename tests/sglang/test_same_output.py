"""One seed, one output: without drafts and with three, in SGLang's own sampler and verification."""

from __future__ import annotations

import random

import pytest
import torch

from integration.sglang.defects import DEFECTS
from mtp_plugin.hosts.sglang.engine import Engine
from mtp_plugin.infer import decode
from mtp_plugin.requests.options import SamplingParams as ReferenceParams
from tests.sglang.toy_engine import VOCAB, K, ToyEngine, make_request

TOKENS = 120
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "top_k": {"temperature": 0.9, "top_k": 12},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "bias": {"temperature": 0.9, "logit_bias": {"3": 1.0, "5": -100.0}},
    "all": {"temperature": 1.2, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
}


def requests(count=24, **more):
    chosen = random.Random(11)
    kinds = list(KINDS.values())
    return [
        make_request(
            f"r{i}",
            [chosen.randrange(VOCAB) for _ in range(chosen.randint(1, 9))],
            sampling_seed=100 + i,
            **kinds[i % len(kinds)],
            **more,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def without_drafts():
    return ToyEngine(0).serve(requests(), tokens=TOKENS)


@pytest.mark.parametrize(("drafts", "least"), [(K, 2.2), (1, 1.5)])
def test_drafts_do_not_change_the_output(without_drafts, drafts, least):
    engine = ToyEngine(drafts)
    assert engine.serve(requests(), tokens=TOKENS) == without_drafts
    assert least < engine.counts.acceptance_length < drafts + 1


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_change_the_output(without_drafts, defect, monkeypatch):
    for name in ("_verify", "stage"):  # to be restored
        monkeypatch.setattr(Engine, name, getattr(Engine, name))
    DEFECTS[defect]()
    assert ToyEngine(K).serve(requests(), tokens=TOKENS) != without_drafts


@pytest.mark.parametrize("drafts", [0, K])
def test_retractions_do_not_change_the_output(without_drafts, drafts):
    engine = ToyEngine(drafts, slots=4)
    assert engine.serve(requests(), tokens=TOKENS, retract=0.03) == without_drafts
    assert engine.counts.retractions > 20


def test_a_token_map_does_not_change_the_output(without_drafts):
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[: VOCAB // 2]
    engine = ToyEngine(K, token_map=ids)
    assert engine.serve(requests(), tokens=TOKENS) == without_drafts
    assert engine.counts.acceptance_length > 1.2


class TableModel:
    """The target of the toy engine, as the reference decoder reads a model."""

    eos_token_id = 7

    def __init__(self, table):
        self.table = table

    def forward(self, query_token_ids, kv_cache):  # noqa: ARG002
        return self.table[query_token_ids]


def test_the_output_is_that_of_the_reference_decoder(without_drafts):
    model = TableModel(ToyEngine(0).table)
    kinds = list(KINDS.values())
    for index, req in enumerate(requests()):
        options = dict(kinds[index % len(kinds)])
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
        params = ReferenceParams(seed=100 + index, max_tokens=TOKENS, ignore_eos=True, **options)
        found = decode(model, list(req.origin_input_ids), params)
        assert found.token_ids == without_drafts[index]

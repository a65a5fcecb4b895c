"""One seed, one output: without drafts and with three, in SGLang's own sampler and verification."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from sglang.srt.speculative.spec_utils import load_token_map

from integration.sglang import checks
from integration.sglang.defects import DEFECTS
from integration.vllm.methods import chi_square
from mtp_plugin.hosts.sglang.engine import Engine
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.infer import decode
from mtp_plugin.requests.options import SamplingParams as ReferenceParams
from mtp_plugin.speculative.rows.row_ops import RowOps
from mtp_plugin.tools.draft_vocab import write_ids
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
    for owner, name in ((RowOps, "verify_uniform"), (Engine, "stage")):  # to be restored
        monkeypatch.setattr(owner, name, getattr(owner, name))
    DEFECTS[defect]()
    assert ToyEngine(K).serve(requests(), tokens=TOKENS) != without_drafts


def test_the_kernels_do_not_change_the_output():
    """Those of a GPU, by Triton's interpreter: slow, so few tokens of each kind."""
    given = requests(len(KINDS))
    expected = ToyEngine(0).serve(given, tokens=8)
    engine = ToyEngine(K, SglangOptions(kernels="triton"))
    assert engine.serve(requests(len(KINDS)), tokens=8) == expected
    assert engine.counts.acceptance_length > 1.5


@pytest.mark.parametrize("drafts", [0, K])
def test_retractions_do_not_change_the_output(without_drafts, drafts):
    engine = ToyEngine(drafts, slots=4)
    assert engine.serve(requests(), tokens=TOKENS, retract=0.03) == without_drafts
    assert engine.counts.retractions > 20


def test_a_token_map_does_not_change_the_output(without_drafts, tmp_path):
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[: VOCAB // 2]
    write_ids(ids.tolist(), tmp_path / "ids.pt")
    loaded = load_token_map(str(tmp_path / "ids.pt"))
    assert torch.equal(loaded, ids)
    engine = ToyEngine(K, token_map=loaded)
    assert engine.serve(requests(), tokens=TOKENS) == without_drafts
    assert engine.counts.acceptance_length > 1.2


def test_random_requests_in_used_slots_and_chunks_have_one_output():
    options, count = [], 150
    for given in checks.random_requests([[]], count, longest=20, grammars=False):
        params = given["sampling_params"]
        for name in ("stop_token_ids", "logit_bias"):  # of a larger vocabulary
            if name in params:
                ids = {int(token) % VOCAB: None for token in list(params[name])[:4]}
                values = dict.fromkeys(map(str, ids), 1.5)
                params[name] = list(ids) if name == "stop_token_ids" else values
        options.append(params)

    def outputs(drafts, chunk, retract):
        prompts = [[i % VOCAB, i % 7, 2, i % 3][: 1 + i % 4] for i in range(count)]
        given = zip(prompts, options, strict=True)
        reqs = [make_request(f"r{i}", prompt, **each) for i, (prompt, each) in enumerate(given)]
        engine = ToyEngine(drafts, chunk=chunk)
        engine.serve(reqs, tokens=20, retract=retract)
        assert bool(engine.counts.retractions) == bool(retract)
        return [
            (
                list(req.output_ids_through_stop)[:20],
                req.finished() and req.finished_reason.to_json(),
            )
            for req in reqs
        ]

    expected = outputs(0, None, 0.0)
    assert len({tokens[0] for tokens, _ in expected}) > 20
    assert outputs(1, 2, 0.0) == expected
    assert outputs(K, 2, 0.05) == expected


def test_tokens_with_drafts_have_the_distribution_without():
    counted = []
    for drafts, temperature, first in ((0, 0.8, 0), (K, 0.8, 10**6), (K, 1.1, 2 * 10**6)):
        reqs = [
            make_request(f"r{i}", [3], temperature=temperature, sampling_seed=first + i)
            for i in range(2000)
        ]
        found = ToyEngine(drafts, slots=300).serve(reqs, tokens=3)
        counted.append([Counter(tuple(tokens[i - 1 : i + 1]) for tokens in found) for i in (1, 2)])
    expected, drafted, control = counted
    for pairs, others, different in zip(expected, drafted, control, strict=True):
        assert chi_square(others, pairs)[0] > 1e-4
        assert chi_square(different, pairs)[0] < 1e-4


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
        if {"top_k", "top_p"} <= options.keys():
            continue  # of which the decoder counts another mass
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
        params = ReferenceParams(seed=100 + index, max_tokens=TOKENS, ignore_eos=True, **options)
        found = decode(model, list(req.origin_input_ids), params)
        assert found.token_ids == without_drafts[index]

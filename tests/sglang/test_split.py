"""Prefill in one engine, decode in another: one output, and requests that end with an error."""

from __future__ import annotations

import inspect
import json
import operator
import random

import pytest
import sglang.srt.disaggregation.prefill as prefill
import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.scheduler import Scheduler

from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.hosts.sglang.requests import admitted
from mtp_plugin.hosts.sglang.split import take_mark, write_mark
from mtp_plugin.speculative.append_tokens import NO_FINITE_LOGITS
from tests.sglang.toy_engine import VOCAB, K, ToyEngine, make_request
from tests.sglang.toy_split import Prefiller, Steps, pair

TOKENS = 50
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 12, "logit_bias": {"3": 1.0, "5": -100.0}},
    {"temperature": 0.8, "custom_params": {"mtp_max_draft_len": 1}},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
]


def requests(count=60, drafts=K):
    chosen, made = random.Random(11), []
    for i in range(count):
        options = dict(KINDS[i % len(KINDS)])
        if not drafts:
            options.pop("custom_params", None)
        prompt = [chosen.randrange(VOCAB) for _ in range(chosen.randint(1, 9))]
        seed = 100 + i if i % 4 else None
        made.append(make_request(f"r{i}", prompt, sampling_seed=seed, **options))
    return made


@pytest.fixture(scope="module")
def one_engine():
    return ToyEngine(0, seed=1).serve(requests(drafts=0), tokens=TOKENS)


@pytest.mark.parametrize("drafts", [0, K])
def test_output_is_that_of_one_engine(one_engine, drafts):
    decoder = pair(drafts, requests(drafts=drafts))
    assert decoder.serve(requests(drafts=drafts), tokens=TOKENS, retract=0.03) == one_engine
    assert decoder.counts.retractions > 20


def test_a_token_map_does_not_change_the_output(one_engine):
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[: VOCAB // 2]
    decoder = pair(K, requests(), token_map=ids)
    assert decoder.serve(requests(), tokens=TOKENS) == one_engine


def test_a_row_that_is_not_staged_is_found(one_engine, monkeypatch):
    decoder = pair(K, requests())
    monkeypatch.setattr(decoder.engine, "stage", lambda _: None)
    found = decoder.serve(requests(), tokens=TOKENS)
    assert sum(map(operator.eq, found, one_engine)) < 20


def test_first_steps_accept_as_many_drafts_as_in_one_engine():
    engine, decoder = Steps(K, seed=1), pair(K, requests())
    engine.serve(requests(), tokens=TOKENS)
    decoder.serve(requests(), tokens=TOKENS)
    assert decoder.first_steps == engine.first_steps
    assert sum(engine.first_steps.values()) > 2.2 * 60


def test_a_thinking_phase_may_begin_at_the_first_token():
    options = SglangOptions(
        thinking_begin_token=30, thinking_end_token=31, relaxed_topk=VOCAB, relaxed_delta=1.0
    )
    decoder = pair(K, [make_request("r", [1], temperature=0.0)], options=options)
    for engine in (decoder, decoder.prefiller):
        for table in (engine.table, engine.worker.draft_runner.table):
            table[:, 30:32] = -100.0
    decoder.prefiller.table[1, 30] = 100.0
    decoder.serve([make_request("r", [1], temperature=0.0)], tokens=41)
    assert decoder.counts.acceptance_length == K + 1


def ended(caplog, decoder, **options):
    """Return why the only request ends, which the log has, too."""
    req = make_request("r0", [1, 2], **options)
    decoder.admit(req)
    decoder._prefill([req], {})
    assert req.finished_reason.status_code == 500
    assert not req.output_ids
    reason = req.finished_reason.message
    assert f"request r0 ends with an error: {reason}" in caplog.messages
    return reason


def test_a_first_token_without_a_finite_logit_ends_its_request(caplog, monkeypatch):
    decoder = pair(K, [make_request("r0", [1, 2])])
    decoder.prefiller.table[2] = float("nan")
    if "is_aborted" in inspect.getsource(Scheduler.process_batch_result_disagg_prefill):
        # 0.5.23 aborts before it sends
        monkeypatch.setattr(prefill, "is_aborted", lambda _: False)
    assert ended(caplog, decoder) == NO_FINITE_LOGITS


@pytest.mark.parametrize("other", [{"num_drafts": 0}, {"options": SglangOptions(relaxed_topk=2)}])
def test_a_foreign_mark_ends_its_request(caplog, other):
    decoder = pair(K, [make_request("r0", [1, 2])])
    decoder.prefiller = Prefiller(**{"num_drafts": K, **other})
    assert "another version or other options of mtp_plugin, or another n" in ended(caplog, decoder)


def test_a_missing_mark_ends_its_request(caplog):
    decoder = pair(K, [make_request("r0", [1, 2])])
    send, buffers = decoder.prefiller.send, decoder.prefiller.buffers

    def send_without_plugin(*given):
        is_sent = send(*given)
        buffers.output_ids[:, 1:] = 0
        return is_sent

    decoder.prefiller.send = send_without_plugin
    assert "runs without mtp_plugin: install the package and set MTP" in ended(caplog, decoder)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"custom_params": {"mtp_max_draft_len": 1}}, {}),
        ({"temperature": 0.8}, {"temperature": 0.7}),
        ({"sampling_seed": 3}, {"sampling_seed": 4}),
        ({"sampling_seed": 3}, {}),
        ({"presence_penalty": 0.3}, {}),
    ],
)
def test_other_options_of_a_request_end_it(caplog, own, other):
    decoder = pair(K, [make_request("r0", [1, 2], **other)])
    assert "got other sampling options for it: send the same body" in ended(caplog, decoder, **own)


def test_a_warm_up_needs_no_mark():
    decoder = pair(0, [make_request("r0", [1, 2])])
    req = make_request("r0", [1, 2])
    req.bootstrap_host = FAKE_BOOTSTRAP_HOST
    decoder.prefiller.send = lambda *_: False
    assert len(decoder.serve([req], tokens=5)[0]) == 5


@pytest.mark.parametrize("processor", [None, "a processor"])
@pytest.mark.parametrize(
    "options", [{}, {"sampling_seed": -5}, {"temperature": 0.0, "min_new_tokens": 3}, *KINDS[-2:]]
)
def test_a_second_prefill_gets_seed_and_options(options, processor):
    wanted, row = {"custom_logit_processor": processor}, torch.zeros(16, dtype=torch.int32)
    engine = ToyEngine(K, seed=2)
    req = make_request("r", [1, 2], wanted=wanted, **options)
    engine.admit(req)
    kept, settings = admitted(req), engine.engine.settings
    params = json.loads(json.dumps(req.build_rebootstrap_payload()))["sampling_params"]
    again = make_request("r", [1, 2], **params)
    ToyEngine(K, seed=1).admit(again)
    assert (admitted(again).seed, admitted(again).options) == (kept.seed, kept.options)
    write_mark(row, again, settings)
    assert take_mark(row, req, settings) is None
    assert admitted(req).seed == kept.seed


def test_several_outputs_are_refused():
    req = make_request("r", [1], n=3)
    req.bootstrap_room = 5
    ToyEngine(K).admit(req)
    assert req.to_finish.status_code == 400
    assert req.to_finish.message.endswith("(bootstrap_room), got 3: send 3 requests")

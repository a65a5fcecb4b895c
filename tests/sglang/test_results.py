"""What SGLang makes of results: ends of requests, log-probabilities, grammars, counts of drafts."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.versions import installed
from mtp_plugin.plugin import CustomVerification, register_verification, unregister_verification
from mtp_plugin.speculative.metrics import alarms
from tests.sglang.toy_engine import EOS, VOCAB, K, ToyEngine, make_request

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "sampling_seed": 5}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED])
def test_a_row_without_finite_logit_ends_its_request_alone(value, kind):
    (expected,) = ToyEngine(0).serve([make_request("r", [1, 2], **kind)], tokens=60)
    lost = expected[20]
    before = expected.index(lost)
    other = {"temperature": 0.8, "sampling_seed": 8, "logit_bias": {str(lost): -1e9}}
    (kept,) = ToyEngine(0).serve([make_request("other", [3], **other)], tokens=60)
    for drafts in (0, K):
        engine = ToyEngine(drafts)
        engine.table[lost] = value
        reqs = [make_request("r", [1, 2], **kind), make_request("other", [3], **other)]
        found, found_kept = engine.serve(reqs, tokens=60)
        end = reqs[0].finished_reason
        assert isinstance(end, FINISH_ABORT)
        assert end.message == "the target gave a row of logits without any finite value"
        assert end.to_json()["status_code"] == 500
        assert found[: before + 1] == expected[: before + 1]
        assert before < len(found) <= before + 1 + K
        assert found_kept == kept
        assert not reqs[1].finished()


def test_a_prompt_without_finite_logit_ends_with_its_last_chunk():
    for chunk, ends in ((1, False), (2, True)):
        engine = ToyEngine(K, chunk=1)
        engine.table[chunk] = float("nan")
        req = make_request("r", [1, 2], **GREEDY, logit_bias={"1": -1e9, "2": -1e9})
        engine.serve([req], tokens=20)
        assert isinstance(req.finished_reason, FINISH_ABORT) == ends


class Failing(CustomVerification):
    description = "fails"

    def __init__(self, error):
        self.error = error

    def num_accepted(self, logits, draft_tokens, target_tokens):  # noqa: ARG002
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no such model"), SystemExit("no such model")])
def test_a_method_that_fails_ends_its_requests_alone(error):
    register_verification("failing", Failing(error))
    try:
        engine = ToyEngine(K)
        chosen = {"custom_params": {"mtp_verification": "failing"}}
        reqs = [make_request("r", [1], **GREEDY, **chosen), make_request("other", [1], **GREEDY)]
        engine.serve(reqs, tokens=30)
    finally:
        unregister_verification("failing")
    assert "no such model" in reqs[0].finished_reason.message
    assert not reqs[1].finished()


# ---- ends of requests, as SGLang finds them

ENDS = {
    "eos": {"ignore_eos": False},
    "stop_token_ids": {"ignore_eos": False, "stop_token_ids": [3, 11]},
    "stop": {"stop": ["HX", "Q", "BC"]},
    "max_new_tokens": {"max_new_tokens": 17},
    # several of them in one step
    "stop and limit": {"stop": ["H", "Q", "B", "C", "D"], "max_new_tokens": 4},
    "token and limit": {
        "stop_token_ids": [*range(2, 10)],
        "ignore_eos": False,
        "max_new_tokens": 4,
    },
    "stop and token": {"stop": ["H", "B"], "stop_token_ids": [*range(9, 15)], "ignore_eos": False},
    "stops in another order": {"stop": ["Q", "C", "H", "B"]},
    "stop_regex": {"stop_regex": ["[BH][A-Q]", "C$"]},
    "stop_regex and others": {
        "stop_regex": ["[BH]$"],
        "stop": ["Q", "D"],
        "stop_token_ids": [3, 11],
        "ignore_eos": False,
        "max_new_tokens": 17,
    },
}


@pytest.mark.parametrize("kind", ENDS)
def test_requests_end_with_drafts_as_without(kind):
    found = []
    for drafts in (0, 1, K):
        reqs = [
            make_request(f"r{i}", [i], temperature=1.0, sampling_seed=i, **ENDS[kind])
            for i in range(8)
        ]
        ToyEngine(drafts, chunk=1).serve(reqs, tokens=200)
        assert all(req.finished() for req in reqs)
        ends = [(list(req.output_ids_through_stop), req.finished_reason.to_json()) for req in reqs]
        found.append(ends)
    assert found[0] == found[1] == found[2]
    if kind == "eos":
        assert {tokens[-1] for tokens, _ in found[0]} == {EOS}


@pytest.mark.parametrize("kind", ["stop", "stop_regex"])
def test_ends_in_one_step_have_the_order_of_single_tokens(kind):
    for string, token, limit in product(range(4), range(4), range(5)):
        found = []
        for counts in ([4], [1] * 4):
            req = make_request(
                "r",
                [1],
                ignore_eos=False,
                stop_token_ids=[20 + token],
                max_new_tokens=2 + limit,
                **{kind: [chr(65 + 20 + string)]},
            )
            req.output_ids.append(1)
            for count in counts:
                if not req.finished():
                    first = 19 + len(req.output_ids)
                    req.output_ids.extend(range(first, first + count))
                    req.update_finish_state(count)
            tokens = list(req.output_ids_through_stop)
            found.append((req.finished_reason.to_json(), req.finished_len or len(tokens), tokens))
        assert found[0] == found[1]
        assert len(found[0][2]) == 2 + min(string, token, limit)


def test_the_tokens_of_every_step_are_streamed():
    engine, req, lengths = ToyEngine(K), make_request("r", [1], **SAMPLED), []
    streamer = engine.scheduler.batch_result_processor.output_streamer
    streamer.stream_output.side_effect = lambda reqs, *_: lengths.append(len(reqs[0].output_ids))
    engine.serve([req], tokens=40)
    assert lengths[0] == 1
    assert lengths[-1] == len(req.output_ids)
    steps = {after - before for before, after in pairwise(lengths)}
    assert {1, K + 1} <= steps <= set(range(1, K + 2))


def test_prompts_in_chunks_do_not_change_the_output():
    found = []
    for drafts, chunk in ((0, None), (0, 2), (K, 2)):
        prompts = [[i, 2, i + 1, 4, 5] for i in range(6)]
        reqs = [make_request(f"r{i}", p, **SAMPLED) for i, p in enumerate(prompts)]
        found.append(ToyEngine(drafts, chunk=chunk).serve(reqs, tokens=40))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED])
def test_log_probabilities_with_drafts_are_those_without(kind):
    found = []
    for drafts in (0, K):
        reqs = [make_request(f"r{i}", [i], num_logprobs=2, **kind) for i in range(3)]
        ToyEngine(drafts).serve(reqs, tokens=40)
        found.append([req.logprob for req in reqs])
    for plain, drafted in zip(*found, strict=True):
        assert plain.output_token_logprobs_idx[:39] == drafted.output_token_logprobs_idx[:39]
        for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            one, two = (getattr(each, f"output_{name}_val")[:39] for each in (plain, drafted))
            assert len(one) == 39
            torch.testing.assert_close(torch.tensor(one), torch.tensor(two))


class Alternating(BaseGrammarObject):
    """Even and odd ids in turn, and `EOS` after twelve of them."""

    def __init__(self):
        super().__init__()
        self.accepted = []

    def _allowed(self):
        if len(self.accepted) == 12:
            return [EOS]
        return [i for i in range(VOCAB) if i % 2 == len(self.accepted) % 2 and i != EOS]

    def accept_token(self, token):
        if token not in self._allowed():
            raise ValueError(f"{token} is not in the grammar")
        self.accepted.append(token)

    def rollback(self, k):
        del self.accepted[len(self.accepted) - k :]

    def is_terminated(self):
        return self.accepted[-1:] == [EOS]

    def allocate_vocab_mask(self, vocab_size, batch_size, device):  # noqa: ARG002
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask, idx):
        words = [0] * vocab_mask.shape[1]
        for token in self._allowed():
            words[token // 32] |= 1 << token % 32
        signed = [word - 2**32 if word >= 2**31 else word for word in words]
        vocab_mask[idx] = torch.tensor(signed, dtype=torch.int32)

    @staticmethod
    def move_vocab_mask(vocab_mask, device):  # noqa: ARG004
        return vocab_mask

    @staticmethod
    def apply_vocab_mask(logits, vocab_mask):
        ids = torch.arange(logits.shape[1])
        logits.masked_fill_((vocab_mask[:, ids // 32] >> (ids % 32)) & 1 == 0, float("-inf"))


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED, {**SAMPLED, "min_p": 0.05, "top_k": 9}])
def test_a_grammar_gives_the_same_text_with_drafts(kind):
    found = []
    for drafts in (0, K):
        reqs = [make_request(f"r{i}", [i], ignore_eos=False, **kind) for i in range(4)]
        for req in reqs[:3]:
            req.grammar = Alternating()
        ToyEngine(drafts).serve(reqs, tokens=40)
        ends = [req.finished() and req.finished_reason.to_json() for req in reqs]
        found.append((ends, [list(req.output_ids_through_stop)[:40] for req in reqs]))
    assert found[0] == found[1]
    for end, tokens in zip(found[0][0][:3], found[0][1], strict=False):
        assert end == {"type": "stop", "matched": EOS}
        assert [token % 2 for token in tokens] == [0, 1] * 6 + [EOS % 2]


# ---- counts of drafts


def test_counts_of_drafts_leave_out_requests_with_a_limit():
    limits = {"all": {}, "one": {"mtp_max_draft_len": 1}, "none": {"mtp_speculate": False}}
    engine = ToyEngine(K)
    reqs = [make_request(name, [1], **SAMPLED, custom_params=limits[name]) for name in limits]
    engine.serve(reqs, tokens=80)
    free, one, none = reqs
    assert none.spec_verify_ct == none.spec_num_correct_drafts == 0
    assert sum(none.spec_correct_drafts_histogram) == 0
    assert one.spec_num_correct_drafts <= one.spec_verify_ct
    counts = engine.reporter
    assert counts.spec_num_forward_ct == pytest.approx(free.spec_verify_ct)
    accepted = counts.spec_num_accept_tokens - counts.spec_num_forward_ct
    assert accepted == pytest.approx(free.spec_num_correct_drafts)
    if installed().counts_tokens:
        assert counts.spec_num_correct_drafts == free.spec_num_correct_drafts
    # SGLang counts the rest when it has the output
    drafts = sum(req.spec_num_correct_drafts for req in reqs)
    assert counts.num_generated_tokens == engine.counts.steps + drafts


def test_counts_of_requests_with_a_limit_alone_can_be_divided():
    engine = ToyEngine(K)
    engine.serve(
        [make_request("r", [1], **GREEDY, custom_params={"mtp_speculate": False})], tokens=9
    )
    assert 0 < engine.reporter.spec_num_forward_ct < 1e-6
    assert engine.reporter.spec_num_accept_tokens == engine.reporter.spec_num_forward_ct


@pytest.mark.parametrize(
    ("params", "proposed"), [({"mtp_max_draft_len": 1}, 10), ({"other": 1}, 30), (None, 30)]
)
def test_a_finished_request_counts_drafts_up_to_its_limit(params, proposed):
    hooks.install(hooks.FRONT_END)
    state = SimpleNamespace(obj=SimpleNamespace(sampling_params={"custom_params": params}))
    manager = SimpleNamespace(
        rid_to_state={"r": state},
        preferred_sampling_params=None,
        server_args=SimpleNamespace(speculative_num_draft_tokens=K + 1),
        _mtp_plugin_settings=ToyEngine(K).engine.settings,
    )
    received = SimpleNamespace(
        rids=["r"],
        spec_verify_ct=[10],
        spec_num_correct_drafts=[6],
        completion_tokens=[16],
        spec_correct_drafts_histogram=[],
    )
    meta = {}
    TokenizerManager._calculate_spec_decoding_metrics(manager, meta, received, 0)
    assert meta["spec_num_proposed_drafts"] == proposed
    assert meta.get("spec_proposed_drafts", proposed) == proposed  # not in 0.5.23
    assert meta["spec_accept_rate"] == 6 / proposed


def _useless_drafts(engine):
    engine.worker.draft_runner.table = engine.table.neg()


@pytest.mark.parametrize("custom", [{}, {"mtp_speculate": False}])
def test_collapsed_acceptance_is_logged_once_and_counted(monkeypatch, caplog, custom):
    monkeypatch.setattr(alarms, "COLLAPSE_STEPS", 64)
    engine = ToyEngine(K)
    _useless_drafts(engine)
    engine.engine.count_drafts("toy", is_first_rank=True)
    reqs = [make_request(f"r{i}", [i], **GREEDY, custom_params=custom) for i in range(4)]
    name, labels = "mtp_plugin_acceptance_alarm_total", {"model_name": "toy"}
    before = REGISTRY.get_sample_value(name, labels) or 0
    engine.serve(reqs, tokens=60)
    lines = [r.getMessage() for r in caplog.records if "acceptance collapsed" in r.getMessage()]
    counted = REGISTRY.get_sample_value(name, labels) - before
    assert (len(lines), counted) == ((0, 0) if custom else (1, 1))


def test_other_ranks_and_simulated_acceptance_have_no_alarm(monkeypatch):
    engine = ToyEngine(K).engine
    assert engine.counts._alarm is not None
    engine.count_drafts("toy", is_first_rank=False)
    assert engine.counts._alarm is None
    monkeypatch.setattr("sglang.srt.speculative.spec_utils.SIMULATE_ACC_LEN", 2.0)
    engine.count_drafts("toy", is_first_rank=True)
    assert engine.counts._alarm is None

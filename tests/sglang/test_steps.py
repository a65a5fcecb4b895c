"""Single steps: log-probabilities, grammars, thinking phases, no work for idle batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang.srt.distributed as distributed
import sglang.srt.speculative.eagle_worker_common as worker_common
import sglang.srt.speculative.spec_utils as spec_utils
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.engine import _edit
from mtp_plugin.hosts.sglang.options import SglangOptions
from tests.sglang.toy_engine import VOCAB, Batch, K, ToyEngine, make_request

BEGIN, END = 30, 31


def admitted_batch(engine, options):
    reqs = [make_request(f"r{i}", [1, 2], sampling_seed=i, **one) for i, one in enumerate(options)]
    for req in reqs:
        engine.admit(req)
    engine.pool.alloc(reqs)
    return Batch(reqs)


@pytest.mark.parametrize("kind", [{"temperature": 0.8}, {"temperature": 0.7, "top_k": 9}])
def test_log_probabilities_are_those_of_sglang(kind):
    engine = ToyEngine(0)
    batch = admitted_batch(engine, [kind] * 3)
    logits, lens = torch.randn(3, VOCAB), torch.tensor([2, 2, 2])
    plain, _ = engine.sample(batch, logits, lens, ForwardMode.DECODE)
    more = {"return_logprob": True, "top_logprobs_nums": [2] * 3, "token_ids_logprobs": [None] * 3}
    tokens, output = engine.sample(batch, logits, lens, ForwardMode.DECODE, **more)
    assert torch.equal(plain, tokens)
    expected = (logits / kind["temperature"]).log_softmax(-1)
    found = torch.as_tensor(output.next_token_logprobs)
    chosen = expected.gather(1, tokens.to(torch.int64).unsqueeze(1))[:, 0]
    torch.testing.assert_close(found, chosen)


class Alone:
    """What SGLang reads of a batch that the plugin has not seen."""

    device = "cpu"


@pytest.mark.parametrize("kind", ["additive", "scaling", "all"])
def test_logits_are_edited_in_the_order_of_sglang(kind):
    options = {
        "additive": {"presence_penalty": 0.5},
        "scaling": {"repetition_penalty": 1.4},
        "all": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    }[kind]
    engine = ToyEngine(K)
    bias = {"logit_bias": {"3": 2.0}}
    alone = Alone()
    given = [{**options, **bias}, {}]
    alone.reqs = [make_request("s", [1], **one) for one in given]
    batch, tokens = admitted_batch(engine, given), torch.tensor([3, 4])
    batch.seq_lens = torch.tensor([2, 2])
    info = SamplingBatchInfo.from_schedule_batch(alone, VOCAB)
    info.penalizer_orchestrator.cumulate_output_tokens(tokens)
    info = info.copy_for_forward()
    engine.engine.apply()
    slots = batch.req_pool_indices
    engine.engine._penalties.count(tokens.to(torch.int32).view(2, 1), torch.ones(2).int(), slots)

    def apply(logits):
        logits[:, 10:20] = float("-inf")

    mask = SimpleNamespace(apply=apply)
    logits = torch.randn(2, VOCAB)
    info.grammar_mask = mask
    expected, found = logits.clone(), logits.repeat_interleave(K + 1, 0)
    info.apply_logits_bias(expected)
    engine.engine._penalize(found, torch.full((2 * (K + 1),), -1), batch.seq_lens, slots)
    _edit(found, batch.sampling_info, K + 1, mask)
    assert not torch.equal(expected, logits)
    exact = 0 if kind != "all" else 1e-6  # SGLang adds the sum of two penalties
    torch.testing.assert_close(found, expected.repeat_interleave(K + 1, 0), rtol=exact, atol=exact)


def test_a_grammar_masks_every_row():
    engine = ToyEngine(K)

    def apply(logits):
        logits[:, 10:] = float("-inf")

    engine.grammar_mask = SimpleNamespace(apply=apply)
    req = make_request("r", [1, 2], temperature=1.0, sampling_seed=3, min_p=0.01)
    (found,) = engine.serve([req], tokens=60)
    assert max(found[1:]) < 10
    assert len(set(found)) > 4


def test_relaxed_acceptance_takes_all_drafts_of_a_thinking_request():
    options = SglangOptions(
        thinking_begin_token=BEGIN, thinking_end_token=END, relaxed_topk=VOCAB, relaxed_delta=1.0
    )
    engine = ToyEngine(K, options)
    engine.table[:, [BEGIN, END]] = -100.0
    engine.worker.draft_runner.table[:, [BEGIN, END]] = -100.0
    reqs = [make_request("thinks", [1, BEGIN], temperature=0.0)]
    engine.serve(reqs, tokens=61, retract=0.2)
    assert engine.counts.acceptance_length == K + 1
    assert engine.counts.retractions > 0
    strict = ToyEngine(K)
    strict.table, strict.worker.draft_runner = engine.table, engine.worker.draft_runner
    strict.serve([make_request("answers", [1, BEGIN], temperature=0.0)], tokens=61)
    assert strict.counts.acceptance_length < K + 1


def test_the_token_of_an_unfinished_prompt_ends_no_thinking_phase():
    options = SglangOptions(
        thinking_begin_token=BEGIN, thinking_end_token=END, relaxed_topk=VOCAB, relaxed_delta=1.0
    )
    lengths = []
    for chunk in (1, 2):  # tokens of the prompt in the first chunk; 2: the whole prompt
        engine = ToyEngine(K, options)
        engine.table[:, [BEGIN, END]] = -100.0
        engine.worker.draft_runner.table[:, [BEGIN, END]] = -100.0
        req = make_request("r", [1, BEGIN], temperature=0.0)
        engine.admit(req)
        engine.pool.alloc([req])
        ends = torch.zeros(1, VOCAB)
        ends[0, END] = 9.0
        engine.sample(Batch([req]), ends, torch.tensor([chunk]), ForwardMode.EXTEND)
        req.kv_committed_len = chunk
        if req.kv is not None:  # 0.5.23
            req.kv.kv_allocated_len = chunk
        engine.serve([req], tokens=41)
        lengths.append(engine.counts.acceptance_length)
    assert lengths[0] == K + 1
    assert lengths[1] < K + 1


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.5, "repetition_penalty": 1.3}])
def test_ranks_take_the_tokens_of_the_first_one(options, monkeypatch):
    def make():
        return make_request("r", [1, 2], temperature=0.8, sampling_seed=3, **options)

    first = ToyEngine(K)
    expected = first.serve([make()], tokens=40)
    sent = []
    group = SimpleNamespace(world_size=2, broadcast=lambda t, **_: sent.append(t.clone()))
    monkeypatch.setattr(distributed, "get_tp_group", lambda: group)
    assert ToyEngine(K).serve([make()], tokens=40) == expected
    monkeypatch.setattr(group, "broadcast", lambda tensor, **_: tensor.copy_(sent.pop(0)))
    other = ToyEngine(K)  # a rank whose logits differ
    ops = other.engine._ops
    own = ops.verify_uniform
    monkeypatch.setattr(ops, "verify_uniform", lambda rows, *more: own(rows.neg(), *more))
    assert other.serve([make()], tokens=40) == expected
    assert sent == []
    # its own tokens are not counted
    counts = [each.engine._penalties._pools.counts for each in (first, other)]
    assert torch.equal(*counts)
    assert bool(counts[0].any()) == bool(options)


def test_acceptance_is_simulated_by_sglang(monkeypatch):
    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", 3.0)
    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    engine = ToyEngine(K)
    engine.serve([make_request("r", [1, 2], temperature=0.0)], tokens=400)
    assert 2.8 < engine.counts.acceptance_length < 3.2


def test_an_argument_of_a_step_that_is_unknown_is_refused(monkeypatch):
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    monkeypatch.setattr(hooks, "_engine", SimpleNamespace(verify=lambda *_: "verified"))

    def original(a, b, c, d=None, uno_target_max_top_k=None, *, watermark_state=None, more=True):  # noqa: ARG001
        pytest.fail("it is replaced")

    given = (original, None, batch, None, None)
    unread = {"watermark_full_mask": False}
    assert hooks._eagle_sample(*given, None, watermark_state=None, **unread) == "verified"
    for more in (
        {"uno_target_max_top_k": 0},
        {"watermark_state": torch.zeros(2)},
        {"more": False},
    ):
        with pytest.raises(
            HostError, match=f"arguments {next(iter(more))} of sglang.*_sample: lea"
        ):
            hooks._eagle_sample(*given, **more)
    with pytest.raises(HostError, match="arguments uno_target_max_top_k of"):
        hooks._eagle_sample(*given, 3)


def test_an_idle_batch_has_no_output():
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, device="cpu")
    found = worker_common.eagle_sample(SimpleNamespace(), batch, SimpleNamespace())
    assert [len(tensor) for tensor in found] == [0, 0, 0]

"""Paths of SGLang's scheduler: mixed batches, prompt log-probabilities, hidden states, several MTP
layers, aborts, preemption, a flushed cache."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
import sglang.srt.managers.schedule_batch as schedule_batch
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from mtp_plugin.hosts.sglang.requests import slot_of
from tests.sglang.toy_engine import VOCAB, Batch, K, ToyEngine, make_request

TOKENS = 30
IS_NEWER = hasattr(ScheduleBatch, "convert_decode_to_extend")
"""0.5.23, in which batches with drafts are mixed, too."""


def sampled(index, prompt, **more):
    return make_request(f"r{index}", prompt, temperature=0.9, sampling_seed=index, **more)


def output_alone(index, prompt, tokens=TOKENS):
    return ToyEngine(0).serve([sampled(index, prompt)], tokens=tokens)[0]


def scheduled(engine, req, end):
    """Return SGLang's batch for the first tokens of a prompt."""
    engine.admit(req)
    req.init_next_round_input()
    if IS_NEWER:
        req.extend_end = end
    else:
        req.set_extend_range(0, end)
    allocator = MagicMock(page_size=1, device="cpu")
    cache = MagicMock(page_size=1, token_to_kv_pool_allocator=allocator)
    allocator.alloc.side_effect = lambda count: torch.arange(1, count + 1)
    allocator.available_size.return_value = 1000
    cache.supports_mamba.return_value = cache.supports_swa.return_value = False
    cache.is_tree_cache.return_value = False
    config = SimpleNamespace(vocab_size=VOCAB, is_encoder_decoder=False)
    kind = SpeculativeAlgorithm.EAGLE if engine.num_drafts else SpeculativeAlgorithm.NONE
    batch = ScheduleBatch.init_new([req], engine.pool, allocator, cache, config, False, kind)
    batch.prepare_for_extend()
    return batch


@pytest.mark.parametrize("drafts", [0, *([K] if IS_NEWER else [])])
def test_decode_rows_of_a_mixed_batch_have_their_positions(drafts):
    engine, made = ToyEngine(drafts), {}
    engine.worker.draft_runner.table = engine.table  # all drafts are accepted
    old, new = sampled(0, [1, 2, 3]), sampled(1, [4, 5, 6, 7])
    running = scheduled(engine, old, 3)
    (token,), _ = engine.sample(running, engine.table[[3]], running.seq_lens, ForwardMode.EXTEND)
    old.output_ids.append(int(token))
    if not drafts:
        running.prepare_for_decode()
    batch = scheduled(engine, new, 2)
    batch.mix_with_running(running)
    assert batch.forward_mode.is_mixed()
    rows = engine.table[[5, int(token)]]
    tokens, _ = engine.sample(batch, rows, batch.seq_lens, batch.forward_mode)
    old.output_ids.append(int(tokens[1]))
    if drafts:
        batch.input_ids = torch.tensor([4, 5, int(token)])
        engine._first_drafts(batch, tokens.to(torch.int64), made)
    engine._prefill([new], made)
    for _ in range(TOKENS):
        engine._drafted_step([old, new], made) if drafts else engine._step([old, new])
    assert list(old.output_ids[:TOKENS]) == output_alone(0, [1, 2, 3])
    assert list(new.output_ids[:TOKENS]) == output_alone(1, [4, 5, 6, 7])
    assert engine.counts.acceptance_length == (K + 1 if drafts else 0)


@pytest.mark.parametrize("start", [0, 2])
def test_prompts_have_the_log_probabilities_of_the_target(start):
    engine, prompts, lens = ToyEngine(K), [[1, 2, 3, 4], [5, 6, 7]], torch.tensor([4, 3])
    wanted = {"return_logprob": True}
    reqs = [sampled(i, prompt, wanted=wanted) for i, prompt in enumerate(prompts)]
    for req in reqs:
        req.logprob_start_len = start
        engine.admit(req)
    engine.pool.alloc(reqs)
    batch = Batch(reqs)
    batch.forward_mode = ForwardMode.EXTEND
    nexts = [[*prompt[start + 1 :], 0] for prompt in prompts]
    metadata = LogitsMetadata(
        ForwardMode.EXTEND,
        extend_return_logprob=True,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens.tolist(),
        extend_logprob_start_lens_cpu=[start] * 2,
        extend_logprob_pruned_lens_cpu=(lens - start).tolist(),
        extend_input_logprob_token_ids_gpu=torch.tensor([*nexts[0], *nexts[1]]),
    )
    head = SimpleNamespace(weight=engine.table.T.contiguous())
    states = torch.eye(VOCAB)[[*prompts[0], *prompts[1]]]
    made = LogitsProcessor(SimpleNamespace(vocab_size=VOCAB))(None, states, head, metadata)
    wanted |= {"top_logprobs_nums": [0] * 2, "token_ids_logprobs": [None] * 2}
    tokens, output = engine.sample(
        batch, made.next_token_logits, lens, ForwardMode.EXTEND, **wanted
    )
    output.input_token_logprobs = made.input_token_logprobs
    result = GenerationBatchResult(logits_output=output, next_token_ids=tokens)
    result.extend_input_len_per_req = lens.tolist()
    result.extend_logprob_start_len_per_req = [start] * 2
    engine._process(batch, result)
    expected = engine.table.log_softmax(-1)
    for i, (req, prompt) in enumerate(zip(reqs, prompts, strict=True)):
        found = req.logprob.input_token_logprobs_val
        assert list(req.logprob.input_token_logprobs_idx) == prompt[start:]
        assert found[0] is None
        pairs = zip(prompt[start:], prompt[start + 1 :], strict=False)
        assert found[1:] == pytest.approx([float(expected[pair]) for pair in pairs])
        assert list(req.output_ids) == output_alone(i, prompt, tokens=1)
        after = (engine.table[prompt[-1]] / 0.9).log_softmax(-1)[req.output_ids[0]]
        assert req.logprob.output_token_logprobs_val == pytest.approx([float(after)])


@pytest.mark.parametrize("drafts", [0, K])
@pytest.mark.parametrize("wanted", [True, "last"])
def test_every_token_has_its_hidden_state(drafts, wanted):
    req = sampled(0, [1, 2], max_new_tokens=23, wanted={"return_hidden_states": wanted})
    ToyEngine(drafts).serve([req], tokens=40)
    positions = [int(state[0]) for state in req.hidden_states]
    # the last token is no input of a step; a step with drafts may pass the limit
    assert len(req.output_ids_through_stop) == 23
    if wanted == "last":
        assert positions == [23]
    else:
        assert positions == list(range(2, len(req.output_ids) + 1))


def rotate(ids, _starts, _lens, tokens, rows=slice(None)):
    """Make the latest drafts inputs of the next layer, whose earlier inputs count for nothing."""
    ids[rows] = tokens.flatten()


class MultiLayerEngine(ToyEngine):
    """Drafts by one MTP layer per draft, all in SGLang's own worker."""

    draft_worker = MultiLayerEagleDraftWorker
    patches: ClassVar = {
        "replace": copy.copy,
        "require_gathered_buffer": lambda *_: True,  # logits of all rows
        "rotate_input_ids": rotate,
    }

    def __post_init__(self):
        super().__post_init__()
        worker = self.worker
        worker.draft_runner.req_to_token_pool = worker.draft_runner.token_to_kv_pool = None
        worker.draft_runner.attn_backend = MagicMock()
        worker.draft_runner_list = [worker.draft_runner] * K
        worker.model_config = SimpleNamespace(vocab_size=VOCAB)
        worker.server_args = None
        worker.use_rejection_sampling = worker.chain_mtp_hidden_states = False
        worker.draft_extend_num_front_tokens = 0
        worker._compute_boundary_kv_locs_positions = lambda _: (None,) * (2 if IS_NEWER else 3)
        for name in (
            "_apply_deferred_mamba_init_to_draft_pools",
            "_seed_boundary_kv_stash",
            "_fill_boundary_kv_front_and_update_stash",
        ):
            setattr(worker, name, lambda *_: None)


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 0.9}])
def test_several_mtp_layers_do_not_change_the_output(kind):
    def requests():
        return [make_request(f"r{i}", [i, 3], sampling_seed=i, **kind) for i in range(6)]

    expected = ToyEngine(0).serve(requests(), tokens=TOKENS)
    engine = MultiLayerEngine(K)
    assert engine.serve(requests(), tokens=TOKENS, retract=0.03) == expected
    assert engine.counts.acceptance_length > 1.5
    plain = ToyEngine(K)
    plain.serve(requests(), tokens=TOKENS)
    if not kind["temperature"]:  # drafts are greedy
        assert engine.counts.acceptance_length == plain.counts.acceptance_length


class AbortingEngine(ToyEngine):
    """Aborts requests whose step was launched, before its result is there."""

    aborted = ("r1", "r4", "r5")

    def _process(self, batch, result):
        scheduler = self.scheduler
        scheduler.chunked_req, scheduler.waiting_queue, scheduler.ps.pp_size = None, [], 1
        scheduler.running_batch = scheduler.last_batch = batch
        scheduler.collect_inflight_reqs.return_value = batch.reqs
        for req in batch.reqs:
            if req.rid in self.aborted and len(req.output_ids) > int(req.rid[1:]) - 1:
                Scheduler.abort_request(scheduler, AbortReq(rid=req.rid))
        super()._process(batch, result)


@pytest.mark.parametrize("drafts", [0, K])
def test_an_aborted_request_leaves_no_trace_in_its_slot(drafts):
    engine = AbortingEngine(drafts, slots=2)
    reqs = [sampled(i, [i, 2]) for i in range(8)]
    engine.serve(reqs, tokens=TOKENS)
    for i, req in enumerate(reqs):
        assert isinstance(req.finished_reason, FINISH_ABORT) == (req.rid in engine.aborted)
        expected = output_alone(i, [i, 2])
        ends = min(len(req.output_ids), TOKENS)
        assert list(req.output_ids[:ends]) == expected[:ends]
        assert ends == TOKENS or req.rid in engine.aborted
    assert sorted(engine.pool.free_slots) == [1, 2]
    assert sorted(engine.engine._rows) == [1, 2]


@pytest.mark.parametrize("drafts", [0, K])
def test_a_preempted_request_goes_on_with_the_same_output(drafts, monkeypatch):
    engine, made = ToyEngine(drafts, slots=1), {}
    low, high = (
        sampled(i, [i, 2], wanted={"priority": priority}) for i, priority in enumerate((1, 5))
    )
    engine.admit(low)
    engine._prefill([low], made)
    for _ in range(3):
        engine._drafted_step([low], made) if drafts else engine._step([low])
    running = MagicMock(reqs=[low], hisparse_coordinator=None)
    running.release_req = lambda *more: ScheduleBatch.release_req(running, *more)
    monkeypatch.setattr(
        schedule_batch, "release_kv_cache", lambda req, *_, **__: engine.pool.free(req)
    )
    adder = SimpleNamespace(
        running_batch=running,
        preempt_list=[],
        rem_total_tokens=0,
        rem_total_token_offset=0,
        memory_budget=SimpleNamespace(total_offset=0),
        priority_scheduling_preemption_threshold=2,
        _get_running_request_total_token_offset=lambda _: 10**9,
        _request_slot_reserve_for_req=lambda _: 0,
    )
    more = [] if IS_NEWER else [MagicMock(schedule_low_priority_values_first=False)]
    assert PrefillAdder.preempt_to_schedule(adder, high, *more)
    assert adder.preempt_list == [low]
    assert slot_of(low) is None
    found = engine.serve([high, low], tokens=TOKENS)  # `low` passes the queue again
    assert found == [output_alone(1, [1, 2]), output_alone(0, [0, 2])]


@pytest.mark.parametrize("drafts", [0, K])
def test_a_flushed_cache_gives_slots_with_new_rows(drafts):
    engine = ToyEngine(drafts, slots=2)
    for first in (0, 3):
        reqs = [sampled(i, [i, 2]) for i in range(first, first + 3)]
        found = engine.serve(reqs, tokens=TOKENS)
        assert found == [output_alone(i, [i, 2]) for i in range(first, first + 3)]
        engine.scheduler.req_to_token_pool = engine.pool
        assert Scheduler.flush_cache(engine.scheduler, empty_cache=False)
        assert engine.pool.available_size() == 2

"""Streaming sessions: SGLang gives the slot of a request to the next one."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from mtp_plugin.hosts.sglang.options import SglangOptions
from tests.sglang.toy_engine import EOS, VOCAB, Batch, K, Tokenizer, ToyEngine, make_request

TOKENS = 15
BEGIN, END = 30, 31


class SessionEngine(ToyEngine):
    """Serves the turns of one session."""

    def __post_init__(self):
        super().__post_init__()
        allocator = SimpleNamespace(free=lambda _: None, device="cpu")
        pools = SimpleNamespace(
            req_to_token_pool=self.pool, token_to_kv_pool_allocator=allocator, page_size=1
        )
        self.cache = StreamingSession(ChunkCache(pools))
        self.session = Session(0, "s", streaming=True)

    def turn(self, ids, **options):
        """Return the next request of the session, and a request alone with the same prompt."""
        given = make_request("given", [1], max_new_tokens=TOKENS, **options)
        req = self.session.create_req(
            TokenizedGenerateReqInput(
                rid="turn",
                input_text=None,
                input_ids=array("q", ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=given.sampling_params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                session_params=SessionParams(id="s"),
            ),
            Tokenizer(),
            VOCAB,
            {EOS},
        )
        alone = make_request("alone", list(req.origin_input_ids), **options)
        return req, alone

    def _prefill(self, reqs, drafts):
        for req in reqs:
            req.init_next_round_input(self.cache)
        super()._prefill(reqs, drafts)
        for req in reqs:
            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)

    def _free(self, req):
        length = len(req.origin_input_ids) + len(req.output_ids)
        req.kv.kv_allocated_len = req.kv_committed_len = length
        self.cache.cache_finished_req(req, kv_len_to_handle=length)
        if req.req_pool_idx is not None:
            self.pool.free(req)
        req.kv = None


TURNS = [
    {"temperature": 0.0},
    {"temperature": 1.1, "sampling_seed": 5, "top_k": 12},
    {"temperature": 0.9, "sampling_seed": 6, "custom_params": {"mtp_speculate": False}},
    {"temperature": 0.9, "sampling_seed": 7, "min_p": 0.05},
]


@pytest.mark.parametrize("retract", [0.0, 0.2])
@pytest.mark.parametrize("drafts", [0, K])
def test_a_turn_has_its_own_options(drafts, retract):
    engine = SessionEngine(drafts, slots=3)
    for number, options in enumerate(TURNS):
        if number == 3:  # others get the slot, and give it back
            engine.cache.release_session("s")
            others = [make_request(f"r{i}", [i], sampling_seed=i) for i in range(5)]
            engine.serve(others, tokens=5)
        req, alone = engine.turn([3, number, 2], **options)
        assert len(req.origin_input_ids) == 3 + number * (3 + TOKENS)
        (found,) = engine.serve([req], tokens=TOKENS, retract=retract)
        assert [found] == ToyEngine(0).serve([alone], tokens=TOKENS)
    assert bool(engine.counts.retractions) == bool(retract)


def test_a_retraction_takes_back_the_phase_of_a_dropped_token():
    """The session keeps the slot meanwhile, and its row."""
    options = SglangOptions(
        thinking_begin_token=BEGIN, thinking_end_token=END, relaxed_topk=VOCAB, relaxed_delta=1.0
    )
    engine = SessionEngine(K, options)
    for table in (engine.table, engine.worker.draft_runner.table):
        table[:, [BEGIN, END]] = -100.0
    req, _ = engine.turn([1, BEGIN], temperature=0.0)
    engine.admit(req)
    engine.pool.alloc([req])
    req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
    ends = torch.zeros(1, VOCAB)
    ends[0, END] = 9.0
    engine.sample(Batch([req]), ends, torch.tensor([2]), ForwardMode.EXTEND)
    slot = req.req_pool_idx
    engine._free(req)
    req.reset_for_retract()
    req.init_next_round_input(engine.cache)
    assert req.req_pool_idx == slot
    engine.serve([req], tokens=TOKENS)
    assert engine.counts.acceptance_length == K + 1

"""Sessions: SGLang gives the slot of a request of a streaming session to the next one."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.hosts.sglang.requests import slot_of
from tests.sglang.toy_engine import EOS, VOCAB, Batch, K, Tokenizer, ToyEngine, make_request

TOKENS = 15
IS_LENT = hasattr(StreamingSession, "take")
"""A request works on the record of its session's slot, as in 0.5.23."""
BEGIN, END = 30, 31


class SessionEngine(ToyEngine):
    """Serves the turns of one session."""

    def __post_init__(self):
        super().__post_init__()
        pools = MagicMock(req_to_token_pool=self.pool, page_size=1)
        pools.token_to_kv_pool_allocator.device = "cpu"
        if not IS_LENT:
            from sglang.srt.mem_cache.chunk_cache import ChunkCache

            pools = ChunkCache(pools)
        self.cache = StreamingSession(pools)
        self.session = Session(0, "s", streaming=True)
        self.rid = None

    def turn(self, ids, **options):
        """Return the next request of the session, and a request alone with the same prompt."""
        last, self.rid = self.rid, f"turn {len(self.session.req_nodes)}"
        given = make_request("given", [1], max_new_tokens=TOKENS, **options)
        req = self.session.create_req(
            TokenizedGenerateReqInput(
                rid=self.rid,
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
                session_params=SessionParams(id="s", rid=None if self.session.streaming else last),
            ),
            Tokenizer(),
            VOCAB,
            {EOS},
        )
        alone = make_request("alone", list(req.origin_input_ids), **options)
        return req, alone

    def _prefill(self, reqs, drafts):
        for req in reqs:
            self.match(req)
        super()._prefill(reqs, drafts)
        for req in reqs:
            self.hold(req)

    def match(self, req):
        """Give a request the slot of its session."""
        if IS_LENT:
            ids = [*req.origin_input_ids, *req.output_ids]
            self.cache.try_match_prefix(SimpleNamespace(req=req, key=ids[:-1]))
        else:
            req.init_next_round_input(self.cache)

    def hold(self, req):
        """Give a session the slot of its request."""
        if IS_LENT:
            self.cache.take(req)
        else:
            req.kv = ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)

    def _free(self, req):
        length = len(req.origin_input_ids) + len(req.output_ids)
        if IS_LENT:
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length
            if not self.cache.try_cache_finished_req(req):
                self.pool.free(req)
            return
        req.kv.kv_allocated_len = req.kv_committed_len = length
        self.cache.cache_finished_req(req, kv_len_to_handle=length)
        if slot_of(req) is not None:
            self.pool.free(req)
        req.kv = None


class OlderEngine(SessionEngine):
    """Serves the turns of a session whose requests have slots of their own."""

    _free = ToyEngine._free

    def __post_init__(self):
        super().__post_init__()
        self.session = Session(0, "s")

    def match(self, req):
        pass

    hold = match


TURNS = [
    {"temperature": 0.0},
    {"temperature": 1.1, "sampling_seed": 5, "top_k": 12, "presence_penalty": 1.0},
    {"temperature": 0.9, "sampling_seed": 6, "custom_params": {"mtp_speculate": False}},
    {"temperature": 0.9, "sampling_seed": 7, "min_p": 0.05, "repetition_penalty": 1.6},
]


@pytest.mark.parametrize("retract", [0.0, 0.2])
@pytest.mark.parametrize("drafts", [0, K])
@pytest.mark.parametrize("kind", [SessionEngine, OlderEngine])
def test_a_turn_has_its_own_options(kind, drafts, retract):
    engine = kind(drafts, slots=3)
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
    engine.hold(req)
    ends = torch.zeros(1, VOCAB)
    ends[0, END] = 9.0
    engine.sample(Batch([req]), ends, torch.tensor([2]), ForwardMode.EXTEND)
    slot = slot_of(req)
    engine._free(req)
    req.reset_for_retract()
    engine.match(req)
    assert slot_of(req) == slot
    engine.serve([req], tokens=TOKENS)
    assert engine.counts.acceptance_length == K + 1

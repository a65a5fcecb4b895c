"""Two toy engines, one that prefills and one that decodes, joined by SGLang's own buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import sglang.srt.disaggregation.prefill as prefill
import sglang.srt.speculative.eagle_worker_v2 as worker_v2
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, DecodeTransferQueue
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_disaggregation import build_eagle_disagg_draft_input
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.split import expect_free_words
from tests.sglang.toy_engine import VOCAB, ToyEngine, _patched, _store


def metadata():
    buffers = MetadataBuffers(8, 2, torch.float32, max_sampling_mask_tokens=0)
    expect_free_words(buffers)
    return buffers


class Prefiller(ToyEngine):
    """Samples first tokens and first drafts, and sends them."""

    def __post_init__(self):
        super().__post_init__()
        self.buffers = metadata()
        process = Scheduler.process_batch_result_disagg_prefill
        self.scheduler.process_batch_result_disagg_prefill = partial(process, self.scheduler)
        self.scheduler.disaggregation_mode = DisaggregationMode.PREFILL

    def send(self, req, index):
        """Return whether the request was sent."""
        drafts, self.scheduler.send_kv_chunk = {}, MagicMock()
        req.sampling_params.max_new_tokens = 1
        self.admit(req)
        cached = {"maybe_cache_unfinished_req"} & vars(prefill).keys()  # 0.5.17
        with _patched(prefill, **dict.fromkeys(cached, lambda *_: None)):
            self._prefill([req], drafts)
        self._free(req)
        if not self.scheduler.send_kv_chunk.called:
            return False
        req.metadata_buffer_index = index
        req.output_topk_p, req.output_topk_index = torch.ones(1), torch.tensor([0])
        if self.num_drafts:
            req.output_topk_index = torch.tensor(drafts[req.rid])
            req.hidden_states_tensor = torch.zeros(2)
        self.buffers.set_buf(req)
        return True


class Prebuilt(ScheduleBatch):
    """What SGLang reads of a batch of transferred requests."""

    def __init__(self, reqs, pool):
        self.reqs, self.req_to_token_pool, self.device = reqs, pool, "cpu"
        self.model_config = SimpleNamespace(vocab_size=VOCAB, hf_config=SimpleNamespace())
        self.return_logprob = self.enable_overlap = False


class Steps(ToyEngine):
    """Keeps how many tokens the first step of each request gives."""

    def __post_init__(self):
        super().__post_init__()
        self.first_steps = {}

    def _drafted_step(self, reqs, drafts):
        new = [req for req in reqs if len(req.output_ids) == 1]
        super()._drafted_step(reqs, drafts)
        self.first_steps |= {req.rid: len(req.output_ids) - 1 for req in new}


@dataclass
class Decoder(Steps):
    """Serves requests whose first tokens another engine samples."""

    prefiller: Any = None
    bodies: Any = ()
    """What the other engine gets."""

    def __post_init__(self):
        super().__post_init__()
        self.pool = DecodeReqToTokenPool(self.slots, 64, "cpu", False, 4)
        self.runner.req_to_token_pool = self.pool
        self.engine.attach(self.runner)
        if self.num_drafts:
            self.engine.drafts_from(self.worker)
        self.bodies = {req.rid: req for req in self.bodies}
        algorithm = SpeculativeAlgorithm.EAGLE if self.num_drafts else SpeculativeAlgorithm.NONE
        self.queue = MagicMock(metadata_buffers=metadata(), spec_algorithm=algorithm)
        self.queue.scheduler.server_args.disaggregation_transfer_backend = "nixl"
        self.queue.scheduler.kv_checksum_computer = None
        worker, self.is_newer = self.worker, hasattr(runtime_context, "SpawnRanks")  # 0.5.23
        worker.cuda_graph_runner = worker.req_to_token_pool = worker.tree_mask_mode = None
        worker.draft_attn_backend.init_forward_metadata = worker.target_worker = MagicMock()
        worker.draft_forward = partial(worker_v2.EagleDraftWorker.draft_forward, worker)

    def _draft(self, step):
        prepared = (step, False, None)[: 3 if self.is_newer else 2]
        step.mark_forward_metadata_ready = MagicMock()
        batch = SimpleNamespace(spec_info=step.spec_info, forward_mode=ForwardMode.DECODE)
        with _patched(
            worker_v2,
            prepare_for_draft=lambda *_, **__: prepared,
            build_eagle_verify_input=lambda *made, **_: made[4],
        ):
            return worker_v2.EagleDraftWorker.draft(self.worker, batch)

    def _prefill(self, reqs, drafts):
        self.pool.alloc(reqs)
        for req in [req for req in reqs if not req.output_ids]:  # the others were retracted
            self.receive(req)
        for req in [req for req in reqs if req.finished()]:
            reqs.remove(req)
            self._free(req)
        for req in reqs:
            req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids[:-1]
            length = len(req.full_untruncated_fill_ids)
            if self.is_newer:
                req.extend_end = length
            else:
                req.prefix_indices = []
                req.set_extend_range(0, length)
        batch = Prebuilt(reqs, self.pool)
        batch.prepare_for_prebuilt()
        if self.num_drafts and reqs:
            last = torch.tensor([req.output_ids[-1] for req in reqs])
            arguments = SimpleNamespace(speculative_eagle_topk=1, enable_multi_layer_eagle=False)
            given = [] if self.is_newer else [arguments]
            _store(drafts, batch, build_eagle_disagg_draft_input(batch, *given, last, None))

    def receive(self, req):
        """Take the first token of a request from the other engine."""
        index, req.bootstrap_room, theirs = 3, 5, self.prefiller.buffers
        if self.prefiller.send(self.bodies[req.rid], 1):
            for name, mine in vars(self.queue.metadata_buffers).items():
                if isinstance(mine, torch.Tensor):
                    mine[index] = getattr(theirs, name)[1]
            self.queue.metadata_buffers.bootstrap_room[index] = req.bootstrap_room
        hooks._engine = self.engine
        transfer = SimpleNamespace(req=req, metadata_buffer_index=index, is_rebootstrap=False)
        transfer.kv_receiver = MagicMock()
        DecodeTransferQueue._commit_transfer_to_req(self.queue, transfer)
        assert transfer.kv_receiver is None


def pair(drafts, bodies=(), **options):
    """Return the engine that decodes, with another seed than that of the other engine."""
    prefiller = Prefiller(drafts, seed=1, **options)
    return Decoder(drafts, seed=2, prefiller=prefiller, bodies=bodies, **options)

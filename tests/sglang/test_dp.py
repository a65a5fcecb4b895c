"""Data parallelism: replicas and DP attention, with SGLang's own process groups over gloo."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import sglang.srt.speculative.eagle_worker_common as worker_common
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.hosts.sglang.requests import admitted
from tests.sglang.toy_engine import VOCAB, Batch, K, ToyEngine, free_port, make_request, prepare

TOKENS = 12
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["tests.sglang.conftest", "tests.sglang.test_dp"])


def requests(dp_rank, count=6):
    prompts, seeds = range(1 + 9 * dp_rank, 40), range(50 * dp_rank, 100)
    return [
        make_request(f"r{i}", [prompts[i]], temperature=0.9, sampling_seed=seeds[i])
        for i in range(count)
    ]


def serve_rank(rank, ranks, dp_ranks, port, idle_from):
    """Return the outputs of a rank, which is idle if its DP rank is ``idle_from`` or higher."""
    prepare(rank, ranks, dp_ranks, port)
    engine, width, outputs = ToyEngine(K, seed=1), ranks // dp_ranks, []
    if rank % width:  # the tokens of the first rank must become output
        verify = engine.engine.verify

        def verify_others(verify_input, batch, output, mask):
            output.next_token_logits = output.next_token_logits.roll(1, 1)
            return verify(verify_input, batch, output, mask)

        engine.engine.verify = verify_others
    torch.distributed.barrier()
    if rank // width < idle_from:
        outputs = engine.serve(requests(rank // width), tokens=TOKENS)
    else:
        batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, device="cpu")
        assert [len(found) for found in worker_common.eagle_sample(None, batch, None)] == [0, 0, 0]
    torch.distributed.barrier()  # fails after 20 s if the other ranks wait elsewhere
    return outputs


@pytest.mark.parametrize(
    ("ranks", "dp_ranks", "idle_from"), [(2, 1, 1), (2, 2, 2), (2, 2, 1), (4, 2, 2), (4, 2, 1)]
)
def test_each_dp_rank_keeps_its_tokens(ranks, dp_ranks, idle_from):
    port, width = free_port(), ranks // dp_ranks
    with ProcessPoolExecutor(ranks, mp_context=RANKS) as pool:
        futures = [
            pool.submit(serve_rank, rank, ranks, dp_ranks, port, idle_from) for rank in range(ranks)
        ]
        outputs = [future.result(timeout=200) for future in futures]
    expected = [
        ToyEngine(0, seed=1).serve(requests(dp_rank), tokens=TOKENS) if dp_rank < idle_from else []
        for dp_rank in range(dp_ranks)
    ]
    assert outputs == [expected[rank // width] for rank in range(ranks)]


def rank_engine(dp_rank, drafts=K):
    engine = ToyEngine(drafts, seed=1)
    engine.engine.seed_from(1, dp_rank, 2)
    return engine


def test_dp_ranks_give_requests_other_seeds():
    engines = [rank_engine(0), rank_engine(1)]
    made = [[make_request(f"r{i}", [1]) for i in range(8)] for _ in engines]
    outputs = [
        engine.serve(reqs, tokens=TOKENS) for engine, reqs in zip(engines, made, strict=True)
    ]
    assert len({tuple(output) for one in outputs for output in one}) == 16
    assert len({admitted(req).seed for reqs in made for req in reqs}) == 16


def test_a_seed_gives_one_output_on_any_dp_rank():
    engines = [rank_engine(0), rank_engine(1, drafts=0)]
    engines[1].serve([make_request("other", [3])], tokens=3)
    outputs = [engine.serve(requests(0), tokens=TOKENS) for engine in engines]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("slots", [0, 4])
def test_an_idle_rank_samples_nothing(monkeypatch, kernels, slots):
    """Slots may be padded to the rows of the largest rank where the logits have none."""
    tags = {"thinking_begin_token": 30, "thinking_end_token": 31, "relaxed_topk": 2}
    engine = ToyEngine(K, SglangOptions(kernels=kernels, **tags))
    engine.serve([make_request("r", [1], frequency_penalty=0.1)], tokens=3)
    monkeypatch.setattr(engine.engine, "_has_penalties", None)
    monkeypatch.setattr(engine.engine, "apply", None)
    batch, padding = Batch([]), torch.zeros(slots, dtype=torch.int64)
    batch.req_pool_indices = padding
    tokens, _ = engine.sample(batch, torch.zeros(0, VOCAB), padding + 1, ForwardMode.IDLE)
    assert len(tokens) == 0
    batch.forward_mode = ForwardMode.IDLE
    assert hooks._draft(lambda _, given: given, engine.worker, batch) is batch
    runner, output = engine.worker.draft_runner, SimpleNamespace()
    output.next_token_logits = torch.zeros(0, VOCAB)
    step = SimpleNamespace(req_pool_indices=padding, positions=padding)
    with engine.engine.drafting(runner, step):
        engine.engine.after_forward(runner, output)
    assert output.next_token_logits.shape == (0, VOCAB)

"""Data parallelism: replicas and DP attention, with SGLang's own process groups over gloo."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import sglang.srt.speculative.eagle_worker_common as worker_common
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.sglang.toy_engine import K, ToyEngine, free_port, make_request, prepare

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


@pytest.mark.parametrize(("ranks", "idle_from"), [(2, 2), (2, 1), (4, 2), (4, 1)])
def test_each_dp_rank_keeps_its_tokens(ranks, idle_from):
    port = free_port()
    with ProcessPoolExecutor(ranks, mp_context=RANKS) as pool:
        futures = [
            pool.submit(serve_rank, rank, ranks, 2, port, idle_from) for rank in range(ranks)
        ]
        outputs = [future.result(timeout=200) for future in futures]
    expected = [ToyEngine(0, seed=1).serve(requests(rank), tokens=TOKENS) for rank in range(2)]
    expected[idle_from:] = [[]] * (2 - idle_from)
    assert outputs == [expected[rank * 2 // ranks] for rank in range(ranks)]

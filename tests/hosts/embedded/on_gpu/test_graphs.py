"""The tests of graphs with real ones, and what only a device can show."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mtp_plugin.hosts.embedded import gc_freeze
from mtp_plugin.hosts.embedded.cuda_graphs import capture_lock
from tests.hosts.embedded.conftest import assert_drained
from tests.hosts.embedded.test_graphs import *  # noqa: F403
from tests.hosts.embedded.test_graphs import WORKERS, greedy
from tests.ops.on_device import read_back_forbidden


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever reads the device back, or copies in a way that waits, raises."""
    torch.cuda.synchronize()
    with read_back_forbidden():
        yield


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r17_no_step_waits_for_the_device(graphed, target, prompts, vanilla):
    """R17: prompts, chunks of prompts and replays under overlap; what is waited for is the event
    after a step's results alone."""
    watched = graphed(
        vanilla=vanilla,
        max_num_tokens=40,  # prompts come in chunks, with generations
        mtp={"check_metadata": False},
    )
    few = [prompts[6], prompts[3], prompts[5]]
    want = [target.greedy(p, 16) for p in few]
    assert watched.generate(few, greedy()) == want
    watched.replayed.clear()
    with nothing_waits():
        outputs = watched.generate(few, greedy())
    assert outputs == want
    assert len(watched.replayed) > 0
    assert any(len(shape.chunk_lens) > 0 for shape in watched.eager)


SAMPLED = {"temperature": 0.7, "top_p": 0.95}
REQUESTED = {
    "cuts": {**SAMPLED, "top_k": 20, "min_p": 0.01},
    "pools": {
        **SAMPLED,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "prompt_ignore_length": 2,
        "logit_bias": {7: 1.5, 9: -2.0},
        "allowed_token_ids": list(range(2, 100)),
        "bad_words": [[3], [4, 5], [6, 7, 8]],
        "min_tokens": 4,
        "stop_token_ids": (11, 12),
    },
    "logprobs": {**SAMPLED, "logprobs": 5, "prompt_logprobs": 2},
    "rejection": {**SAMPLED, "verification": "rejection"},
    "block": {**SAMPLED, "verification": "block"},
    "thinking": {"thinking_token_budget": 3},
}


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("requested", REQUESTED.values(), ids=REQUESTED)
def test_r17_no_request_of_any_option_waits_for_the_device(graphed, prompts, vanilla, requested):
    """R17: rows of pools are filled and their prompts counted as requests are admitted, preempted
    ones again, together with generating requests."""
    watched = graphed(
        vanilla=vanilla,
        max_num_tokens=40,
        kv_cache_config={"max_tokens": 96},
        speculative={"begin_thinking_phase_token": 5, "end_thinking_phase_token": 6},
        mtp={"check_metadata": False, "verification": ["coupled", "rejection", "block"]},
    )
    params = [greedy(seed=number, **(requested if number % 3 else {})) for number in range(8)]
    want = watched.generate(prompts, params)
    with nothing_waits():
        outputs = watched.generate(prompts, params)
    assert outputs == want
    assert watched.llm.executor.num_preemptions > 0


def test_the_mode_that_catches_waits_does(graphed):
    graphed()
    with nothing_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("vanilla", WORKERS)
def test_memory_does_not_grow(graphed, prompts, vanilla):
    watched = graphed(vanilla=vanilla)
    for batch in (prompts, prompts[:1], prompts[:3]):
        watched.generate(batch, greedy(4))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for round_ in range(50):
        watched.generate(prompts[: (1, 3, 8)[round_ % 3]], greedy(4))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert_drained(watched.llm)


def test_graphs_keep_no_logits(graphed):
    watched = graphed()
    for step in watched.captured._steps.values():
        assert "logits" not in step.outputs
    assert watched.captured.num_bytes > 0


def test_nothing_is_collected_while_a_capture_holds_the_lock(graphed):
    """Garbage may shut an engine down, which waits for the lock."""
    held = []

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            held.append(capture_lock.locked())

    gc.disable()
    try:
        Garbage()
        graphed(sizes=(1,))
    finally:
        gc.enable()
    assert held == [False]


def test_shutdown_leaves_no_graph_to_the_collector(graphed, prompts):
    watched = graphed()
    watched.generate(prompts[:2], greedy(4))
    steps = [weakref.ref(step) for step in watched.captured._steps.values()]
    pool = watched.llm.pools.num_bytes()
    del watched.captured.replay  # the watch
    watched.captured = None
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        watched.llm.shutdown()
        assert [step() for step in steps] == [None] * len(steps)
        assert torch.cuda.memory_allocated() <= before - pool
    finally:
        gc.enable()


def test_the_collector_leaves_the_model_alone_until_the_end(graphed, monkeypatch):
    gc.unfreeze()
    freeze = gc_freeze.GCFreeze()
    monkeypatch.setattr(gc_freeze, "of_process", freeze)
    watched = graphed()
    assert gc.get_freeze_count() > freeze.HOST_FROZE
    watched.llm.shutdown()
    assert gc.get_freeze_count() < freeze.HOST_FROZE


def test_two_executors_of_different_sizes_share_a_model(graphed, target, prompts):
    """The larger one comes later; what the graphs of the smaller one read must stay."""
    small = graphed(sizes=(1, 2), max_batch_size=2, attn_backend="sdpa")
    large = graphed(max_batch_size=8, attn_backend="sdpa")
    want = [target.greedy(p, 16) for p in prompts]
    for _ in range(2):
        assert large.generate(prompts, greedy()) == want
        assert small.generate(prompts[:4], greedy()) == want[:4]
    assert len(small.replayed) > 0

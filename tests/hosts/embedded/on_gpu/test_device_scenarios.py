"""Scenarios that only a device and its graphs can show, each by its number."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from tests.hosts.embedded.conftest import WORKERS, assert_drained

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r01_captures_write_to_sentinels_only(harness, target, prompts, vanilla):
    """R01: dummy rows have no step before them; nothing they do reaches a request's rows."""
    llm = harness.llm(vanilla=vanilla, kv_fill=float("nan"))
    assert len(llm.executor.engine.captured.shapes) > 0
    sentinel_rows = llm.blocks.block_size
    for layer in llm.pools.layer_ids:
        rows = torch.arange(llm.pools.num_rows - sentinel_rows, device="cuda")
        for pool in llm.pools.rows(layer, rows):
            assert torch.isnan(pool).all()
    manager = llm.pieces.manager
    live = slice(0, manager.sentinel_slot)
    nothing = manager.table.columns.row({})
    assert manager.table.rows[live].tolist() == [nothing] * manager.sentinel_slot
    if vanilla:
        assert not manager.mtp_past_tokens_pool[live].any()
        assert not manager.mtp_past_hidden_states_pool[live].any()
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [target.greedy(p, 12) for p in prompts]
    assert_drained(llm)


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_r03_every_backend_follows_the_draft_loop(harness, target, prompts, backend, vanilla):
    """R03: each attention backend sees the lengths of each draft pass, inside graphs too."""
    llm = harness.llm(vanilla=vanilla, attn_backend=backend)
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [target.greedy(p, 12) for p in prompts]
    assert llm.executor.engine.captured.num_replays > 0
    assert llm.executor.acceptance.acceptance_length > 1.2


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r04_replays_are_checked_for_traces(harness, target, prompts, vanilla):
    """R04: debug mode compares every device field around the draft loop of every replay."""
    llm = harness.llm(vanilla=vanilla, mtp={"check_metadata": True})
    captured = llm.executor.engine.captured
    for step in captured._steps.values():
        names = {check.name for check in step.checks}
        assert {"kv_lens_cuda", "kv_write_limit", "block_table", "_seq_lens_cuda"} <= names
    outputs = llm.generate(prompts[:3], GREEDY)
    assert [o.token_ids for o in outputs] == [target.greedy(p, 12) for p in prompts[:3]]
    assert captured.num_replays > 0


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r09_slots_suffice_while_one_batch_ends_and_the_next_begins(
    harness, target, prompts, vanilla
):
    """R09: full batches one after the other under overlap: slots of a step that still runs are
    held, and there are enough."""
    llm = harness.llm(vanilla=vanilla, max_batch_size=4)
    short = SamplingParams(max_new_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts * 4, short)
    assert [o.token_ids for o in outputs] == [target.greedy(p, 3) for p in prompts * 4]
    assert_drained(llm)

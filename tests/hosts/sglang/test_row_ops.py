"""Verification of steps in which all requests have K drafts."""

from __future__ import annotations

import numpy as np
import torch

from mtp_plugin.speculative.rows.request_slots import DRAFT_LIMIT
from tests.hosts.vllm.rows import NUM_SLOTS, make_batch, make_ops, sample, verify
from tests.ops.on_device import vector


def test_drafts_beyond_the_limit_of_a_request_are_not_accepted() -> None:
    limits = {slot: {DRAFT_LIMIT: slot % 3} for slot in range(NUM_SLOTS) if slot % 4}
    ops, batch = make_ops(columns=limits), make_batch(4, [4] * NUM_SLOTS)
    choices = sample(ops, batch).tolist()
    for first, drafts in zip(batch.first_rows, batch.drafts, strict=False):
        drafts[:] = choices[first : first + 3]
    positions, slots = vector(batch.positions), vector(batch.indices)
    found = ops.verify_uniform(
        batch.logits, batch.input_ids(), positions, slots, np.array(batch.indices)
    )
    accepted = [limits.get(slot, {DRAFT_LIMIT: 3})[DRAFT_LIMIT] for slot in batch.indices]
    assert found.num_accepted.tolist() == [count + 1 for count in accepted]
    assert torch.equal(found.tokens, verify(ops, batch).tokens)

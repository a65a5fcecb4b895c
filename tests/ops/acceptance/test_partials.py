"""What every block of the vocabulary reduces to where requests are relaxed."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.acceptance.accept_triton import relaxed_partials
from mtp_plugin.ops.top1 import TILE
from tests.op_arguments import poisoned_memory
from tests.ops.acceptance.cases import (
    POOLS,
    Thinker,
    assert_nothing_else_written,
    copied,
    layout_of,
    relaxed_rule,
    slot_of,
)
from tests.ops.acceptance.random_cases import some_thinker
from tests.ops.on_device import DEVICE
from tests.ops.top_k.rows import (
    DTYPES,
    VOCABS,
    best_ids,
    bounds_of,
    odd_rows,
    strided,
    without_nan,
)


@settings(max_examples=15)
@given(
    num_contexts=st.integers(0, 2),
    num_generations=st.integers(0, 2),
    k=st.integers(0, 4),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    begins=st.booleans(),
    pool=st.sampled_from(POOLS),
    seed=st.integers(0, 2**31),
)
def test_weights_and_ranks_of_every_block(
    num_contexts, num_generations, k, vocab, dtype, begins, pool, seed
) -> None:
    """Of drafted rows whose request thinks or may begin to; the others have a top-1 alone."""
    rng = torch.Generator().manual_seed(seed)
    rows = num_contexts + num_generations * (k + 1)
    logits = strided(odd_rows(rng, rows, vocab, dtype, smooth=True), 2)
    drafts = torch.randint(-1, vocab + 1, (num_generations, k), generator=rng)
    thinker_rng = random.Random(seed)
    thinkers = [
        some_thinker(thinker_rng, limit=thinker_rng.choice([0.0, 0.5]))
        for _ in range(num_contexts + num_generations)
    ]
    begin = vocab + 7
    rule = relaxed_rule(thinkers, begin, seed=seed, pool=pool, gap=1, id_stride=2)
    before = copied(rule)
    if begins and drafts.numel():
        drafts[0, -1] = begin
    layout = layout_of(num_contexts, num_generations, k)
    with poisoned_memory():
        partials = relaxed_partials(layout, logits, drafts.reshape(-1).to(DEVICE), rule)
    assert_nothing_else_written(before, rule, [])
    thinking = [slot_of(rule, num_contexts + g).thinking for g in range(num_generations)]
    relaxed = torch.tensor(thinking, dtype=torch.bool) | (drafts == begin).any(dim=1)
    usable = without_nan(logits).float().cpu()
    all_ids = torch.arange(vocab)
    for part, block in enumerate(bounds_of(rows, vocab, heavy=True)):
        values = usable[:, block]
        assert torch.equal(partials.values[:, part].cpu(), values.amax(dim=1))
        assert torch.equal(partials.ids[:, part].cpu(), (best_ids(values) + block.start).int())
        for g in range(num_generations):
            for i in range(k if relaxed[g] else 0):
                row, draft = num_contexts + g * (k + 1) + i, int(drafts[g, i])
                value = usable[row, draft] if 0 <= draft < vocab else torch.tensor(-torch.inf)
                ahead = (values[row] > value) | ((values[row] == value) & (all_ids[block] < draft))
                # a masked draft is never accepted, whatever its rank
                assert value == -torch.inf or int(partials.ahead[row, part]) == int(ahead.sum())
                alive = values[row][values[row] > -torch.inf].double()
                relative = (
                    torch.where(alive == alive.max(), 0.0, alive - alive.max()).exp()
                    if len(alive)
                    else alive
                )
                torch.testing.assert_close(
                    float(partials.weights[row, part]), float(relative.sum()), rtol=1e-5, atol=0
                )


def test_a_block_of_several_tiles_weighs_as_one() -> None:
    """Many rows: every program reads one block after another, and reduces its lanes once."""
    vocab, k = 2500, 1
    rng = torch.Generator().manual_seed(4)
    rows = odd_rows(rng, 70 * (k + 1), vocab, torch.float32, smooth=True)
    rows[0] = torch.arange(vocab) / 100  # the highest in the last block
    rows[2] = -torch.arange(vocab) / 100  # and in the first
    rows[4] = -torch.inf
    rows[6, [3, 1030, 2499]] = torch.inf
    assert bounds_of(len(rows), vocab, heavy=True)[0].stop > 2 * TILE
    drafts = torch.randint(0, vocab, (70,), generator=rng)
    rule = relaxed_rule([Thinker()] * 70)
    logits = rows.to(DEVICE)
    partials = relaxed_partials(layout_of(0, 70, k), logits, drafts.to(DEVICE), rule)
    usable = without_nan(rows).double()
    for g in range(70):
        row, draft = usable[2 * g], int(drafts[g])
        alive = row[row > -torch.inf]
        relative = torch.where(alive == row.max(), 0.0, alive - row.max()).exp()
        torch.testing.assert_close(
            float(partials.weights[2 * g].sum()), float(relative.sum()), rtol=1e-5, atol=0
        )
        before = (row == row[draft]) & (torch.arange(vocab) < draft)
        if row[draft] > -torch.inf:
            assert int(partials.ahead[2 * g].sum()) == int(((row > row[draft]) | before).sum())
    assert torch.equal(partials.ids[:, 0].cpu(), best_ids(rows).int())

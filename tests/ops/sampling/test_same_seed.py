"""The same seed gives the same token, whatever the batch, its order and the number of drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mtp_plugin.ops import (
    TRUNCATION_SIZE,
    Backend,
    DraftedBy,
    LogitRows,
    ProposedDrafts,
    SlotRows,
    TargetSamples,
    VerifiedBy,
    build_slot_rows,
    keep_draft_probs,
    rejection_sample,
    sample_tokens,
)
from mtp_plugin.ops.row_sums import FEW_ROWS
from tests.ops.on_device import DEVICE, vector

REQUESTS, MAX_DRAFT_LEN = 8, 3
BACKENDS = pytest.mark.parametrize("backend", Backend)
VOCABS = pytest.mark.parametrize("vocab", [50, 5003])


class Requests:
    """Requests with different options, positions and logits [R, K+1, V]."""

    def __init__(self, vocab: int, **options: int) -> None:
        rng, noise = random.Random(vocab), torch.Generator().manual_seed(vocab)
        shape = REQUESTS, MAX_DRAFT_LEN + 1, vocab
        self.logits = torch.randn(shape, generator=noise).mul(2).to(DEVICE)
        self.positions = vector(rng.randrange(4000) for _ in range(REQUESTS))
        self.slots = build_slot_rows(
            [
                {
                    "temperature": rng.choice((0.0, 0.7, 1.0, 1.5)),
                    "top_k": rng.choice((0, 5, 40)),
                    "top_p": rng.choice((1.0, 0.95, 0.6)),
                    "min_p": rng.choice((0.0, 0.0, 0.05)),
                    "seed": rng.getrandbits(64),
                    **options,
                }
                for _ in range(REQUESTS)
            ],
            device=DEVICE,
        )

    def slots_of(self, order: list[int]) -> SlotRows:
        """Slots of requests in a copy of the table, since verification counts the steps there."""
        return replace(self.slots, table=self.slots.table.clone(), slot_ids=vector(order))

    def sample(self, order: list[int], draft_len: int, backend: Backend) -> torch.Tensor:
        """Sample the K+1 rows of requests in some order, [len(order), K+1]."""
        rows = LogitRows(0, draft_len + 1, self.positions[vector(order)])
        logits = self.logits[vector(order), : draft_len + 1].flatten(0, 1)
        tokens = sample_tokens(logits, rows, self.slots_of(order), backend=backend)
        return tokens.view(len(order), draft_len + 1)


@BACKENDS
@VOCABS
def test_tokens_depend_on_neither_batch_nor_order_nor_draft_length(
    backend: Backend, vocab: int
) -> None:
    requests = Requests(vocab)
    expected = torch.cat([requests.sample([i], MAX_DRAFT_LEN, backend) for i in range(REQUESTS)])
    assert expected.unique().numel() > REQUESTS
    order = random.Random(1).sample(range(REQUESTS), REQUESTS)
    many = [*order, order[0]]
    assert len(many) * (MAX_DRAFT_LEN + 1) > FEW_ROWS  # kernels read few and many rows differently
    for draft_len, batch in ((0, order[:5]), (1, order), (MAX_DRAFT_LEN, many)):
        tokens = requests.sample(batch, draft_len, backend)
        assert torch.equal(tokens, expected[vector(batch), : draft_len + 1])


@BACKENDS
@VOCABS
def test_coupled_drafts_are_the_target_tokens_of_equal_logits(backend: Backend, vocab: int) -> None:
    requests = Requests(vocab, draft_sampling=DraftedBy.COUPLED)
    order = random.Random(1).sample(range(REQUESTS), REQUESTS)
    expected = requests.sample(order, MAX_DRAFT_LEN, backend)
    positions, accepted = requests.positions[vector(order)], vector([1] * REQUESTS)
    for column in range(MAX_DRAFT_LEN):
        rows = LogitRows(0, 1, positions, accepted, column)
        logits, slots = requests.logits[vector(order), column + 1], requests.slots_of(order)
        drafts = sample_tokens(logits, rows, slots, as_drafts=True, backend=backend)
        assert torch.equal(drafts, expected[:, column + 1])


@BACKENDS
@pytest.mark.parametrize("method", [VerifiedBy.REJECTION, VerifiedBy.BLOCK])
def test_rejection_sampling_depends_on_neither_batch_nor_order(
    backend: Backend, method: VerifiedBy
) -> None:
    requests = Requests(50, temperature=1, verification=method, draft_sampling=DraftedBy.PLAIN)
    alone = [verify(requests, [i], 2, backend)[0] for i in range(REQUESTS)]
    order = random.Random(1).sample(range(REQUESTS), REQUESTS)
    assert verify(requests, order, 2, backend) == [alone[i] for i in order]
    assert len({count for count, _ in alone}) > 1


def verify(
    requests: Requests, order: list[int], draft_len: int, backend: Backend
) -> list[tuple[int, list[int]]]:
    """Draft and verify; return the number of accepted drafts and the tokens of each request."""
    count, vocab = len(order), requests.logits.shape[2]
    positions, slots = requests.positions[vector(order)], requests.slots_of(order)
    probs = torch.zeros(REQUESTS + 1, draft_len, vocab, device=DEVICE)
    drafts = torch.empty(count, draft_len, dtype=torch.int32, device=DEVICE)
    for column in range(draft_len):
        rows = LogitRows(0, 1, positions, vector([1] * count), column)
        kept = torch.empty(count, TRUNCATION_SIZE, device=DEVICE)
        logits = 0.7 * requests.logits[vector(order), column]
        drafts[:, column] = sample_tokens(
            logits, rows, slots, as_drafts=True, truncation=kept, backend=backend
        )
        keep_draft_probs(logits, rows, slots, kept, probs, backend=backend)
    rows = LogitRows(0, draft_len + 1, positions)
    kept = torch.empty(rows.num_rows, TRUNCATION_SIZE, device=DEVICE)
    logits = requests.logits[vector(order), : draft_len + 1].flatten(0, 1)
    tokens = sample_tokens(logits, rows, slots, truncation=kept, backend=backend)
    result = rejection_sample(
        logits,
        rows,
        slots,
        ProposedDrafts(drafts, probs),
        TargetSamples(tokens, kept),
        backend=backend,
    )
    outputs = result.tokens.view(count, draft_len + 1).tolist()
    accepted = result.num_accepted.tolist()
    return [(n, output[: n + 1]) for n, output in zip(accepted, outputs, strict=True)]

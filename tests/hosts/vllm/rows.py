"""Batches of logit rows as vLLM lays them out, and the expected result of verifying them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted
from mtp_plugin.requests.columns import Number
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import DraftRows, RowOps, StepRows
from mtp_plugin.speculative.verification import DELTA_POOL
from tests.ops.on_device import DEVICE, vector

VOCAB = 61
NUM_DRAFTS = 3
NUM_SLOTS = 12

SAMPLING: tuple[Mapping[str, Number], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
)


@dataclass(frozen=True)
class Batch:
    """Requests with 1 to K+1 rows each; all lists are per request."""

    indices: list[int]  # request state indices
    drafts: list[list[int]]
    positions: list[int]  # of the first row
    logits: torch.Tensor  # [N, V], rows of a request next to each other

    @property
    def sizes(self) -> list[int]:
        return [len(drafts) + 1 for drafts in self.drafts]

    @property
    def first_rows(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Request state index and position of every row."""
        indices, positions = [], []
        for index, position, size in zip(self.indices, self.positions, self.sizes, strict=True):
            indices += [index] * size
            positions += range(position, position + size)
        return vector(indices), vector(positions)

    def input_ids(self) -> torch.Tensor:
        """The input token of every row; the first of a request is no draft."""
        return vector(
            [token for drafts in self.drafts for token in (7, *drafts)], dtype=torch.int32
        )

    def of(self, requests: Sequence[int]) -> Batch:
        """Some of the requests, in the given order."""
        first, sizes = self.first_rows, self.sizes
        rows = [row for r in requests for row in range(first[r], first[r] + sizes[r])]
        return Batch(
            [self.indices[r] for r in requests],
            [self.drafts[r] for r in requests],
            [self.positions[r] for r in requests],
            self.logits[rows],
        )


def make_ops(
    backend: Backend = Backend.TORCH,
    num_drafts: int = NUM_DRAFTS,
    rates: list[float] | None = None,
    seeds: Mapping[int, int] | None = None,
    options: VllmOptions | None = None,
    columns: Mapping[int, Mapping[str, Number | Sequence[Number]]] | None = None,
    keeps_draft_probs: bool = False,
    draft_ids: Sequence[int] | None = None,
    num_ranks: int = 1,
) -> RowOps:
    """Ops with `NUM_SLOTS` requests; slot i has the options ``SAMPLING[i % 5]``.

    Args:
        columns: slot -> columns in place of these options.
    """
    settings = EngineSettings(
        options or VllmOptions(),
        num_drafts,
        keeps_draft_probs,
        synthetic_rates=None if rates is None else tuple(rates),
        draft_ids=draft_ids,
        num_ranks=num_ranks,
    )
    slots = RequestSlots(NUM_SLOTS, DEVICE, settings)
    for index in range(NUM_SLOTS):
        seed = (seeds or {}).get(index, 1000 + index)
        given = {**SAMPLING[index % len(SAMPLING)], **(columns or {}).get(index, {})}
        if given.get("thinking"):
            given[DELTA_POOL] = given["relaxed_limit"]
        # an engine without relaxed acceptance has no columns for it
        slots.stage(index, {k: v for k, v in given.items() if k in slots.columns}, seed)
    slots.apply()
    return RowOps(slots, settings, backend, VOCAB)


def make_batch(seed: int, sizes: Sequence[int]) -> Batch:
    """Requests with ``sizes`` rows at random slots and positions; drafts are still to be set."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(sizes), VOCAB, generator=generator).mul(3).to(DEVICE)
    return Batch(
        rng.sample(range(NUM_SLOTS), len(sizes)),
        [[0] * (size - 1) for size in sizes],
        [rng.randrange(2**20) for _ in sizes],
        logits,
    )


def with_drafts(batch: Batch, choices: Sequence[int], seed: int) -> Batch:
    """Return ``batch`` with drafts of which most equal the sampled tokens."""
    rng = random.Random(seed)
    drafts = []
    for first, size in zip(batch.first_rows, batch.sizes, strict=False):
        drafts.append(
            [
                rng.choice([choices[row]] * 5 + [rng.randrange(VOCAB), -1])
                for row in range(first, first + size - 1)
            ]
        )
    return Batch(batch.indices, drafts, batch.positions, batch.logits)


def sample(ops: RowOps, batch: Batch) -> torch.Tensor:
    return ops.sample(batch.logits, *batch.expanded())


def draft(
    ops: RowOps,
    logits: torch.Tensor,
    indices: torch.Tensor,
    positions: torch.Tensor,
    column: int = 0,
    step: int = 0,
) -> torch.Tensor:
    step_tensor = torch.tensor(step, dtype=torch.int32, device=logits.device)
    return ops.sample_drafts(DraftRows(logits, indices, positions, column, step_tensor))


def verify(ops: RowOps, batch: Batch, unfinished: Sequence[int] = ()) -> Accepted:
    """Verify the drafts of a batch.

    Args:
        unfinished: slots whose prompt is not complete after the step.
    """
    row_indices, positions = batch.expanded()
    offsets = [offset for size in batch.sizes for offset in range(size)]
    indices = vector(batch.indices)
    return ops.verify(
        StepRows(
            batch.logits,
            batch.input_ids(),
            positions,
            row_indices,
            vector(offsets),
            vector(batch.first_rows, torch.int32),
            indices,
            np.array(batch.indices),
            seq_lens=torch.full_like(indices, 9),
            prefill_lens=vector([9 + (s in unfinished) for s in range(len(ops.slots.table))]),
        )
    )


def expected(batch: Batch, choices: Sequence[int]) -> list[list[int]]:
    """The leading drafts of every request that equal the sampled token, and one token more."""
    result = []
    for first, drafts in zip(batch.first_rows, batch.drafts, strict=False):
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[first + accepted]:
            accepted += 1
        result.append([int(choice) for choice in choices[first : first + accepted + 1]])
    return result


def output_of(accepted: Accepted) -> list[list[int]]:
    return [
        row[:count]
        for row, count in zip(accepted.tokens.tolist(), accepted.num_accepted.tolist(), strict=True)
    ]

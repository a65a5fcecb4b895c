"""Steps whose requests want log-probabilities, and the expected entries."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logprobs import LogprobEntries, compute_logprobs
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.requests.options import MAX_LOGPROBS
from tests.op_arguments import poisoned_memory
from tests.ops.chunks import reference_sums
from tests.ops.logprobs.example import Entry, entry_of
from tests.ops.on_device import DEVICE, POISON, vector
from tests.ops.slots import slot_rows
from tests.ops.top_k.rows import odd_rows, strided

REQUESTED = (-1, -1, 0, 1, 2, 5, 19, MAX_LOGPROBS)
TOLERANCE = 1e-5
"""Relative, of sums over the vocabulary in another order."""


def layout_of(contexts: int, generations: int, k: int) -> StepLayout:
    lens = (2,) * contexts
    return StepLayout(lens, generations, k, vector(lens, torch.int32))


@dataclass(frozen=True)
class Case:
    """Arguments of the op, and the number of most likely tokens that each request wants."""

    layout: StepLayout
    logits: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    slots: SlotRows
    requested: list[int]

    @classmethod
    def of(
        cls,
        seed: int,
        vocab: int,
        *,
        contexts: int = 1,
        generations: int = 2,
        k: int = 2,
        dtype: torch.dtype = torch.float32,
        token_dtype: torch.dtype = torch.int32,
        gap: int = 0,
    ) -> Case:
        rng = random.Random(seed)
        layout = layout_of(contexts, generations, k)
        requests, width = layout.num_requests, layout.step_rows
        noise = torch.Generator().manual_seed(seed)
        rows = odd_rows(noise, layout.num_logit_rows, vocab, dtype, smooth=rng.random() < 0.5)
        counts = [rng.randrange(2) for _ in range(contexts)]
        counts += [rng.randrange(width + 1) for _ in range(generations)]
        tokens = torch.full((requests, width), POISON, dtype=token_dtype)
        for request, count in enumerate(counts):
            for place in range(count):
                tokens[request, place] = rng.randrange(vocab)
        requested = [rng.choice(REQUESTED) for _ in range(requests)]
        slots = slot_rows(
            [{"logprobs": number} for number in requested], seed=rng.getrandbits(31), gap=gap
        )
        return cls(
            layout,
            strided(rows, gap),
            tokens.to(DEVICE),
            vector(counts, torch.int32),
            slots,
            requested,
        )

    def run(self, backend: Backend, sums: RowSums | None = None) -> LogprobEntries:
        with poisoned_memory():
            return compute_logprobs(
                self.layout,
                self.logits,
                self.tokens,
                self.counts,
                self.slots,
                sums=sums,
                backend=backend,
            )

    def sums(self) -> RowSums:
        """As sampling stores them; poison in rows without a requested entry."""
        sums = reference_sums(self.logits)
        for request, number in enumerate(self.requested):
            first = self.row_of(request, 0)
            last = first + (1 if request < self.layout.num_contexts else self.layout.step_rows)
            if number < 0:
                sums.tops[first:last] = sums.masses[first:last] = math.nan
        return sums

    def row_of(self, request: int, place: int) -> int:
        contexts = self.layout.num_contexts
        if request < contexts:
            return request
        return contexts + (request - contexts) * self.layout.step_rows + place

    def example(self) -> list[list[Entry | None]]:
        """Per request and column; None: fill values."""
        rows = self.logits.double().tolist()
        counts, tokens = self.counts.tolist(), self.tokens.tolist()
        return [
            [
                entry_of(rows[self.row_of(request, place)], tokens[request][place], number)
                if number >= 0 and place < counts[request]
                else None
                for place in range(self.layout.step_rows)
            ]
            for request, number in enumerate(self.requested)
        ]

    def replaced(self, **changes: object) -> Case:
        return replace(self, **changes)


def check_example(case: Case, got: LogprobEntries) -> None:
    """Compare ids, ranks and fill values exactly, values up to rounding."""
    ids, values = got.top_ids.tolist(), got.top_values.tolist()
    for request, places in enumerate(case.example()):
        for place, entry in enumerate(places):
            here = (request, place)
            own = (int(got.tokens[here]), int(got.ranks[here]))
            listed = ids[request][place], values[request][place]
            top = [] if entry is None else entry.top
            spare = MAX_LOGPROBS - len(top)
            assert own == ((-1, 0) if entry is None else (entry.token, entry.rank)), here
            assert listed[0] == [token for token, _ in top] + [-1] * spare, here
            for one, expected in zip(listed[1], [v for _, v in top] + [0.0] * spare, strict=True):
                assert close(one, expected), here
            assert close(float(got.values[here]), 0.0 if entry is None else entry.value), here


def close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def check_same(one: LogprobEntries, other: LogprobEntries) -> None:
    for name in ("tokens", "ranks", "top_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("values", "top_values"):
        torch.testing.assert_close(
            getattr(one, name), getattr(other, name), rtol=TOLERANCE, atol=TOLERANCE
        )

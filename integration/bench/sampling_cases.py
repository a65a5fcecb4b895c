"""Sampling of a step: one token per row, then acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from integration.bench.case import Case, RandomInputs, Shape, Trial
from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logits_processor_state import (
    LogitsProcessorState,
    num_words,
    packed_bits,
)
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling import sample_tokens
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.requests.columns import REQUEST_COLUMNS, TableColumns

INT = 4
"""Bytes."""
NUM_SEEN = 600
"""Number of prompt and output tokens that penalties count."""


@dataclass(frozen=True)
class Kind:
    """Options of every request of a batch, and the distribution of its logits."""

    options: Mapping[str, float]
    is_peaked: bool = False
    """Logits like those of a model, with some dozens of likely ids; False: normally distributed."""
    in_edited_step: bool = False
    """Logits of other requests of the step are processed, not those of these."""

    @property
    def has_sums(self) -> bool:
        """Whether sampling writes the log-sum-exp that logprobs need."""
        return "logprobs" in self.options

    @property
    def has_pools(self) -> bool:
        """Whether the step's kernels process logits."""
        return self.in_edited_step or any(name.endswith("_row") for name in self.options)


KINDS = {
    "greedy": Kind({}),
    "top-k-top-p": Kind({"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    "top-k-top-p-peaked": Kind({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, is_peaked=True),
    "top-p-peaked": Kind({"temperature": 0.8, "top_p": 0.95}, is_peaked=True),
    "top-p": Kind({"temperature": 0.8, "top_p": 0.95}),
    "temperature": Kind({"temperature": 0.8}),
    "many-top-k": Kind({"temperature": 0.8, "top_k": 1000, "top_p": 0.95}),
    "top-k-top-p-logprobs": Kind({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "logprobs": 0}),
    "temperature-logprobs": Kind({"temperature": 0.8, "logprobs": 0}),
    "top-k-top-p-with-edits": Kind(
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9}, in_edited_step=True
    ),
    "top-k-penalties": Kind(
        {
            "temperature": 0.8,
            "top_k": 50,
            "top_p": 0.9,
            "count_row": 0,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.1,
        }
    ),
    "top-k-allowed": Kind({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "allowed_row": 0}),
    "top-k-bias": Kind({"temperature": 0.8, "top_k": 50, "top_p": 0.9, "bias_row": 0}),
}


def sampling_cases(shape: Shape, device: torch.device) -> list[Case]:
    """A case for every kind of request."""
    moved = shape.rows * (shape.row_bytes + INT)
    return [
        Case(f"draw/{name}", shape, moved, partial(_sampled, shape, device, kind))
        for name, kind in KINDS.items()
    ]


def _sampled(shape: Shape, device: torch.device, kind: Kind, seed: int) -> Trial:
    batch, k, rng = shape.batch, shape.k, RandomInputs(seed, device)
    logits = _logits(shape, rng, is_peaked=kind.is_peaked)
    drafts = rng.drafts(logits, shape)
    lens = rng.integers(100, 4000, batch, dtype=torch.int64)
    positions = (lens.unsqueeze(1) + torch.arange(k + 1, device=device)).reshape(-1)
    none = torch.empty(0, dtype=torch.int32, device=device)
    layout = StepLayout((), batch, k, none, positions)
    columns = TableColumns(REQUEST_COLUMNS)
    table = [
        columns.row({**kind.options, "number": number, "seed": (number, 1)})
        for number in range(batch + 2)
    ]
    slots = SlotRows(
        torch.tensor(table, dtype=torch.int32, device=device),
        rng.permutation(batch + 2)[:batch],
        columns,
        _pools(shape, rng) if kind.has_pools else None,
    )
    rows = LogitRows.of_target(layout, drafts)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        sums = RowSums.unwritten(logits) if kind.has_sums else None
        choices = sample_tokens(logits, rows, slots, sums=sums, backend=backend)
        accepted = accept(layout, logits, drafts, AcceptanceRules(choices=choices), backend=backend)
        results = {"choices": choices, "tokens": accepted.tokens, "num": accepted.num_accepted}
        return results if sums is None else {**results, "masses": sums.masses, "tops": sums.tops}

    return Trial(run, approximate=frozenset({"masses"}))


def _logits(shape: Shape, rng: RandomInputs, *, is_peaked: bool) -> torch.Tensor:
    logits = rng.logits(shape.rows, shape)
    if not is_peaked:
        return logits.mul_(2)
    likely = min(40, shape.vocab)
    at = rng.integers(0, shape.vocab, shape.rows, likely, dtype=torch.int64)
    heights = 10 + 12 * torch.rand_like(at, dtype=torch.float32)
    heights[:, 0] = 20 + heights[:, 0] / 6
    return logits.mul_(2.2).scatter_(1, at, heights.to(logits.dtype))


def _pools(shape: Shape, rng: RandomInputs) -> LogitsProcessorState:
    """Return pools of one row that all requests share."""
    words, device = num_words(shape.vocab), rng.device
    seen = rng.integers(0, shape.vocab, NUM_SEEN, dtype=torch.int64)
    counts = torch.zeros(1, shape.vocab, dtype=torch.int16, device=device)
    counts[0, seen] = 2
    allowed = rng.integers(-(2**31), 2**31 - 1, 1, words + 1)
    return LogitsProcessorState(
        bias=rng.normal(1, shape.vocab, dtype=torch.float32),
        allowed=allowed,
        counts=counts,
        seen=packed_bits(seen, shape.vocab).unsqueeze(0),
        words=torch.full((1, 64, 16), -1, dtype=torch.int32, device=device),
    )

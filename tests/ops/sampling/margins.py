"""Rows whose sample depends on rounding, found in double precision."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch

from mtp_plugin.ops.logit_rows import GREEDY_BELOW
from mtp_plugin.ops.sampling import sample_reference as reference
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import TopPMass
from tests import near_ties
from tests.ops.sampling.example import Options

CLOSE = 1e-5
"""Scores closer than this may be ordered differently by another summation order or logarithm."""


RARE = 1e-3
"""Largest share of rows that may depend on rounding."""


class SampledRows(Protocol):
    """A batch of rows to sample from."""

    logits: torch.Tensor
    options: list[Options]

    def undecided(self) -> torch.Tensor: ...

    def sampled_positions(self) -> list[tuple[int, int]]: ...


class Comparison:
    """Counts rows with different tokens; each must depend on rounding, and they must be rare."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()

    def compare(self, batch: SampledRows, expected: list[int], tokens: torch.Tensor) -> None:
        assert tokens.dtype == torch.int32
        assert tokens.shape == batch.logits.shape[:1]
        differs = [
            i for i, (a, b) in enumerate(zip(expected, tokens.tolist(), strict=True)) if a != b
        ]
        self.rows["all"] += len(expected)
        self.rows["differ"] += len(differs)
        if differs:
            hangs = batch.undecided().tolist()
            result = [
                (i, expected[i], int(tokens[i]), batch.sampled_positions()[i]) for i in differs
            ]
            assert all(hangs[i] for i in differs), (result, batch.options)

    def check(self) -> None:
        near_ties.count("draws", self.rows["differ"], self.rows["all"])
        assert self.rows["differ"] <= max(1, RARE * self.rows["all"]), self.rows


def undecided(
    logits: torch.Tensor,
    owners: torch.Tensor,
    indices: torch.Tensor,
    slots: SlotRows,
    role: int,
    vocab_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Rows [N] whose highest noisy scores are too close to call, or whose highest is of an id that
    a cut may keep or leave."""
    options = {
        name: slots.table[slots.slot_ids[owners], slots.columns.offset(name)]
        for name in ("temperature", "top_k", "top_p", "min_p", "top_p_mass")
    }
    temperature, top_p, min_p = (
        options[name].view(torch.float32) for name in ("temperature", "top_p", "min_p")
    )
    scores = reference.scaled(logits, temperature).double()
    sure, doubtful = cut(
        scores, options["top_k"], top_p.double(), min_p.double(), options["top_p_mass"]
    )
    noisy = scores + _noise(logits, owners, indices, slots, role, vocab_ids)
    noisy = noisy.masked_fill(~(sure | doubtful), -torch.inf)
    ordered, order = noisy.sort(dim=1, descending=True, stable=True)
    hangs = doubtful.gather(1, order[:, :1]).squeeze(1)
    if logits.shape[1] > 1:
        hangs |= ordered[:, 0] - ordered[:, 1] < CLOSE
    decided_without_noise = (temperature < GREEDY_BELOW) | (
        scores.amax(dim=1).isinf()  # +inf, or nothing at all
    )
    return hangs & ~decided_without_noise


def cut(
    scores: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    top_p_mass: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that are certainly kept, and tokens at a threshold [N, V]; top-k is exact."""
    vocab = scores.shape[1]
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scores.device)
    within = ranks < torch.where(top_k > 0, top_k.long(), vocab).unsqueeze(1)
    weights = torch.where(within, ordered, -torch.inf).exp()
    of_all, of_min_p = (
        (top_p_mass == mass).unsqueeze(1) for mass in (TopPMass.ALL, TopPMass.MIN_P)
    )
    of_top_p = torch.where(of_all, ordered.exp(), weights)
    of_top_p = of_top_p.masked_fill(of_min_p & (weights < min_p.unsqueeze(1)), 0)
    total = of_top_p.sum(dim=1, keepdim=True)
    ahead = (weights.cumsum(dim=1) - weights) / total
    over_p = torch.where((top_p < 1).unsqueeze(1) & (ranks > 0), ahead - top_p.unsqueeze(1), -1.0)
    under_min = min_p.unsqueeze(1) - weights
    close_min = under_min.abs() < CLOSE * min_p.unsqueeze(1)
    sure = within & (over_p <= -CLOSE) & (under_min <= 0) & ~close_min
    doubtful = within & (over_p < CLOSE) & ((under_min <= 0) | close_min) & ~sure
    return torch.zeros_like(sure).scatter_(1, order, sure), torch.zeros_like(sure).scatter_(
        1, order, doubtful
    )


def _noise(
    logits: torch.Tensor,
    owners: torch.Tensor,
    indices: torch.Tensor,
    slots: SlotRows,
    role: int,
    vocab_ids: torch.Tensor | None,
) -> torch.Tensor:
    """In double precision [N, V]."""
    ids = torch.arange(logits.shape[1], device=logits.device) if vocab_ids is None else vocab_ids
    first = slots.columns.offset("seed")
    seeds = slots.table[slots.slot_ids[owners], first : first + 2].long() & 2**32 - 1
    shape = (len(owners), len(ids))
    counter = (
        (ids.long() >> 2).unsqueeze(0).expand(shape),
        (indices & 2**32 - 1).unsqueeze(1).expand(shape),
        torch.full(shape, role, device=logits.device),
        torch.zeros(shape, dtype=torch.int64, device=logits.device),
    )
    words = torch.stack(reference.philox(counter, (seeds[:, :1], seeds[:, 1:])), dim=-1)
    places = (ids.long() & 3).expand(shape).unsqueeze(-1)
    word = words.gather(-1, places).squeeze(-1)
    unit = ((word.float() + 0.5).double() * 2**-32).clamp_max(1 - 2**-24)
    return -(-(-unit).log1p()).log()

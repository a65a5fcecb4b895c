"""Draws in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.ops.logits import DrawnRows, edited
from mtp_plugin.speculative.ops.sampling.contract import Role
from mtp_plugin.speculative.step import SlotRows

DRAWN_OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Options of a request that decide draws here."""

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
GREEDY_BELOW = 1e-5
"""A temperature under it is greedy."""


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    *,
    role: Role,
    vocab_ids: torch.Tensor | None,
) -> torch.Tensor:
    """As at the door."""
    owners, indices, _ = rows.owners()
    seed = slots.read("seed", slice(0, rows.num_requests))[owners]
    temperature, top_k, top_p, min_p = (
        slots.read(name, slice(0, rows.num_requests))[owners]
        for name in ("temperature", "top_k", "top_p", "min_p")
    )
    scores = scaled(edited(logits, rows, slots, vocab_ids=vocab_ids), temperature)
    ids = torch.arange(logits.shape[1], device=logits.device) if vocab_ids is None else vocab_ids
    noisy = cut(scores, top_k, top_p, min_p) + gumbel(ids, seed, indices, role)
    noisy = torch.where((temperature < GREEDY_BELOW).unsqueeze(1), scores, noisy)
    # +inf is the highest whatever is drawn; the first of equals wins
    noisy = torch.where(scores == torch.inf, torch.inf, noisy)
    token = ids.to(torch.int64)[noisy.argmax(dim=1)]
    return torch.where((scores > -torch.inf).any(dim=1), token, -1).to(torch.int32)


def scaled(values: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(x - row maximum) / T of float32 without NaN; of greedy rows with T = 1. In a row that holds
    +inf that stays, and all else is -inf."""
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest.isfinite(), highest, 0.0)
    below = below.masked_fill((highest == torch.inf) & (values < torch.inf), -torch.inf)
    is_greedy = temperature < GREEDY_BELOW
    return below / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)


def cut(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Scores [N, V], -inf where top-k, then top-p of the rest, then min-p leave an id out.

    Ties at a cut keep the lowest ids.
    """
    vocab = scores.shape[1]
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scores.device)
    most = torch.where(top_k > 0, top_k.to(torch.int64), vocab).unsqueeze(1)
    kept = ranks < most
    weights = torch.where(kept, ordered, -torch.inf).exp()
    total = weights.sum(dim=1, keepdim=True)
    ahead = weights.cumsum(dim=1) - weights
    has_top_p = (top_p < 1).unsqueeze(1)
    kept &= ~has_top_p | (ahead < top_p.unsqueeze(1) * total) | (ranks == 0)
    kept &= weights >= min_p.unsqueeze(1)
    ordered = torch.where(kept, ordered, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def gumbel(ids: torch.Tensor, seed: torch.Tensor, indices: torch.Tensor, role: int) -> torch.Tensor:
    """Noise of ids [V] at token indices [N] of requests with seeds [N, 2] int32: [N, V] float32."""
    groups = ids.to(torch.int64) >> 2
    counter = (
        groups.unsqueeze(0).expand(indices.shape[0], -1),
        indices.to(torch.int64).unsqueeze(1) & _MASK,
        torch.full_like(groups, role).unsqueeze(0),
        torch.zeros_like(groups).unsqueeze(0),
    )
    key = (seed[:, :1].to(torch.int64) & _MASK, seed[:, 1:].to(torch.int64) & _MASK)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)
    word = words.gather(-1, (ids.to(torch.int64) & 3).expand(words.shape[:2]).unsqueeze(-1))
    return gumbel_of(word.squeeze(-1))


def gumbel_of(word: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-v)) of uniform v in (0, 1) made of unsigned 32-bit words in int64."""
    unit = ((word.to(torch.float32) + 0.5) * 2**-32).clamp_max(1 - 2**-24)
    return -torch.log(-torch.log1p(-unit))


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10: four unsigned 32-bit words in int64 of a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(x: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of x * multiplier, by halves: int64 does not hold it."""
    low, high = x & 0xFFFF, x >> 16
    of_low, of_high = low * multiplier, high * multiplier
    middle = of_low + ((of_high & 0xFFFF) << 16)
    return ((of_high >> 16) + (middle >> 32)) & _MASK, middle & _MASK

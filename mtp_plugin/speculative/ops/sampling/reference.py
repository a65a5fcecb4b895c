"""Draws in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.logit_rows import GREEDY_BELOW, DrawnRows, edited
from mtp_plugin.speculative.ops.sampling.contract import (
    NUM_CUTS,
    STEP_COLUMN,
    DraftedBy,
    JudgedBy,
    Role,
)
from mtp_plugin.speculative.row_sums import RowSums
from mtp_plugin.speculative.step import SlotRows

DRAWN_OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Options of a request that decide draws here."""

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    *,
    role: Role,
    by_choice: bool,
    vocab_ids: torch.Tensor | None,
    cuts: torch.Tensor | None,
    sums: RowSums | None,
) -> torch.Tensor:
    """As at the door."""
    owners, indices, _ = rows.owners()
    everyone = slice(0, rows.num_requests)
    seed = slots.read("seed", everyone)[owners]
    temperature, top_k, top_p, min_p = (
        slots.read(name, everyone)[owners] for name in ("temperature", "top_k", "top_p", "min_p")
    )
    is_first = temperature < GREEDY_BELOW
    roles: int | torch.Tensor = role
    steps: int | torch.Tensor = 0
    if by_choice:
        drafted_by = slots.read("draft_sampling", everyone)[owners]
        is_plain = drafted_by == DraftedBy.PLAIN
        is_first = is_first | (drafted_by == DraftedBy.GREEDY)
        roles = torch.where(is_plain, Role.PLAIN_DRAFT, role)
        steps = torch.where(is_plain, noise_steps(slots, everyone)[owners], 0)
    values = edited(logits, rows, slots, vocab_ids=vocab_ids)
    scores = scaled(values, temperature)
    ids = torch.arange(logits.shape[1], device=logits.device) if vocab_ids is None else vocab_ids
    kept = cut(scores, top_k, top_p, min_p)
    noisy = kept + gumbel(ids, seed, indices, roles, steps)
    noisy = torch.where(is_first.unsqueeze(1), scores, noisy)
    # +inf is the highest whatever is drawn; the first of equals wins
    noisy = torch.where(scores == torch.inf, torch.inf, noisy)
    column = noisy.argmax(dim=1)
    if cuts is not None:
        cuts.copy_(_cuts(values, kept, column, is_first))
    if sums is not None:
        _sum(values, slots.read("logprobs", everyone)[owners] >= 0, sums)
    token = ids.to(torch.int64)[column]
    return torch.where((scores > -torch.inf).any(dim=1), token, -1).to(torch.int32)


def noise_steps(slots: SlotRows, requests: slice) -> torch.Tensor:
    """What noise beside the target's is counted by, [N] int64: nothing but under block
    verification."""
    by_block = slots.read("verification", requests) == JudgedBy.BLOCK
    steps = torch.zeros_like(by_block, dtype=torch.int64)
    if STEP_COLUMN.name in slots.columns:
        steps = torch.where(by_block, slots.read(STEP_COLUMN.name, requests), steps)
    return steps


def _cuts(
    values: torch.Tensor, kept: torch.Tensor, column: torch.Tensor, is_first: torch.Tensor
) -> torch.Tensor:
    """`NUM_CUTS` numbers of every row, of its values and what cuts leave of their scores [N, V]."""
    highest = values.amax(dim=1)
    stays = kept > -torch.inf
    depth = torch.where(stays, -kept, -torch.inf).amax(dim=1)
    columns = torch.arange(values.shape[1], device=values.device)
    last = torch.where(stays & (-kept == depth.unsqueeze(1)), columns, 0).amax(dim=1)
    mass = torch.where(stays, kept, -torch.inf).exp().sum(dim=1)
    is_one = is_first | (highest == torch.inf)
    return torch.stack(
        [
            highest,
            torch.where(is_one, 0.0, depth),
            torch.where(is_one, column, last).to(torch.float32),
            torch.where(is_one, 1.0, mass),
        ],
        dim=1,
    )


def _sum(values: torch.Tensor, is_asked: torch.Tensor, sums: RowSums) -> None:
    """Fill the sums of values [N, V] in rows that are asked for [N]."""
    if values.device.type == "cpu":  # elsewhere nobody waits to know how many there are
        asked = is_asked.nonzero().squeeze(1)
    else:
        asked = torch.arange(len(values), device=values.device)
    values = values[asked]
    chunks = sums.layout.chunks_of(torch.arange(values.shape[1], device=values.device))
    tops = torch.full_like(sums.tops[asked], -torch.inf)
    sums.tops[asked] = tops.scatter_reduce(1, chunks.expand_as(values), values, "amax")
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest > -torch.inf, highest, 0.0)
    sums.masses[asked] = below.exp().sum(dim=1)


def kept_scores(
    values: torch.Tensor, cuts: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Of edited values [N, V], what `draw` left of their scores, -inf where nothing: [N, V]."""
    highest, deepest, last, mass = (cuts[:, i : i + 1] for i in range(NUM_CUTS))
    columns = torch.arange(values.shape[1], device=values.device)
    depth = (highest - values) / temperature.clamp_min(GREEDY_BELOW).unsqueeze(1)
    depth = torch.where(highest == torch.inf, torch.where(values == torch.inf, 0.0, 1.0), depth)
    stays = (depth < deepest) | ((depth == deepest) & (columns <= last))
    stays &= (-depth).exp() >= min_p.unsqueeze(1)
    return torch.where(stays & (highest > -torch.inf) & (mass > 0), -depth, -torch.inf)


def probabilities(kept: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """What `kept_scores` [N, V] stand for; of a row without any value nothing but 0."""
    return torch.where(kept > -torch.inf, kept.exp() / cuts[:, NUM_CUTS - 1 :], 0.0)


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


def gumbel(
    ids: torch.Tensor,
    seed: torch.Tensor,
    indices: torch.Tensor,
    role: int | torch.Tensor,
    step: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Noise of ids [V] at token indices [N] of requests with seeds [N, 2] int32: [N, V] float32.

    Args:
        role, step: of all, or of each [N].
    """
    return gumbel_of(words_of(ids, seed, indices, role, step))


def words_of(
    ids: torch.Tensor,
    seed: torch.Tensor,
    indices: torch.Tensor,
    role: int | torch.Tensor,
    step: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Random words as `gumbel` asks for them [N, V], unsigned 32-bit in int64."""
    groups = ids.to(torch.int64) >> 2
    of_group = None
    if ids.device.type == "cpu":  # elsewhere nobody waits to know how many there are
        groups, of_group = torch.unique_consecutive(groups, return_inverse=True)
    rows = torch.zeros_like(indices, dtype=torch.int64).unsqueeze(1)
    of_role = (rows.squeeze(1) + role).unsqueeze(1)
    of_step = (rows.squeeze(1) + step).unsqueeze(1) & _MASK
    counter = (groups + rows, (rows.squeeze(1) + indices).unsqueeze(1) & _MASK, of_role, of_step)
    key = (seed[:, :1].to(torch.int64) & _MASK, seed[:, 1:].to(torch.int64) & _MASK)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)
    place = ids.to(torch.int64) & 3
    if of_group is not None:
        return words[:, of_group, place]
    return words.gather(-1, place.expand(words.shape[:2]).unsqueeze(-1)).squeeze(-1)


def gumbel_of(word: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-v)) of uniform v in (0, 1) made of unsigned 32-bit words in int64."""
    return -torch.log(-torch.log1p(-uniform_of(word)))


def uniform_of(word: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float32, of unsigned 32-bit words in int64."""
    return ((word.to(torch.float32) + 0.5) * 2**-32).clamp_max(1 - 2**-24)


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

"""Sampling in torch: Philox noise, truncation and the sampled tokens."""

from __future__ import annotations

import torch

from mtp_plugin.ops.logit_rows import GREEDY_BELOW, LogitRows, process_logits
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling.types import (
    STEP_COLUMN,
    TRUNCATION_SIZE,
    DraftedBy,
    Role,
    VerifiedBy,
)
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import TopPMass

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def sample_tokens_reference(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    *,
    role: Role,
    as_drafts: bool,
    vocab_ids: torch.Tensor | None,
    truncation: torch.Tensor | None,
    sums: RowSums | None,
    fills: torch.dtype | None,
) -> torch.Tensor:
    owners, indices, _ = rows.owners()
    requests = slice(0, rows.num_requests)
    seed = slots.read("seed", requests)[owners]
    temperature, top_k, top_p, min_p, top_p_mass = (
        slots.read(name, requests)[owners]
        for name in ("temperature", "top_k", "top_p", "min_p", "top_p_mass")
    )
    is_greedy = temperature < GREEDY_BELOW
    roles: int | torch.Tensor = role
    steps: int | torch.Tensor = 0
    if as_drafts:
        drafted_by = slots.read("draft_sampling", requests)[owners]
        is_plain = drafted_by == DraftedBy.PLAIN
        is_greedy = is_greedy | (drafted_by == DraftedBy.GREEDY)
        roles = torch.where(is_plain, Role.PLAIN_DRAFT, role)
        steps = torch.where(is_plain, noise_steps(slots, requests)[owners], 0)
    values = process_logits(logits, rows, slots, vocab_ids=vocab_ids)
    scores = scaled(values, temperature)
    ids = torch.arange(logits.shape[1], device=logits.device) if vocab_ids is None else vocab_ids
    kept = truncate(scores, top_k, top_p, min_p, top_p_mass)
    noisy = kept + gumbel(ids, seed, indices, roles, steps)
    noisy = torch.where(is_greedy.unsqueeze(1), scores, noisy)
    # +inf is the maximum with any noise; the first of equals wins
    noisy = torch.where(scores == torch.inf, torch.inf, noisy)
    column = noisy.argmax(dim=1)
    if truncation is not None:
        truncation.copy_(_truncation(values, kept, column, is_greedy))
    if sums is not None:
        _fill_sums(values, slots.read("logprobs", requests)[owners] >= 0, sums)
    token = ids.to(torch.int64)[column]
    missing = -1 if fills is None else 0
    sampled = torch.where((scores > -torch.inf).any(dim=1), token, missing)
    return sampled.to(fills or torch.int32)


def noise_steps(slots: SlotRows, requests: slice) -> torch.Tensor:
    """The step that keys noise other than the target's, [N] int64; 0 without block verification."""
    by_block = slots.read("verification", requests) == VerifiedBy.BLOCK
    steps = torch.zeros_like(by_block, dtype=torch.int64)
    if STEP_COLUMN.name in slots.columns:
        steps = torch.where(by_block, slots.read(STEP_COLUMN.name, requests), steps)
    return steps


def _truncation(
    values: torch.Tensor, kept: torch.Tensor, column: torch.Tensor, is_greedy: torch.Tensor
) -> torch.Tensor:
    """The truncation of rows, from their values and kept scores [N, V]."""
    highest = values.amax(dim=1)
    is_kept = kept > -torch.inf
    depth = torch.where(is_kept, -kept, -torch.inf).amax(dim=1)
    columns = torch.arange(values.shape[1], device=values.device)
    last = torch.where(is_kept & (-kept == depth.unsqueeze(1)), columns, 0).amax(dim=1)
    mass = torch.where(is_kept, kept, -torch.inf).exp().sum(dim=1)
    is_one = is_greedy | (highest == torch.inf)
    return torch.stack(
        [
            highest,
            torch.where(is_one, 0.0, depth),
            torch.where(is_one, column, last).to(torch.float32),
            torch.where(is_one, 1.0, mass),
        ],
        dim=1,
    )


def _fill_sums(values: torch.Tensor, is_requested: torch.Tensor, sums: RowSums) -> None:
    """Fill the sums of values [N, V] in requested rows [N]."""
    if values.device.type == "cpu":  # on a device this would synchronize
        index = is_requested.nonzero().squeeze(1)
    else:
        index = torch.arange(len(values), device=values.device)
    values = values[index]
    chunks = sums.layout.chunks_of(torch.arange(values.shape[1], device=values.device))
    tops = torch.full_like(sums.tops[index], -torch.inf)
    sums.tops[index] = tops.scatter_reduce(1, chunks.expand_as(values), values, "amax")
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest > -torch.inf, highest, 0.0)
    sums.masses[index] = below.exp().sum(dim=1)


def kept_scores(
    values: torch.Tensor, truncation: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Scores [N, V] of processed values [N, V] with -inf for tokens that are not kept."""
    highest, deepest, last, mass = (truncation[:, i : i + 1] for i in range(TRUNCATION_SIZE))
    columns = torch.arange(values.shape[1], device=values.device)
    depth = (highest - values) / temperature.clamp_min(GREEDY_BELOW).unsqueeze(1)
    depth = torch.where(highest == torch.inf, torch.where(values == torch.inf, 0.0, 1.0), depth)
    is_kept = (depth < deepest) | ((depth == deepest) & (columns <= last))
    is_kept &= (-depth).exp() >= min_p.unsqueeze(1)
    return torch.where(is_kept & (highest > -torch.inf) & (mass > 0), -depth, -torch.inf)


def probabilities(kept: torch.Tensor, truncation: torch.Tensor) -> torch.Tensor:
    """Probabilities of `kept_scores` [N, V]; all 0 for a row without finite value or +inf."""
    return torch.where(kept > -torch.inf, kept.exp() / truncation[:, TRUNCATION_SIZE - 1 :], 0.0)


def scaled(values: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(x - row maximum) / T of float32 without NaN; T = 1 for greedy rows.

    In a row that holds +inf, all other values become -inf.
    """
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest.isfinite(), highest, 0.0)
    below = below.masked_fill((highest == torch.inf) & (values < torch.inf), -torch.inf)
    is_greedy = temperature < GREEDY_BELOW
    return below / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)


def truncate(
    scores: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    top_p_mass: torch.Tensor,
) -> torch.Tensor:
    """Apply top-k, then top-p of ``top_p_mass``, then min-p: -inf for tokens that are not kept.

    Among equal scores at a threshold the lowest ids are kept.
    """
    vocab = scores.shape[1]
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scores.device)
    most = torch.where(top_k > 0, top_k.to(torch.int64), vocab).unsqueeze(1)
    kept = ranks < most
    weights = torch.where(kept, ordered, -torch.inf).exp()
    is_of_all, is_of_min_p = (
        (top_p_mass == mass).unsqueeze(1) for mass in (TopPMass.ALL, TopPMass.MIN_P)
    )
    of_top_p = torch.where(is_of_all, ordered.exp(), weights)
    of_top_p = of_top_p.masked_fill(is_of_min_p & (weights < min_p.unsqueeze(1)), 0.0)
    total = of_top_p.sum(dim=1, keepdim=True)
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
    """Gumbel noise [N, V] float32 of ids [V] at token indices [N], for seeds [N, 2] int32.

    Args:
        role, step: one for all rows, or [N].
    """
    return gumbel_of(words_of(ids, seed, indices, role, step))


def words_of(
    ids: torch.Tensor,
    seed: torch.Tensor,
    indices: torch.Tensor,
    role: int | torch.Tensor,
    step: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Random words [N, V] of `gumbel`, unsigned 32-bit in int64."""
    groups = ids.to(torch.int64) >> 2
    of_group = None
    if ids.device.type == "cpu":  # on a device this would synchronize
        groups, of_group = torch.unique_consecutive(groups, return_inverse=True)
    rows = torch.zeros_like(indices, dtype=torch.int64).unsqueeze(1)
    of_role = (rows.squeeze(1) + role).unsqueeze(1)
    of_step = (rows.squeeze(1) + step).unsqueeze(1) & _MASK
    counter = (groups + rows, (rows.squeeze(1) + indices).unsqueeze(1) & _MASK, of_role, of_step)
    key = (seed[:, :1].to(torch.int64) & _MASK, seed[:, 1:].to(torch.int64) & _MASK)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)
    word = ids.to(torch.int64) & 3
    if of_group is not None:
        return words[:, of_group, word]
    return words.gather(-1, word.expand(words.shape[:2]).unsqueeze(-1)).squeeze(-1)


def gumbel_of(word: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-v)) of uniform v in (0, 1) from unsigned 32-bit words in int64."""
    return -torch.log(-torch.log1p(-uniform_of(word)))


def uniform_of(word: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float32, from unsigned 32-bit words in int64."""
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
    """The high and the low word of x * multiplier, by halves, since the product overflows int64."""
    low, high = x & 0xFFFF, x >> 16
    of_low, of_high = low * multiplier, high * multiplier
    middle = of_low + ((of_high & 0xFFFF) << 16)
    return ((of_high >> 16) + (middle >> 32)) & _MASK, middle & _MASK

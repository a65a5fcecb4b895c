"""Constants and data classes of sampling and rejection sampling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from mtp_plugin.ops.checks import AtLeast, expect_tensor
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.verifications import codes


class Role(IntEnum):
    """Purpose of random numbers; numbers of different roles are independent."""

    TARGET = 0  # target tokens, and the drafts coupled to them
    PLAIN_DRAFT = 1  # independently sampled drafts
    ACCEPTANCE = 2  # the uniform number that tests a draft, at token id 0
    RECOVERED = 3  # the token after the accepted drafts


_CODES = codes()


class VerifiedBy(IntEnum):
    """Column ``verification``: verification method of a sampling request.

    Other methods have other codes, which the ops here ignore.
    """

    COUPLED = _CODES["coupled"]
    REJECTION = _CODES["rejection"]
    BLOCK = _CODES["block"]


class DraftedBy(IntEnum):
    """Column ``draft_sampling``: how the drafts of a sampling request are chosen."""

    COUPLED = 0  # sampled with the target's noise
    PLAIN = 1  # sampled independently
    GREEDY = 2  # argmax


DRAFT_COLUMNS = (SlotColumn("verification", int), SlotColumn("draft_sampling", int))
"""Hold `VerifiedBy` and `DraftedBy`."""
STEP_COLUMN = SlotColumn("draft_step", int)
"""Number of steps of a request; part of the noise counter under block verification."""

TRUNCATION_SIZE = 4
"""Numbers per row that describe its kept tokens: the row's maximum; the largest depth of a kept
token; the last kept column at that depth; and the sum of the kept tokens' weights, relative to the
maximum's weight.

The depth of x is (maximum - x) / T. A greedy row keeps one token, of depth 0. Kernels may leave out
tokens deeper than 7.4e8, whose probability rounds to 0."""


def check_truncation(truncation: torch.Tensor, num_rows: int, device: torch.device) -> None:
    """Check the truncation of N rows, [N, TRUNCATION_SIZE] float32."""
    expect_tensor(
        "truncation",
        truncation,
        dtype=torch.float32,
        shape=(num_rows, TRUNCATION_SIZE),
        device=device,
        contiguous=True,
    )


def check_draft_probs(
    pool: torch.Tensor, slots: SlotRows, draft_len: int, vocab: int | str, device: torch.device
) -> None:
    """Check the pool of draft distributions of checked slots, [>= S, >= K, V] float32."""
    expect_tensor(
        "draft_probs",
        pool,
        dtype=torch.float32,
        shape=(AtLeast(slots.table.shape[0]), AtLeast(draft_len), vocab),
        device=device,
        contiguous=True,
    )


@dataclass(frozen=True)
class ProposedDrafts:
    """Draft tokens that rejection sampling verifies."""

    tokens: torch.Tensor  # [G*K] or [G, K] signed integer
    probs: torch.Tensor | None = None
    """[>= S, >= K, V] float32, as `keep_draft_probs` wrote it; None: no draft is independently
    sampled."""
    lens: torch.Tensor | None = None  # [G] integer: drafts from here on are absent; None: K


@dataclass(frozen=True)
class TargetSamples:
    """What `sample_tokens` returned for the target's rows."""

    tokens: torch.Tensor  # [N] signed integer
    truncation: torch.Tensor  # [N, TRUNCATION_SIZE] float32
    forced_ids: torch.Tensor | None = None
    """[N] signed integer: the only token that a row allows, -1: any; None: -1 everywhere."""


@dataclass(frozen=True)
class RejectionResult:
    """Accepted drafts, and the target tokens with the token after them replaced."""

    num_accepted: torch.Tensor
    """[G] int32: number of accepted drafts; -1 for requests with another verification method."""
    tokens: torch.Tensor
    """[N] int32: the target tokens; after the accepted drafts, the recovered or bonus token."""

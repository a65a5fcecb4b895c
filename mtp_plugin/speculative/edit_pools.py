"""Pools of what requests want done to logits, which does not fit a slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

WORD_BITS = 32
"""Ids of a word in pools that hold a bit per id, the lowest in the lowest bit."""
MOST_COUNTED = 65535
"""What an entry of the pool of counts holds at most."""


def num_words(vocab_size: int) -> int:
    """Words that hold a bit per id."""
    return -(-vocab_size // WORD_BITS)


def bit_of(ids: torch.Tensor) -> torch.Tensor:
    """The bit of each of some ids in its word, int32 of their shape."""
    return torch.ones_like(ids, dtype=torch.int32) << (ids % WORD_BITS).to(torch.int32)


def packed_bits(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Words [V/32] int32 that hold the bits of ``ids`` [N] int64, which may stand twice."""
    words = num_words(vocab_size)
    flags = torch.zeros(words * WORD_BITS, dtype=torch.int32, device=ids.device)
    flags.index_fill_(0, ids, 1)  # assigned, a number would be copied, and waited for
    bits = bit_of(torch.arange(WORD_BITS, device=ids.device))
    return (flags.view(words, WORD_BITS) * bits).sum(dim=1, dtype=torch.int32)


@dataclass(frozen=True)
class EditPools:
    """What does not fit a slot of what requests want done to logits.

    A column of the slot table names a request's row, -1 where it has none. Bits stand WORD_BITS in
    a word.
    """

    bias: torch.Tensor  # [P, V] float32
    allowed: torch.Tensor  # [P, V/32 + 1] int32: a bit per id, and behind them how many are set
    counts: torch.Tensor  # [P, V] int16, unsigned: occurrences that penalties count
    seen: torch.Tensor  # [P, V/32] int32: a bit per id of prompt and output
    words: torch.Tensor  # [P, MAX_BAD_WORDS, MAX_BAD_WORD_LEN] int32, -1 in front of each

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.bias.shape[1])

    def check(self, device: torch.device, columns: int | None = None) -> None:
        """Check the pools.

        Args:
            columns: of the logits that they are for; None: those of a cut vocabulary, or none.

        Raises:
            TensorContractError: a pool of another shape, type or device, or with gaps, or logits of
                another vocabulary.
        """
        rows, vocab = int(self.bias.shape[0]), self.vocab_size
        words = num_words(vocab)
        for name, shape, dtype in (
            ("bias", (rows, vocab), torch.float32),
            ("allowed", (rows, words + 1), torch.int32),
            ("counts", (rows, vocab), torch.int16),
            ("seen", (rows, words), torch.int32),
            ("words", (rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), torch.int32),
        ):
            pool: torch.Tensor = vars(self)[name]
            if not (
                pool.shape == shape
                and pool.dtype == dtype
                and pool.device == device
                and pool.is_contiguous()
            ):
                raise TensorContractError(
                    f"pool {name} of logit edits: expected contiguous {dtype} {list(shape)} on "
                    f"{device}, got {pool.dtype} {list(pool.shape)} with strides "
                    f"{list(pool.stride())} on {pool.device}"
                )
        if columns is not None and columns != vocab:
            raise TensorContractError(
                f"logits: expected {vocab} columns, as the pools of logit edits have, got {columns}"
            )


@dataclass(frozen=True)
class DraftBans:
    """Which ids drafts may be, of requests with a row of allowed ids: those without the ids that
    must not come where the next draft stands."""

    allowed: torch.Tensor  # [P, V/32 + 1] int32: as of `EditPools`
    hidden: torch.Tensor
    """[P + 1, MAX_STOP_IDS + MAX_BAD_WORDS] int32: the ids that were taken out, -1: none. The last
    row is nobody's."""

    def check(self, pools: EditPools) -> None:
        """Check them beside pools that were checked.

        Raises:
            TensorContractError: another shape, type or device, or gaps.
        """
        rows = int(pools.allowed.shape[0])
        for name, shape in (
            ("allowed", tuple(pools.allowed.shape)),
            ("hidden", (rows + 1, MAX_STOP_IDS + MAX_BAD_WORDS)),
        ):
            tensor: torch.Tensor = vars(self)[name]
            if not (
                tensor.shape == shape
                and tensor.dtype == torch.int32
                and tensor.device == pools.allowed.device
                and tensor.is_contiguous()
            ):
                raise TensorContractError(
                    f"bans of drafts, {name}: expected contiguous torch.int32 {list(shape)} on "
                    f"{pools.allowed.device}, got {tensor.dtype} {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())} on {tensor.device}"
                )

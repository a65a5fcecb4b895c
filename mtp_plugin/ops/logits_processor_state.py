"""Per-request state of logits processing that does not fit a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.checks import AtLeast, expect_tensor
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

WORD_BITS = 32
"""Token ids per word in pools with a bit per id; the lowest id is the lowest bit."""
MOST_COUNTED = 65535
"""Largest count that the pool of counts holds."""


def num_words(vocab_size: int) -> int:
    """Number of words that hold a bit per id."""
    return -(-vocab_size // WORD_BITS)


def bit_of(ids: torch.Tensor) -> torch.Tensor:
    """The bit of each id in its word, int32 of the same shape."""
    return torch.ones_like(ids, dtype=torch.int32) << (ids % WORD_BITS).to(torch.int32)


def packed_bits(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Words [V/32] int32 with the bits of ``ids`` [N] int64 set; ids may repeat."""
    words = num_words(vocab_size)
    flags = torch.zeros(words * WORD_BITS, dtype=torch.int32, device=ids.device)
    flags.index_fill_(0, ids, 1)  # assigning a number would copy it and synchronize
    bits = bit_of(torch.arange(WORD_BITS, device=ids.device))
    return (flags.view(words, WORD_BITS) * bits).sum(dim=1, dtype=torch.int32)


@dataclass(frozen=True)
class LogitsProcessorState:
    """Pools of logits-processing state, one row per request that needs it.

    Columns of the slot table hold a request's row in each pool; -1: none. Pools with a bit per id
    have WORD_BITS ids per word. Each pool may have another number of rows, but ``counts`` and
    ``seen`` have the same.
    """

    bias: torch.Tensor  # [P, V] float32
    allowed: torch.Tensor  # [P, V/32 + 1] int32: a bit per id, then the number of allowed ids
    counts: torch.Tensor  # [P, V] int16, unsigned: occurrences in the output
    seen: torch.Tensor  # [P, V/32] int32: a bit per id of prompt and output
    words: torch.Tensor  # [P, MAX_BAD_WORDS, MAX_BAD_WORD_LEN] int32, right-aligned, -1 before

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Self:
        """Allocate the pools of P ``num_rows``: no bias, no allowed token, no count, no word."""
        words = num_words(vocab_size)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            bias=torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device),
            allowed=torch.zeros(num_rows, words + 1, **int32),
            counts=torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
            seen=torch.zeros(num_rows, words, **int32),
            words=torch.full((num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, **int32),
        )

    @property
    def num_rows(self) -> int:
        """P: the rows that every pool has."""
        return min(int(pool.shape[0]) for pool in vars(self).values())

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.bias.shape[1])

    def check(self, device: torch.device, columns: int | None = None) -> None:
        """Check the pools; the same ones are checked once, though every op of a step calls this.

        Args:
            columns: of the logits to process; None: not checked (reduced draft vocabulary).

        Raises:
            TensorContractError: a pool of another shape, dtype or device, pools that are not
                contiguous, or logits of another vocabulary.
        """
        key = (id(self), device, columns)
        if _checked.get(key) is self:
            return
        layout: dict[str, Any] = {"device": device, "contiguous": True}
        least = AtLeast(1)
        expect_tensor("pools.bias", self.bias, dtype=torch.float32, shape=(least, least), **layout)
        vocab = self.bias.shape[1]
        words = num_words(vocab)
        expect_tensor("pools.counts", self.counts, dtype=torch.int16, shape=("P", vocab), **layout)
        for name, shape, dtype in (
            ("allowed", (least, words + 1), torch.int32),
            ("seen", (self.counts.shape[0], words), torch.int32),
            ("words", (least, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), torch.int32),
        ):
            expect_tensor(f"pools.{name}", vars(self)[name], dtype=dtype, shape=shape, **layout)
        if columns is not None and columns != vocab:
            raise TensorContractError(
                f"logits: expected {vocab} columns, as the pools have, got {columns}"
            )
        _checked[key] = self


_checked: WeakValueDictionary[tuple[int, torch.device, int | None], LogitsProcessorState] = (
    WeakValueDictionary()
)


@dataclass(frozen=True)
class DraftMask:
    """Ids that the next draft may be: a request's allowed ids without those masked at its position.

    Only requests with a row of allowed ids have a mask.
    """

    allowed: torch.Tensor  # [P, V/32 + 1] int32, as `LogitsProcessorState.allowed`
    masked_ids: torch.Tensor
    """[P + 1, MAX_STOP_IDS + MAX_BAD_WORDS] int32: the ids removed from ``allowed``, -1: none.
    Requests without a row write to the last one."""

    def check(self, pools: LogitsProcessorState) -> None:
        """Check the tensors against checked pools.

        Raises:
            TensorContractError: another shape, dtype or device, or tensors that are not contiguous.
        """
        rows, words = pools.allowed.shape
        layout: dict[str, Any] = {"dtype": torch.int32, "device": pools.allowed.device}
        layout["contiguous"] = True
        expect_tensor("draft mask, allowed", self.allowed, shape=(rows, words), **layout)
        shape = (rows + 1, MAX_STOP_IDS + MAX_BAD_WORDS)
        expect_tensor("draft mask, masked_ids", self.masked_ids, shape=shape, **layout)

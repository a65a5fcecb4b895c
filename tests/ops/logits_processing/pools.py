"""Logits-processing pools in tests: requests have random rows, all other rows are poison."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import torch

from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.requests.columns import POOL_ROWS
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from tests.ops.logits_processing.example import LogitsOptions
from tests.ops.on_device import DEVICE

SOILED = 0x2B2B2B2B
"""Read as bits, some ids are set; read as a number of allowed ids, it is large."""


def pools_of(
    options: Sequence[LogitsOptions], vocab: int, rng: random.Random
) -> tuple[LogitsProcessorState, list[dict[str, int]]]:
    """Return the pools of requests, and the columns that hold their row numbers.

    A request has different rows in different pools; the ends of poisoned words are all ids.
    """
    rows, words = len(options) + 2, -(-vocab // 32)
    bias = torch.full((rows, vocab), torch.nan)
    allowed = torch.full((rows, words + 1), SOILED, dtype=torch.int32)
    counts = torch.full((rows, vocab), 0x2B2B, dtype=torch.int16)
    seen = torch.full((rows, words), SOILED, dtype=torch.int32)
    listed = torch.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, dtype=torch.int32)
    listed[:, :, -1] = torch.arange(MAX_BAD_WORDS) % vocab
    columns = []
    places = {name: rng.sample(range(rows), len(options)) for name in POOL_ROWS}
    for request, one in enumerate(options):
        given = {}
        if one.bias is not None:
            row = given["bias_row"] = places["bias_row"][request]
            bias[row] = 0
            for token, value in one.bias.items():
                bias[row, token] = value
        if one.allowed is not None:
            row = given["allowed_row"] = places["allowed_row"][request]
            allowed[row, :-1] = bits_of(one.allowed, words)
            allowed[row, -1] = len(set(one.allowed))
        if one.counts is not None:
            row = given["count_row"] = places["count_row"][request]
            counts[row] = 0
            for token, number in one.counts.items():
                counts[row, token] = number - 2**16 if number >= 2**15 else number
            seen[row] = bits_of({*one.seen, *(t for t, n in one.counts.items() if n)}, words)
        if one.words is not None:
            row = given["words_row"] = places["words_row"][request]
            listed[row] = -1
            for place, word in zip(
                rng.sample(range(MAX_BAD_WORDS), len(one.words)), one.words, strict=True
            ):
                listed[row, place, -len(word) :] = torch.tensor(word, dtype=torch.int32)
        columns.append({name: given.get(name, -1) for name in POOL_ROWS})
    pools = (bias, allowed, counts, seen, listed)
    return LogitsProcessorState(*(pool.to(DEVICE) for pool in pools)), columns


def bits_of(ids: Collection[int], words: int) -> torch.Tensor:
    """A bit per id, 32 in a word, as int32 [words]."""
    held = [0] * words
    for token in set(ids):
        held[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in held]).int()


def ids_in(row: torch.Tensor) -> set[int]:
    """The ids whose bits are set in words."""
    return {
        32 * place + bit
        for place, word in enumerate(row.tolist())
        for bit in range(32)
        if word >> bit & 1
    }

"""Allocator of per-request logits-processor state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mtp_plugin.errors import MetadataError, NoFreeSlotsError, expect, format_value
from mtp_plugin.requests.columns import Number, within_float32
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.logits_processor_state import (
    MOST_COUNTED,
    DraftMask,
    LogitsProcessorState,
    num_words,
    packed_bits,
)
from mtp_plugin.speculative.step import to_device

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
POOLED_OPTIONS = frozenset(
    {*PENALTIES, "logit_bias", "allowed_token_ids", "bad_words", "bad_token_ids"}
)
"""Options of a request that need a row in the pools."""


def bad_words_of(facts: RequestFacts) -> list[tuple[int, ...]]:
    """Return the token sequences that a request must not generate."""
    words: list[tuple[int, ...]] = [tuple(word) for word in facts.options.get("bad_words", ())]
    return words + [(token,) for token in facts.options.get("bad_token_ids", ())]


def _masks_stop_ids(facts: RequestFacts) -> bool:
    """Whether ``min_tokens`` disallows stop ids of the request."""
    return facts.options.get("min_tokens", 0) > 0 and bool(facts.stop.slot_ids)


class EditRows:
    """Pools of per-token state; only requests that need a row take one.

    A row is written when it is taken, ordered after the kernels launched before.

    Args:
        num_rows: P, the maximum number of requests that hold a row at the same time.
        vocab_size: V.
        device: device of the steps.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        words = num_words(vocab_size)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.pools = LogitsProcessorState(
            bias=torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device),
            allowed=torch.zeros(num_rows, words + 1, **int32),
            counts=torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
            seen=torch.zeros(num_rows, words, **int32),
            words=torch.full((num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, **int32),
        )
        hidden = MAX_STOP_IDS + MAX_BAD_WORDS
        self.bans = DraftMask(
            allowed=torch.zeros_like(self.pools.allowed),
            hidden=torch.full((num_rows + 1, hidden), -1, **int32),
        )
        bits = packed_bits(torch.arange(vocab_size, device=device), vocab_size)
        self._everything = torch.cat([bits, bits.new_full((1,), vocab_size)])
        self._rows = SlotManager(num_rows)
        self._for_drafts: dict[int, None] = {}

    @staticmethod
    def bytes_per_row(vocab_size: int) -> int:
        """Return the device bytes of a row in all pools."""
        bits = 3 * num_words(vocab_size) + 2
        words = MAX_BAD_WORDS * MAX_BAD_WORD_LEN
        return 6 * vocab_size + 4 * (bits + words + MAX_STOP_IDS + MAX_BAD_WORDS)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all pools."""
        pools = (*vars(self.pools).values(), *vars(self.bans).values())
        return sum(pool.numel() * pool.element_size() for pool in pools)

    def take(
        self, request_id: int, facts: RequestFacts, tokens: Sequence[int]
    ) -> dict[str, Number]:
        """Allocate and fill the row that a request needs, if any.

        Args:
            tokens: prompt and output, including output before a preemption.

        Returns:
            The slot-table columns that hold the row.

        Raises:
            NoFreeSlotsError: all rows are taken.
            MetadataError: an id outside the vocabulary; no row is taken.
        """
        options = facts.options
        needed = {
            "bias_row": options.get("logit_bias") is not None,
            "allowed_row": options.get("allowed_token_ids") is not None,
            "count_row": any(name in options for name in PENALTIES),
            "words_row": bool(bad_words_of(facts)),
        }
        masks_drafts = needed["words_row"] or _masks_stop_ids(facts)
        if not any(needed.values()):
            return {}
        if not self.has_room(request_id):
            raise NoFreeSlotsError(
                f"logit edits: all {self._rows.max_num_requests} rows of their pools are taken, "
                f"request {request_id} needs one"
            )
        row = self._rows.add_slot(request_id)
        self._for_drafts.pop(request_id, None)
        try:
            if needed["bias_row"]:
                self._fill_bias(row, options["logit_bias"])
            if needed["allowed_row"]:
                self._fill_allowed(row, options["allowed_token_ids"])
            if needed["count_row"]:
                ignored = min(options.get("prompt_ignore_length", 0), facts.stop.prompt_len)
                self._fill_counts(row, tokens, ignored)
            if needed["words_row"]:
                self._fill_words(row, bad_words_of(facts))
            if masks_drafts or needed["allowed_row"]:
                self._fill_draft_mask(row, has_allowed=needed["allowed_row"])
                needed["allowed_row"] = True
        except BaseException:
            self.give_back(request_id)
            raise
        return {name: row for name, is_needed in needed.items() if is_needed}

    def take_for_drafts(self, facts: RequestFacts) -> dict[str, Number]:
        """Allocate a row to mask the stop ids of a request's drafts before ``min_tokens``.

        Only a request that needs no other row takes it, and only if a row is free; without it the
        drafter may propose stop ids that verification rejects.

        Returns:
            The slot-table columns that hold the row.
        """
        number = facts.request_id
        is_served = self._rows.get_slot(number) is not None
        may_take = number in self._for_drafts if is_served else bool(self._rows.free_slots)
        if not may_take or not _masks_stop_ids(facts):
            return {}
        row = self._rows.add_slot(number)
        self._for_drafts[number] = None
        self._fill_draft_mask(row, has_allowed=False)
        return {"allowed_row": row}

    def has_room(self, request_id: int) -> bool:
        """Whether the request has a row or a row is free."""
        return bool(self._rows.free_slots) or self._rows.get_slot(request_id) is not None

    def take_from_drafts(self) -> int | None:
        """Free a row that a request holds only to mask its drafts.

        Returns:
            The request, whose slot must not refer to the row any more; None: there is no such row.
        """
        if not self._for_drafts:
            return None
        request_id = next(reversed(self._for_drafts))
        self.give_back(request_id)
        return request_id

    def give_back(self, request_id: int) -> None:
        """Free a request's row; does nothing if it has none."""
        self._rows.remove_slot(request_id)
        self._for_drafts.pop(request_id, None)

    def shutdown(self) -> None:
        """Free every row."""
        self._rows.shutdown()
        self._for_drafts.clear()

    # ---- initial values ---------------------------------------------------------------------

    def _fill_bias(self, row: int, bias: Any) -> None:
        pool = self.pools.bias[row]
        if isinstance(bias, torch.Tensor):  # from the host, one value per id
            expect(
                bias.numel() == pool.numel(),
                MetadataError,
                f"logit_bias: expected {pool.numel()} values, one per id, got {bias.numel()}",
            )
            pool.copy_(to_device(bias.reshape(-1), torch.float32, pool.device))
            return
        pool.zero_()
        ids = self._ids("logit_bias", bias)
        added = [within_float32(value) for value in bias.values()]
        pool[ids] = to_device(added, torch.float32, pool.device)

    def _fill_allowed(self, row: int, allowed: Iterable[int]) -> None:
        listed = sorted(set(allowed))
        pool = self.pools.allowed[row]
        pool[:-1] = packed_bits(self._ids("allowed_token_ids", listed), self.pools.vocab_size)
        pool[-1:].fill_(len(listed))

    def _fill_draft_mask(self, row: int, *, has_allowed: bool) -> None:
        """Reset the draft mask; without ``allowed_token_ids`` every id is allowed."""
        if not has_allowed:
            self.pools.allowed[row].copy_(self._everything)
        self.bans.allowed[row].copy_(self.pools.allowed[row])
        self.bans.hidden[row].fill_(-1)

    def _fill_counts(self, row: int, tokens: Sequence[int], ignored: int) -> None:
        """Mark all tokens as seen; count those after the ignored part of the prompt."""
        ids = self._ids("prompt", tokens)
        counted = ids[ignored:]
        counts = torch.zeros(self.pools.vocab_size, dtype=torch.int32, device=ids.device)
        counts.index_add_(0, counted, torch.ones_like(counted, dtype=torch.int32))
        self.pools.counts[row] = counts.clamp_max(MOST_COUNTED).to(torch.int16)
        self.pools.seen[row] = packed_bits(ids, self.pools.vocab_size)

    def _fill_words(self, row: int, words: Sequence[Sequence[int]]) -> None:
        expect(
            len(words) <= MAX_BAD_WORDS and all(len(w) <= MAX_BAD_WORD_LEN for w in words),
            MetadataError,
            f"bad_words: expected at most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_LEN} tokens, "
            f"got {len(words)} of at most {max(map(len, words))}",
        )
        self._ids("bad_words", [token for word in words for token in word])
        placed = [[-1] * (MAX_BAD_WORD_LEN - len(word)) + list(word) for word in words]
        placed += [[-1] * MAX_BAD_WORD_LEN] * (MAX_BAD_WORDS - len(words))
        self.pools.words[row] = to_device(placed, torch.int32, self.pools.words.device)

    def _ids(self, name: str, ids: Iterable[int]) -> torch.Tensor:
        """Return ids [N] int64 on the device.

        Raises:
            MetadataError: an id outside the vocabulary.
        """
        listed, vocab = list(ids), self.pools.vocab_size
        wrong = [token for token in listed if not 0 <= token < vocab]
        expect(
            not wrong,
            MetadataError,
            f"{name}: expected ids below {vocab}, the size of the vocabulary, got "
            f"{format_value(wrong[:3])}",
        )
        return to_device(listed, torch.int64, self.pools.bias.device)

"""Allocator of per-request logits-processor state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mtp_plugin.errors import MetadataError, NoFreeSlotsError, expect, format_value
from mtp_plugin.ops.logits_processor_state import (
    MOST_COUNTED,
    DraftMask,
    LogitsProcessorState,
    num_words,
    packed_bits,
)
from mtp_plugin.ops.step import to_device
from mtp_plugin.requests.columns import Number, within_float32
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.host import RequestFacts

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


class LogitsProcessorAllocator:
    """Allocates a row of the logits-processing pools to each request that needs one.

    A row is initialized when it is allocated, ordered after the kernels launched before.

    Args:
        num_rows: P, the maximum number of requests with a row at the same time.
        vocab_size: V.
        device: device of the steps.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.pools = LogitsProcessorState.empty(num_rows, vocab_size, device)
        max_masked = MAX_STOP_IDS + MAX_BAD_WORDS
        self.draft_mask = DraftMask(
            allowed=torch.zeros_like(self.pools.allowed),
            masked_ids=self.pools.allowed.new_full((num_rows + 1, max_masked), -1),
        )
        bits = packed_bits(torch.arange(vocab_size, device=device), vocab_size)
        self._all_allowed = torch.cat([bits, bits.new_full((1,), vocab_size)])
        self._rows = SlotManager(num_rows)
        self._draft_mask_only: dict[int, None] = {}

    @staticmethod
    def bytes_per_row(vocab_size: int) -> int:
        """Return the device bytes of a row in all pools."""
        bits = 3 * num_words(vocab_size) + 2
        words = MAX_BAD_WORDS * MAX_BAD_WORD_LEN
        return 6 * vocab_size + 4 * (bits + words + MAX_STOP_IDS + MAX_BAD_WORDS)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all pools."""
        pools = (*vars(self.pools).values(), *vars(self.draft_mask).values())
        return sum(pool.numel() * pool.element_size() for pool in pools)

    def allocate(
        self, request_id: int, facts: RequestFacts, tokens: Sequence[int]
    ) -> dict[str, Number]:
        """Allocate and fill the row that a request needs, if any.

        Args:
            tokens: prompt and output, including output before a preemption.

        Returns:
            The slot-table columns that hold the row.

        Raises:
            NoFreeSlotsError: all rows are in use.
            MetadataError: an id outside the vocabulary; no row is allocated.
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
                f"logits processing: all {self._rows.max_num_requests} rows of the pools are in "
                f"use, request {request_id} needs one"
            )
        row = self._rows.add_slot(request_id)
        self._draft_mask_only.pop(request_id, None)
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
            self.free(request_id)
            raise
        return {name: row for name, is_needed in needed.items() if is_needed}

    def allocate_for_draft_mask(self, facts: RequestFacts) -> dict[str, Number]:
        """Allocate a row only to mask the stop ids of a request's drafts before ``min_tokens``.

        A request gets it if it has no other row and a row is free. Without the row the drafter may
        propose stop ids, which verification rejects.

        Returns:
            The slot-table columns that hold the row.
        """
        request_id = facts.request_id
        if self._rows.get_slot(request_id) is not None:
            is_available = request_id in self._draft_mask_only
        else:
            is_available = bool(self._rows.free_slots)
        if not is_available or not _masks_stop_ids(facts):
            return {}
        row = self._rows.add_slot(request_id)
        self._draft_mask_only[request_id] = None
        self._fill_draft_mask(row, has_allowed=False)
        return {"allowed_row": row}

    def has_room(self, request_id: int) -> bool:
        """Whether the request has a row or a row is free."""
        return bool(self._rows.free_slots) or self._rows.get_slot(request_id) is not None

    def reclaim_draft_mask_row(self) -> int | None:
        """Free a row that a request has only to mask its drafts.

        Returns:
            The id of the request, whose slot must no longer refer to the row; None: no such row.
        """
        if not self._draft_mask_only:
            return None
        request_id = next(reversed(self._draft_mask_only))
        self.free(request_id)
        return request_id

    def free(self, request_id: int) -> None:
        """Free a request's row; does nothing if it has none."""
        self._rows.remove_slot(request_id)
        self._draft_mask_only.pop(request_id, None)

    def shutdown(self) -> None:
        """Free every row."""
        self._rows.shutdown()
        self._draft_mask_only.clear()

    # ---- initial values ---------------------------------------------------------------------

    def _fill_bias(self, row: int, bias: Any) -> None:
        pool = self.pools.bias[row]
        if isinstance(bias, torch.Tensor):  # a host request's dense bias
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
            self.pools.allowed[row].copy_(self._all_allowed)
        self.draft_mask.allowed[row].copy_(self.pools.allowed[row])
        self.draft_mask.masked_ids[row].fill_(-1)

    def _fill_counts(self, row: int, tokens: Sequence[int], ignored: int) -> None:
        """Mark all tokens as seen; count those after the first ``ignored`` ones."""
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
        padded = [[-1] * (MAX_BAD_WORD_LEN - len(word)) + list(word) for word in words]
        padded += [[-1] * MAX_BAD_WORD_LEN] * (MAX_BAD_WORDS - len(words))
        self.pools.words[row] = to_device(padded, torch.int32, self.pools.words.device)

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

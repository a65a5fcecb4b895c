"""A tail of copied text after the drafts of MTP layers.

Of K drafts the MTP layers make the first M; the others are what followed the longest earlier
occurrence of the request's last tokens, its MTP drafts included, in its own prompt and output. All
of it runs on the device, after the captured draft passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.vllm.tail_gate import MATCHES
from mtp_plugin.hosts.vllm.versions import part_problems
from mtp_plugin.ops.lookup import look_up_drafts
from mtp_plugin.speculative.rows.request_slots import DRAFT_LIMIT
from mtp_plugin.speculative.rows.row_ops import RowOps

MIN_MATCH, MAX_MATCH = 6, 32
"""Tokens that a match has at least, and that are compared at most."""


class CopiedTail:
    """Appends the tail to the drafts of every step.

    A column without a match has a valid id, which vLLM embeds; `without_absent` makes it -1 for the
    verifier. Methods that read the probabilities of drafts see probability 1 for a copied token.

    Args:
        ops: of the engine. states: vLLM's ``RequestState``.
        length: N, of the tail. vocab: larger ids, of images in a prompt, are not drafted.

    Raises:
        HostError: vLLM lacks something of `TAIL`.
    """

    def __init__(self, ops: RowOps, states: Any, length: int, vocab: int) -> None:
        problems = part_problems("tail")
        if problems:
            raise HostError(f"tail: {'; '.join(problems)}: leave it out")
        self._ops, self._states = ops, states
        self._length, self._vocab = length, vocab
        self.num_mtp = ops.num_drafts - length
        device = ops.slots.table.device
        num_slots = len(ops.slots.table)
        self._copied = torch.zeros(num_slots, length, dtype=torch.int64, device=device)
        """[S, N] tokens with probability 1 in ``draft_probs``."""
        self._columns = torch.arange(self.num_mtp, ops.num_drafts, device=device)
        tokens = states.all_token_ids
        if getattr(tokens, "_uva_buf", None) is not None:
            # read whole in every step: host memory would be slow
            tokens.gpu, tokens._uva_buf = torch.zeros_like(tokens.gpu), None
        self._has_match = torch.zeros(len(tokens.gpu), dtype=torch.bool, device=device)

    def restore(self) -> None:
        """Write what sleep of level 2 discards."""
        self._has_match.zero_()
        self._copied.zero_()
        self._columns.copy_(torch.arange(self.num_mtp, self._ops.num_drafts))
        if self._ops.draft_probs is not None:
            self._ops.draft_probs[:, self.num_mtp :] = 0.0

    def propose(
        self,
        propose: Callable[[int], torch.Tensor],
        input_batch: Any,
        num_sampled: torch.Tensor,
        num_drafts: int | None,
        is_dummy: bool,
    ) -> torch.Tensor:
        """Return the drafts [R, K] int64 of a step.

        Args:
            propose: of vLLM's speculator; takes the number of drafts alone.
            num_sampled: [R]; 0: the prompt is not finished.
            num_drafts: of this step; None: K.
            is_dummy: no requests: only kernels are compiled.
        """
        num_drafts = self._ops.num_drafts if num_drafts is None else num_drafts
        num_mtp = min(num_drafts, self.num_mtp)
        drafts = propose(num_mtp)
        indices = input_batch.idx_mapping
        if is_dummy:
            for count in range(self.num_mtp + 1):  # a kernel each
                self._look_up(indices, drafts[:, :count], num_sampled)
            return drafts
        found = self._look_up(indices, drafts[:, :num_mtp], num_sampled)
        slots = self._ops.slots
        if slots.has_draft_limit[input_batch.idx_mapping_np].any():
            limits = slots.of(indices).read(DRAFT_LIMIT, slice(0, len(indices)))
            # others cannot use a tail
            self._has_match[indices] = self._has_match[indices] & (limits > self.num_mtp)
        if num_drafts > self.num_mtp:
            copied = found.clamp(0, self._vocab - 1).to(torch.int64)
            drafts[:, self.num_mtp :] = copied
            self._keep_probs(indices, copied)
        return drafts

    def forget(self, slot: int) -> None:
        """Drop the match of the request that had the slot before."""
        self._has_match[slot] = False

    def _look_up(
        self, indices: torch.Tensor, drafts: torch.Tensor, num_sampled: torch.Tensor
    ) -> torch.Tensor:
        """Return [R, N] int32, -1 without a match, for drafts [R, M] that end the pattern, and keep
        which requests have one. It is the only launch of a step without a tail."""
        return look_up_drafts(
            self._states.all_token_ids.gpu,
            self._states.total_len.gpu,
            self._length,
            min_match=MIN_MATCH,
            max_match=MAX_MATCH,
            rows=indices,
            drafts=drafts,
            matches=self._has_match,
            num_sampled=num_sampled,
            backend=self._ops.backend,
        )

    def _keep_probs(self, indices: torch.Tensor, copied: torch.Tensor) -> None:
        probs = self._ops.draft_probs
        if probs is None:
            return
        rows = indices.unsqueeze(1)
        probs[rows, self._columns, self._copied[indices]] = 0.0
        self._copied[indices] = copied
        matches = self._has_match[indices].unsqueeze(1)
        probs[rows, self._columns, copied] = matches.expand_as(copied).float()

    def without_absent(self, drafts: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the drafts [N] of the rows of an ``InputBatch``, -1 in columns without a match."""
        counts = batch.num_draft_tokens_per_req
        if counts is not None and counts.max() <= self.num_mtp:  # None: of a warm-up
            return drafts
        is_absent = ~self._has_match[batch.expanded_idx_mapping.to(torch.int64)]
        return drafts.masked_fill(is_absent & (batch.expanded_local_pos > self.num_mtp), -1)

    def add_matches(self, output: Any, batch: Any) -> Any:
        """Let a ``SamplerOutput`` bring the matches of the last step to the host."""
        matches = self._has_match.to("cpu", non_blocking=True, copy=True)  # no gather before it
        setattr(output, MATCHES, (matches, batch.idx_mapping_np.copy()))
        return output

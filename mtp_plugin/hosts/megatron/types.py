"""Buffers that a host engine owns, and results.

N requests, the D decode requests first; S drafts after the base token of a decode request; T flat
tokens: S+1 per decode request, one per prefill request, then any padding; B tokens per KV block; W
KV blocks that one rewind can cross at most, ceil(S / B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, eq=False)
class NextForwardBuffers:
    """Inputs of the next forward pass; int32 or int64, at least as long as stated."""

    sampled_tokens_buf: torch.Tensor  # [N] the output after a request's last accepted token
    last_accepted_seq_buf: torch.Tensor  # [N] the packed row of that token
    accepted_tokens_per_request: torch.Tensor  # [D, S] accepted drafts, then -1
    accepted_token_counts: torch.Tensor  # [D] number of accepted drafts


@dataclass(frozen=True, eq=False)
class KVBlockState:
    """The end of each request's KV, one row per request; int32 or int64, updated in place."""

    last_kv_block_offset: torch.Tensor  # [N] offset of the last token in its block
    kv_length_offsets: torch.Tensor  # [N]
    kv_block_counts: torch.Tensor  # [N]
    last_kv_block_id: torch.Tensor  # [N]
    kv_block_ids: torch.Tensor  # [N, maximum blocks of a request], -1 where there is none


class VerifiedTokens(NamedTuple):
    """Which tokens of a batch are accepted; a plain tuple for host engines that unpack it."""

    last_one_indices: torch.Tensor  # [N] int64: flat index of a request's last accepted token
    accepted_tokens_mask: torch.Tensor  # [T] bool: False on padding
    input_tokens: torch.Tensor  # [T], as given


class RewoundBlocks(NamedTuple):
    """Released KV blocks; [N] while S <= B, else [N, W], newest block first."""

    blocks_to_release: torch.Tensor  # dtype of ``last_kv_block_id``
    remove_mask: torch.Tensor  # bool: whether the block of the same entry is released

"""Verification in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch


def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    last_one_indices: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """As at the door."""
    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    used = decode_len + num_prefill_requests

    read = input_tokens[:decode_len].view(num_decode_requests, width)
    emitted = output_tokens[:decode_len].view(num_decode_requests, width)
    stands = (read[:, 1:] == emitted[:, :-1]).to(torch.int64).cumprod(dim=1)  # [D, S]

    decode_mask = mask[:decode_len].view(num_decode_requests, width)
    decode_mask[:, 0] = True
    decode_mask[:, 1:] = stands
    mask[decode_len:used] = True
    mask[used:] = False

    flat = torch.arange(used, device=input_tokens.device)
    last_one_indices[:num_decode_requests] = flat[:decode_len:width] + stands.sum(dim=1)
    last_one_indices[num_decode_requests:] = flat[decode_len:]


def required_logit_indices(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_requests: int,
    *,
    indices: torch.Tensor,
) -> None:
    """As at the door."""
    lengths = query_lengths[:num_requests].to(torch.int64)
    is_decode = prefill_status[:num_requests] == 0
    wanted = torch.where(is_decode, lengths, 1)
    row_ends = lengths.cumsum(0)
    entry_ends = wanted.cumsum(0)

    entries = torch.arange(indices.shape[0], device=lengths.device)
    request = torch.searchsorted(entry_ends, entries, right=True).clamp_max(num_requests - 1)
    rows = row_ends[request] - (entry_ends[request] - entries)
    # a prefill request without rows points at row 0 rather than before it
    indices.copy_(rows.clamp_min(0).masked_fill(entries >= entry_ends[-1], 0))

"""Verify drafted tokens, and select the rows whose logits a step needs."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect, expect_int
from mtp_plugin.hosts.megatron.checks import FLAG_DTYPES, expect_vector, outputs
from mtp_plugin.hosts.megatron.types import VerifiedTokens
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor


def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: Backend,
) -> VerifiedTokens:
    """Accept the drafts that the target model would have generated itself.

    A decode request has a base token and S drafts. The base token is always accepted; a draft is
    accepted if the output one row before it is the same token and all drafts before it are
    accepted. With S = 3, inputs ``a b c d`` and outputs ``b c x y``, ``a b c`` are accepted. The
    one token of a prefill request is accepted.

    Args:
        input_tokens: [T] or [1, T] int32 or int64, the S+1 tokens of every decode request, then
            one token per prefill request, then any padding.
        output_tokens: int32 or int64, the target's token after each of them; padding not needed.
        num_decode_requests: number of decode requests, which come first.
        num_prefill_requests: number of prefill requests.
        num_speculative_tokens: S.
        out: ``(last_one_indices [N] int64, accepted_tokens_mask [T] bool)`` to write into.

    Returns:
        ``(last_one_indices, accepted_tokens_mask, input_tokens [T])``.

    Raises:
        TensorContractError: another shape, dtype or device, or a number out of range.

    Source: Megatron-LM, ``mtp_utils_pytorch``; ``out`` and unmarked padding are additions.
    """
    num_decode = expect_int("num_decode_requests", num_decode_requests, 0)
    num_prefill = expect_int("num_prefill_requests", num_prefill_requests, 0)
    num_drafts = expect_int("num_speculative_tokens", num_speculative_tokens, 0)
    tokens = expect_tensor("input_tokens", input_tokens)
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    device, needed = tokens.device, num_decode * (num_drafts + 1) + num_prefill
    expect_vector("input_tokens", tokens, needed, device)
    expect_vector("output_tokens", output_tokens, needed, device)
    num_requests = num_decode + num_prefill
    last, mask = outputs(
        out,
        (
            ("last_one_indices", (num_requests,), torch.int64),
            ("accepted_tokens_mask", (int(tokens.shape[0]),), torch.bool),
        ),
        device,
    )
    if num_requests == 0:
        mask.zero_()
    else:
        backend.dispatch(verify_speculative_tokens_reference)(
            tokens, output_tokens, num_decode, num_prefill, num_drafts, last, mask
        )
    return VerifiedTokens(last, mask, tokens)


def required_logit_indices(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_decode: int,
    num_prefill: int,
    *,
    num_speculative_tokens: int | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """Return the flat rows whose logits a step needs: all of a decode request, a prefill's last.

    With decode requests of 2 rows each and prompts of 3 and 1 rows, ``0 1 | 2 3 | 4 5 6 | 7``
    gives ``0 1 2 3 6 7``.

    Args:
        prefill_status: [N] int32, int64 or bool, 0 for a decode request.
        query_lengths: [N] int32 or int64, rows per request.
        num_decode: number of requests with status 0. num_prefill: number of all others.
        num_speculative_tokens: S, if every decode request has S+1 rows. With it or ``out`` no value
            is read from the device; a CUDA graph needs one of the two.
        out: int32 or int64, one entry per index or more; surplus entries become 0.

    Returns:
        ``out``, or int64 of as many entries as there are indices.

    Raises:
        TensorContractError: another shape, dtype or device, a number out of range, or the capture
            of a CUDA graph with neither of the two.

    Source: the row selection in Megatron-LM's dynamic context, as a function of its own.
    """
    num_decode = expect_int("num_decode", num_decode, 0)
    num_prefill = expect_int("num_prefill", num_prefill, 0)
    num_requests = num_decode + num_prefill
    device = expect_tensor("query_lengths", query_lengths).device
    expect_vector("query_lengths", query_lengths, num_requests, device)
    expect_vector("prefill_status", prefill_status, num_requests, device, FLAG_DTYPES)
    if num_speculative_tokens is not None:
        num_drafts = expect_int("num_speculative_tokens", num_speculative_tokens, 0)
        decode_rows = num_decode * (num_drafts + 1)
    elif out is None and num_decode > 0:
        decode_rows = _read_decode_rows(prefill_status, query_lengths, num_requests)
    else:
        decode_rows = 0  # the length of ``out`` is the number of entries
    entries = decode_rows + num_prefill
    if out is None:
        out = torch.empty(entries, dtype=torch.int64, device=device)
    else:
        expect_vector("out", out, entries, device)
    if num_requests == 0:
        return out.zero_()
    backend.dispatch(required_logit_indices_reference)(
        prefill_status, query_lengths, num_requests, out
    )
    return out


def _read_decode_rows(
    prefill_status: torch.Tensor, query_lengths: torch.Tensor, num_requests: int
) -> int:
    expect(
        not (query_lengths.is_cuda and torch.cuda.is_current_stream_capturing()),
        TensorContractError,
        "required_logit_indices: inside a CUDA graph the number of decode rows has to come from "
        "the host: expected num_speculative_tokens or out, got neither",
    )
    decode_lengths = query_lengths[:num_requests] * (prefill_status[:num_requests] == 0)
    return int(decode_lengths.sum().item())


def verify_speculative_tokens_reference(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    last_one_indices: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    used = decode_len + num_prefill_requests

    read = input_tokens[:decode_len].view(num_decode_requests, width)
    outputs = output_tokens[:decode_len].view(num_decode_requests, width)
    accepted = (read[:, 1:] == outputs[:, :-1]).to(torch.int64).cumprod(dim=1)  # [D, S]

    decode_mask = mask[:decode_len].view(num_decode_requests, width)
    decode_mask[:, 0] = True
    decode_mask[:, 1:] = accepted
    mask[decode_len:used] = True
    mask[used:] = False

    flat = torch.arange(used, device=input_tokens.device)
    last_one_indices[:num_decode_requests] = flat[:decode_len:width] + accepted.sum(dim=1)
    last_one_indices[num_decode_requests:] = flat[decode_len:]


def required_logit_indices_reference(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_requests: int,
    indices: torch.Tensor,
) -> None:
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

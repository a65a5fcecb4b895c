"""Verify, prepare the next forward pass and rewind the KV of a whole batch in one launch."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from mtp_plugin.errors import TensorContractError, expect_int, format_value
from mtp_plugin.hosts.megatron.checks import (
    expect_active,
    expect_kv,
    expect_table,
    expect_vector,
    outputs,
    released_shape,
)
from mtp_plugin.hosts.megatron.types import AdvancedBatch, KVBlockState, NextForwardBuffers
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.step import PAD_TOKEN


def advance_decode_batch(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    *,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None = None,
    out: AdvancedBatch | tuple[torch.Tensor, ...] | None = None,
    backend: Backend,
) -> AdvancedBatch:
    """Verify the drafts of a batch, prepare its next forward pass and rewind its KV.

    Equals ``verify_speculative_tokens``, ``prepare_next_forward_pass`` and ``rewind_kv_cache`` in
    this order, for decode requests followed by prefill requests. With S = 3, blocks of 4 tokens,
    inputs ``a b c d`` and outputs ``b x y z``: only the draft ``b`` is accepted, ``x`` is sampled,
    and two tokens of KV are removed.

    Args:
        input_tokens: [T] int32 or int64, the S+1 tokens of every decode request, then one token
            per prefill request, then any padding.
        output_tokens: [>= T without padding] int32 or int64, the target's token after each.
        required_logit_indices: likewise, the packed row of each.
        buffers: inputs of the next forward pass, written.
        kv: the end of each request's KV, updated for decode requests. Both are checked once per
            batch size, not in every step.
        num_decode_requests: D. num_prefill_requests: N - D. num_speculative_tokens: S.
        block_size_tokens: B.
        num_active_requests: requests at or past it are padding, whose KV does not change; None:
            there is none. One integer on the device may change between replays of a CUDA graph.
        out: the four tensors of the result to write into.

    Raises:
        TensorContractError: another shape, dtype or device, or a number out of range.

    Source: the composition of three functions of Megatron-LM's ``mtp_utils_pytorch``.
    """
    num_decode = expect_int("num_decode_requests", num_decode_requests, 0)
    num_prefill = expect_int("num_prefill_requests", num_prefill_requests, 0)
    num_drafts = expect_int("num_speculative_tokens", num_speculative_tokens, 0)
    block_size = expect_int("block_size_tokens", block_size_tokens, 1)
    num_requests = num_decode + num_prefill
    device = expect_tensor("input_tokens", input_tokens).device
    for name, tensor in (
        ("input_tokens", input_tokens),
        ("output_tokens", output_tokens),
        ("required_logit_indices", required_logit_indices),
    ):
        expect_vector(name, tensor, num_decode * num_drafts + num_requests, device)
    _check_state(buffers, kv, num_requests, num_decode, num_drafts, device)
    active = expect_active(num_active_requests, num_requests, device)
    blocks = released_shape(num_requests, num_drafts, block_size)
    advanced = AdvancedBatch(
        *outputs(
            out,
            (
                ("last_one_indices", (num_requests,), torch.int64),
                ("accepted_tokens_mask", (int(input_tokens.shape[0]),), torch.bool),
                ("blocks_to_release", blocks, kv.last_kv_block_id.dtype),
                ("remove_mask", blocks, torch.bool),
            ),
            device,
        )
    )
    if num_requests == 0:
        advanced.accepted_tokens_mask.zero_()
        return advanced
    backend.dispatch(advance_decode_batch_reference)(
        input_tokens,
        output_tokens,
        required_logit_indices,
        buffers,
        kv,
        num_decode,
        num_drafts,
        block_size,
        active,
        advanced,
    )
    return advanced


_checked_sizes: WeakKeyDictionary[
    NextForwardBuffers | KVBlockState, set[tuple[int, int, int, torch.device]]
] = WeakKeyDictionary()


def _check_state(
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    num_requests: int,
    num_decode: int,
    num_drafts: int,
    device: torch.device,
) -> None:
    if not isinstance(buffers, NextForwardBuffers):
        raise TensorContractError(
            f"buffers: expected NextForwardBuffers, got {format_value(buffers)}"
        )
    if not isinstance(kv, KVBlockState):
        raise TensorContractError(f"kv: expected KVBlockState, got {format_value(kv)}")
    sizes = (num_requests, num_decode, num_drafts, device)
    if sizes not in _checked_sizes.get(buffers, ()):
        for name, entries in (
            ("sampled_tokens_buf", num_requests),
            ("last_accepted_seq_buf", num_requests),
            ("accepted_token_counts", num_decode),
        ):
            expect_vector(name, getattr(buffers, name), entries, device)
        rows = buffers.accepted_tokens_per_request
        expect_table("accepted_tokens_per_request", rows, num_decode, num_drafts, device)
        _checked_sizes.setdefault(buffers, set()).add(sizes)
    if sizes not in _checked_sizes.get(kv, ()):
        expect_kv(kv, num_requests, device)
        _checked_sizes.setdefault(kv, set()).add(sizes)


def advance_decode_batch_reference(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    num_decode_requests: int,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    advanced: AdvancedBatch,
) -> None:
    num_requests = advanced.last_one_indices.shape[0]
    active = torch.arange(num_requests, device=input_tokens.device) < num_active_requests
    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    read = input_tokens[:decode_len].view(num_decode_requests, width)
    outputs = output_tokens[:decode_len].view(num_decode_requests, width)
    accepted = (read[:, 1:] == outputs[:, :-1]).to(torch.int64).cumprod(dim=1)  # [D, S]
    matches = accepted.sum(dim=1)

    _write_verified(advanced, accepted, matches)
    last = advanced.last_one_indices
    buffers.sampled_tokens_buf[:num_requests] = output_tokens[last]
    buffers.last_accepted_seq_buf[:num_requests] = required_logit_indices[last]
    drafts = read[:, 1:].masked_fill(accepted == 0, PAD_TOKEN)
    buffers.accepted_tokens_per_request[:num_decode_requests] = drafts
    buffers.accepted_token_counts[:num_decode_requests] = matches
    _rewind(advanced, kv, num_speculative_tokens - matches, active, block_size_tokens)


def _write_verified(advanced: AdvancedBatch, accepted: torch.Tensor, matches: torch.Tensor) -> None:
    """Write the mask and the last accepted index of every request; accepted [D, S], matches [D]."""
    last, mask = advanced.last_one_indices, advanced.accepted_tokens_mask
    num_decode, width = accepted.shape[0], accepted.shape[1] + 1
    decode_len = num_decode * width
    used = decode_len + last.shape[0] - num_decode
    decode_mask = mask[:decode_len].view(num_decode, width)
    decode_mask[:, 0] = True
    decode_mask[:, 1:] = accepted
    mask[decode_len:used] = True
    mask[used:] = False
    flat = torch.arange(used, device=last.device)
    last[:num_decode] = flat[:decode_len:width] + matches
    last[num_decode:] = flat[decode_len:]


def _rewind(
    advanced: AdvancedBatch,
    kv: KVBlockState,
    rejected: torch.Tensor,
    active: torch.Tensor,
    block_size_tokens: int,
) -> None:
    """Remove ``rejected`` [D] tokens from the KV of the active [N] decode requests."""
    release, removed = advanced.blocks_to_release, advanced.remove_mask
    release.zero_()
    removed.zero_()
    num_requests, num_decode = active.shape[0], rejected.shape[0]
    newest = release if release.dim() == 1 else release[:, 0]
    newest.copy_(kv.last_kv_block_id[:num_requests].masked_fill(~active, 0))
    if num_decode == 0:
        return
    release, removed = (result[:num_decode].view(num_decode, -1) for result in (release, removed))
    rejected = rejected.masked_fill(~active[:num_decode], 0)
    table = kv.kv_block_ids[:num_decode]
    last_column = table.shape[1] - 1
    old_count = kv.kv_block_counts[:num_decode].to(torch.int64)

    new_offset = kv.last_kv_block_offset[:num_decode].to(torch.int64) - rejected
    block = torch.div(new_offset, block_size_tokens, rounding_mode="floor")
    crossed = (-block).clamp(0, release.shape[1]).masked_fill(~active[:num_decode], 0)
    new_count = old_count - crossed
    entries = old_count.unsqueeze(1) - 1 - torch.arange(release.shape[1], device=table.device)
    removed.copy_(entries >= new_count.unsqueeze(1))
    inside = removed & (entries >= 0) & (entries <= last_column)
    blocks = table.gather(1, entries.clamp(0, last_column)).masked_fill(~inside, 0)
    release[:, 1:] = blocks[:, 1:]

    earlier = table.gather(1, (new_count - 1).clamp(0, last_column).unsqueeze(1)).squeeze(1)
    columns = torch.arange(table.shape[1], device=table.device)
    # the old values are views of the buffers
    gone = (columns >= new_count.unsqueeze(1)) & (columns < old_count.unsqueeze(1))
    table.masked_fill_(gone, -1)
    kept = kv.last_kv_block_id[:num_decode]
    kv.last_kv_block_id[:num_decode] = torch.where(crossed > 0, earlier, kept)
    offset = torch.where(active[:num_decode], new_offset - block * block_size_tokens, new_offset)
    kv.last_kv_block_offset[:num_decode] = offset
    kv.kv_length_offsets[:num_decode] -= rejected
    kv.kv_block_counts[:num_decode] = new_count

"""Token and KV bookkeeping of a Megatron-style host engine, and its recurrent states."""

from __future__ import annotations

from dataclasses import fields

import torch

from integration.bench.case import POISON, Case, Trial
from integration.bench.random_inputs import RandomInputs
from integration.bench.shapes import REFERENCE, Shape
from integration.bench.targets import BOOKKEEPING, STATE_COPY
from mtp_plugin.hosts.megatron.batch_advance import advance_decode_batch
from mtp_plugin.hosts.megatron.kv_rewind import rewind_kv_cache
from mtp_plugin.hosts.megatron.next_forward import prepare_next_forward_pass
from mtp_plugin.hosts.megatron.token_verify import verify_speculative_tokens
from mtp_plugin.hosts.megatron.types import AdvancedBatch, KVBlockState, NextForwardBuffers
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.state_rollback import mamba_state_selective_copy

BLOCK_TOKENS = 64
MAX_BLOCKS = 64
INT, LONG = 4, 8
"""Bytes."""

STATE = (64, 64, 128)
TINY_STATE = (2, 4, 8)
STATE_COPIES = 512
"""Number of layers times requests of a full state copy: 1 GiB read and written."""


def bookkeeping_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return the bookkeeping of a step as one launch and as three ops."""
    tokens = shape.rows
    # inputs, outputs and rows of every token; five numbers and two table entries per request
    read = tokens * 3 * LONG + shape.batch * 7 * INT
    written = tokens + shape.batch * (shape.k * INT + 4 * INT + 2 * LONG + 5 * INT + 1)
    at_reference = shape.k == REFERENCE.k
    return [
        Case(
            name="bookkeeping/fused",
            shape=shape,
            bytes_read=read,
            bytes_written=written,
            prepare=lambda seed: _bookkeeping(shape, RandomInputs(seed, device), fused=True),
            target=BOOKKEEPING.get(shape.batch) if at_reference else None,
        ),
        Case(
            name="bookkeeping/three-ops",
            shape=shape,
            bytes_read=read,
            bytes_written=written,
            prepare=lambda seed: _bookkeeping(shape, RandomInputs(seed, device), fused=False),
        ),
    ]


def state_copy_case(shape: Shape, device: torch.device, state: tuple[int, ...]) -> Case:
    """Return the copy of accepted recurrent states, for 8 layers, or fewer with a large batch."""
    num_layers = max(1, min(8, STATE_COPIES // shape.batch))
    moved = num_layers * shape.batch * 2 * torch.Size(state).numel()
    large = num_layers * shape.batch >= STATE_COPIES and state == STATE and shape.k == REFERENCE.k
    return Case(
        name="state-copy",
        shape=shape,
        bytes_read=moved,
        bytes_written=moved,
        prepare=lambda seed: _state_copy(shape, RandomInputs(seed, device), state, num_layers),
        target=STATE_COPY if large else None,
    )


def _bookkeeping(shape: Shape, rng: RandomInputs, *, fused: bool) -> Trial:
    batch, k, device = shape.batch, shape.k, rng.device
    width = k + 1
    outputs = rng.integers(0, shape.vocab, batch, width, dtype=torch.int64)
    drafts = torch.where(rng.chance(0.7, batch, k), outputs[:, :-1], outputs[:, :-1] + 1)
    base = rng.integers(0, shape.vocab, batch, 1, dtype=torch.int64)
    inputs = torch.cat([base, drafts], dim=1).reshape(-1)
    outputs = outputs.reshape(-1)
    indices = torch.arange(batch * width, device=device)
    prefill_status = torch.zeros(batch, dtype=torch.int32, device=device)

    def poisoned(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        value = True if dtype == torch.bool else POISON
        return torch.full(sizes, value, dtype=dtype, device=device)

    lens = rng.integers(width, BLOCK_TOKENS * MAX_BLOCKS, batch)
    counts = (lens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    blocks = rng.permutation(batch * MAX_BLOCKS).to(torch.int32).view(batch, MAX_BLOCKS)
    table = blocks.masked_fill(torch.arange(MAX_BLOCKS, device=device) >= counts.unsqueeze(1), -1)
    last = (counts - 1).to(torch.int64).unsqueeze(1)
    kv = KVBlockState(
        last_kv_block_offset=(lens - 1) % BLOCK_TOKENS,
        kv_length_offsets=lens,
        kv_block_counts=counts,
        last_kv_block_id=table.gather(1, last).squeeze(1),
        kv_block_ids=table,
    )
    buffers = NextForwardBuffers(
        sampled_tokens_buf=poisoned(batch, dtype=torch.int64),
        last_accepted_seq_buf=poisoned(batch, dtype=torch.int64),
        accepted_tokens_per_request=poisoned(batch, k),
        accepted_token_counts=poisoned(batch),
    )
    blocks_shape = (batch, -(-k // BLOCK_TOKENS)) if k > BLOCK_TOKENS else (batch,)
    result = AdvancedBatch(
        last_one_indices=poisoned(batch, dtype=torch.int64),
        accepted_tokens_mask=poisoned(batch * width, dtype=torch.bool),
        blocks_to_release=poisoned(*blocks_shape),
        remove_mask=poisoned(*blocks_shape, dtype=torch.bool),
    )

    def run_fused(backend: Backend) -> dict[str, torch.Tensor]:
        advance_decode_batch(
            inputs,
            outputs,
            indices,
            buffers,
            kv,
            num_decode_requests=batch,
            num_prefill_requests=0,
            num_speculative_tokens=k,
            block_size_tokens=BLOCK_TOKENS,
            out=result,
            backend=backend,
        )
        return {}

    def run_three(backend: Backend) -> dict[str, torch.Tensor]:
        last_one, mask = result.last_one_indices, result.accepted_tokens_mask
        verify_speculative_tokens(
            inputs, outputs, batch, 0, k, out=(last_one, mask), backend=backend
        )
        prepare_next_forward_pass(
            batch,
            outputs,
            indices,
            last_one,
            mask,
            inputs,
            buffers.sampled_tokens_buf,
            buffers.last_accepted_seq_buf,
            buffers.accepted_tokens_per_request,
            buffers.accepted_token_counts,
            k,
            backend=backend,
        )
        rewind_kv_cache(
            buffers.accepted_token_counts,
            prefill_status,
            kv.last_kv_block_offset,
            kv.kv_length_offsets,
            kv.kv_block_counts,
            kv.last_kv_block_id,
            kv.kv_block_ids,
            k,
            BLOCK_TOKENS,
            out=(result.blocks_to_release, result.remove_mask),
            backend=backend,
        )
        return {}

    state = result._asdict()
    for part in (kv, buffers):
        state |= {entry.name: getattr(part, entry.name) for entry in fields(part)}
    return Trial(run_fused if fused else run_three, state)


def _state_copy(shape: Shape, rng: RandomInputs, state: tuple[int, ...], num_layers: int) -> Trial:
    batch, width = shape.batch, shape.k + 1
    after = rng.states(num_layers, batch, width, *state)
    current = rng.states(num_layers, batch, *state)
    prefill_status = torch.zeros(batch, dtype=torch.int32, device=rng.device)
    slots = rng.permutation(batch)
    counts = rng.integers(0, width, batch)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        mamba_state_selective_copy(
            after, current, prefill_status, slots, counts, num_layers, backend=backend
        )
        return {}

    return Trial(run, {"current_states": current})

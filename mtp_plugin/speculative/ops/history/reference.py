"""The per-slot history of (token, target state) pairs, in torch."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect


def advance_history(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    num_accepted: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_contexts: int,
    num_ctx_tokens: int,
    step_rows: int,
) -> None:
    """Move every request's pool row to the last K pairs before its bonus token, in place.

    A generation keeps entries [n, n+K) of its K pool pairs followed by this step's K+1 inputs and
    states; a context keeps the last K pairs of pool and chunk. With K = 3, pool ``a b c``, inputs
    ``t u v w`` and n = 3 the pool becomes ``t u v``.

    Args:
        tokens_pool: [S, K] int32. states_pool: [S, K, H].
        slot_ids: [R] int64; the padding rows of a batch may share one.
        input_ids: [T] the verified inputs. hidden_states: [T, H] the target's states.
        num_accepted: [R] int32 (read for generations).
        context_lens: [C] chunk lengths on the device.
        num_contexts: C. num_ctx_tokens: their rows. step_rows: K+1.

    Raises:
        TensorContractError: pools of different width or rows that do not fit.
    """
    width = tokens_pool.shape[1]
    _check(tokens_pool, states_pool, input_ids, hidden_states, num_ctx_tokens, step_rows)
    slots = slot_ids.to(torch.int64)
    pool_tokens = tokens_pool[slots]  # [R, K]
    pool_states = states_pool[slots]  # [R, K, H]
    columns = torch.arange(width, device=tokens_pool.device)

    if num_contexts > 0:
        lens = context_lens.to(torch.int64)
        ends = lens.cumsum(0)
        # entry e of the last K: pool entry m + e while that is one, else chunk row m - K + e
        entry = lens.unsqueeze(1) + columns  # index into (pool ++ chunk), [C, K]
        from_pool = entry < width
        rows = (ends.unsqueeze(1) - width + columns).clamp_min(0)
        pool_entry = entry.clamp_max(width - 1)
        kept = pool_tokens[:num_contexts]
        tokens = torch.where(from_pool, kept.gather(1, pool_entry), input_ids[rows].to(kept.dtype))
        kept_states = _gather_entries(pool_states[:num_contexts], pool_entry)
        states = torch.where(
            from_pool.unsqueeze(-1), kept_states, hidden_states[rows].to(kept_states.dtype)
        )
        tokens_pool[slots[:num_contexts]] = tokens
        states_pool[slots[:num_contexts]] = states

    num_generations = slots.shape[0] - num_contexts
    if num_generations > 0:
        step_tokens = input_ids[num_ctx_tokens:].view(num_generations, step_rows)
        step_states = hidden_states[num_ctx_tokens:].view(num_generations, step_rows, -1)
        all_tokens = torch.cat(
            [pool_tokens[num_contexts:], step_tokens.to(pool_tokens.dtype)], dim=1
        )
        all_states = torch.cat(
            [pool_states[num_contexts:], step_states.to(pool_states.dtype)], dim=1
        )
        entry = num_accepted[num_contexts:].to(torch.int64).unsqueeze(1) + columns
        tokens_pool[slots[num_contexts:]] = all_tokens.gather(1, entry)
        states_pool[slots[num_contexts:]] = _gather_entries(all_states, entry)


def _gather_entries(states: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """states [N, E, H] at entry [N, W] -> [N, W, H]."""
    return states.gather(1, entry.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def _check(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    num_ctx_tokens: int,
    step_rows: int,
) -> None:
    expect(
        tokens_pool.shape[1] == states_pool.shape[1],
        TensorContractError,
        f"history pools: expected equal widths K, got {list(tokens_pool.shape)} tokens and "
        f"{list(states_pool.shape)} states",
    )
    rows = input_ids.shape[0]
    expect(
        hidden_states.shape[0] == rows and hidden_states.shape[1] == states_pool.shape[2],
        TensorContractError,
        f"hidden_states: expected [{rows}, {states_pool.shape[2]}], got "
        f"{list(hidden_states.shape)}",
    )
    expect(
        rows >= num_ctx_tokens and (rows - num_ctx_tokens) % step_rows == 0,
        TensorContractError,
        f"input_ids: expected {num_ctx_tokens} context tokens and K+1 = {step_rows} per "
        f"generation, "
        f"got {rows}",
    )

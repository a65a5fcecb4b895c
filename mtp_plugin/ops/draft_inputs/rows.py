"""Parts of draft inputs, in torch: rows of prompts, windows of generations, accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.step import DraftInputs


def generation_window(
    entry_tokens: torch.Tensor,
    entry_states: torch.Tensor,
    first_entry: torch.Tensor,
    last_tokens: torch.Tensor,
    first_position: torch.Tensor,
    window: int,
) -> DraftInputs:
    """Return W pairs of (state, following token) per generation, ending with its last token.

    With entries ``q r s t u v w`` (K = 3 pool pairs, then this step's inputs), n = 2 and the bonus
    ``x``: the exact window of 4 starts at entry n - 1 = 1 and gives states of ``r s t u`` with
    tokens ``s t u x``.

    Args:
        entry_tokens: [G, E] int32. entry_states: [G, E, H].
        first_entry: [G] int64, where the window starts.
        last_tokens: [G] the last output token, which follows the window.
        first_position: [G] position of the window's first state; negative rows are dead.
        window: W.

    Returns:
        DraftInputs with G*W rows; ids and positions of dead rows are 0.
    """
    num_generations, num_entries = entry_tokens.shape
    expect(
        entry_states.shape[:2] == entry_tokens.shape and window <= num_entries,
        TensorContractError,
        f"window: expected at most E = {num_entries} rows and states [{num_generations}, "
        f"{num_entries}, H], got {window} rows and {list(entry_states.shape)}",
    )
    for name, tensor in (
        ("first_entry", first_entry),
        ("last_tokens", last_tokens),
        ("first_position", first_position),
    ):
        _expect_shape(name, tensor, num_generations)
    offsets = torch.arange(window, device=entry_tokens.device)
    entry = first_entry.to(torch.int64).unsqueeze(1) + offsets  # [G, W]
    states = entry_states.gather(1, entry.unsqueeze(-1).expand(-1, -1, entry_states.shape[-1]))
    shifted = entry_tokens.gather(1, entry[:, 1:])
    tokens = torch.cat([shifted, last_tokens.to(shifted.dtype).unsqueeze(1)], dim=1)
    positions = first_position.to(torch.int64).unsqueeze(1) + offsets
    dead = positions < 0
    tokens = tokens.masked_fill(dead, 0)
    return DraftInputs(
        tokens.reshape(-1).to(torch.int32),
        positions.clamp_min(0).reshape(-1),
        states.flatten(0, 1),
    )


def context_rows(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    context_lens: torch.Tensor,
    last_tokens: torch.Tensor,
) -> DraftInputs:
    """Return prompt chunks shifted by one, each chunk's last token taken from ``last_tokens``.

    Prompt ``p q r s`` with output ``t``: tokens ``q r s t``, states of ``p q r s``.

    Args:
        input_ids: [N] the context rows.
        position_ids: [N].
        hidden_states: [N, H].
        context_lens: [C] chunk lengths on the device.
        last_tokens: [C].
    """
    _expect_shape("position_ids", position_ids, input_ids.shape[0])
    _expect_rows(hidden_states, input_ids.shape[0])
    _expect_shape("last_tokens", last_tokens, context_lens.shape[0])
    moved = input_ids.to(torch.int32).roll(-1)
    moved[context_lens.to(torch.int64).cumsum(0) - 1] = last_tokens.to(torch.int32)
    return DraftInputs(moved, position_ids.to(torch.int64), hidden_states)


def context_rows_with_history(
    rows: DraftInputs,
    chunk_ids: torch.Tensor,
    pool_tokens: torch.Tensor,
    pool_states: torch.Tensor,
    context_lens: Sequence[int],
    history_lens: Sequence[int],
) -> DraftInputs:
    """Insert the last ``history_lens[c]`` pool pairs of each context before its chunk rows.

    A chunk that continues a prompt rewrites the draft rows of the previous chunk, whose following
    tokens were not known then. Prompt ``p q r | s`` with K = 2 and output ``t``: the second chunk
    is fed as states of ``q r s`` with tokens ``r s t``.

    Args:
        rows: the chunk rows of :func:`context_rows`.
        chunk_ids: [N] the chunks themselves.
        pool_tokens: [C, K] tokens before this step.
        pool_states: [C, K, H] states before this step.
        context_lens, history_lens: per context, on the host; history at most K.
    """
    width = pool_tokens.shape[1]
    num_rows = rows.input_ids.shape[0]
    _expect_shape("chunk_ids", chunk_ids, num_rows)
    expect(
        pool_tokens.shape[0] == len(context_lens) == len(history_lens)
        and sum(context_lens) == num_rows,
        TensorContractError,
        f"context_lens: expected {num_rows} rows of {pool_tokens.shape[0]} contexts with as many "
        f"history_lens, got {list(context_lens)} and {list(history_lens)}",
    )
    expect(
        pool_states.shape == (*pool_tokens.shape, rows.hidden_states.shape[1]),
        TensorContractError,
        f"pool_states: expected {[*pool_tokens.shape, rows.hidden_states.shape[1]]}, got "
        f"{list(pool_states.shape)}",
    )
    expect(
        all(0 <= history <= width for history in history_lens),
        TensorContractError,
        f"history_lens: expected 0 to K = {width} rows per context, got {list(history_lens)}",
    )
    ids: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    start = 0
    for c, (chunk, history) in enumerate(zip(context_lens, history_lens, strict=True)):
        end = start + chunk
        if history > 0:
            # the successor of a pool pair is the next pool token, then the chunk's first token
            ids += [pool_tokens[c, width - history + 1 :], chunk_ids[start : start + 1]]
            first = rows.position_ids[start]
            positions.append(first - history + torch.arange(history, device=first.device))
            states.append(pool_states[c, width - history :].to(rows.hidden_states.dtype))
        ids.append(rows.input_ids[start:end])
        positions.append(rows.position_ids[start:end])
        states.append(rows.hidden_states[start:end])
        start = end
    return DraftInputs(
        torch.cat([part.to(torch.int32) for part in ids]), torch.cat(positions), torch.cat(states)
    )


def accepted_rows(
    accepted_tokens: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor
) -> DraftInputs:
    """Return the K+1 rows of each generation for a reused layer: accepted tokens, step's states.

    Columns after the accepted tokens repeat the last one; their results are not used.

    Args:
        accepted_tokens: [G, K+1], then negative padding.
        position_ids: [G*(K+1)].
        hidden_states: [G*(K+1), H].
    """
    num_generations, width = accepted_tokens.shape
    _expect_shape("position_ids", position_ids, num_generations * width)
    _expect_rows(hidden_states, num_generations * width)
    run = (accepted_tokens >= 0).to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)
    columns = torch.arange(width, device=accepted_tokens.device).expand(num_generations, -1)
    tokens = accepted_tokens.gather(1, torch.minimum(columns, (run - 1).clamp_min(0))).clamp_min(0)
    return DraftInputs(
        tokens.reshape(-1).to(torch.int32), position_ids.to(torch.int64), hidden_states
    )


def concatenate(first: DraftInputs, second: DraftInputs) -> DraftInputs:
    """Return context rows, then generation rows, with states in the dtype of the first."""
    widths = first.hidden_states.shape[1], second.hidden_states.shape[1]
    expect(
        widths[0] == widths[1],
        TensorContractError,
        f"hidden_states: expected rows of one width, got {widths[0]} and {widths[1]}",
    )
    return DraftInputs(
        torch.cat([first.input_ids, second.input_ids]),
        torch.cat([first.position_ids, second.position_ids]),
        torch.cat([first.hidden_states, second.hidden_states.to(first.hidden_states.dtype)]),
    )


def _expect_shape(name: str, tensor: torch.Tensor, size: int) -> None:
    expect_tensor(name, tensor, shape=(size,))


def _expect_rows(hidden_states: torch.Tensor, num_rows: int) -> None:
    expect_tensor("hidden_states", hidden_states, shape=(num_rows, "H"))

"""History and draft inputs of one step in torch, composed of the op folders' references."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtp_plugin.speculative.ops import draft_inputs, history
from mtp_plugin.speculative.ops.draft_inputs.contract import (
    check_eagle_output,
    check_vanilla_output,
)
from mtp_plugin.speculative.step import DraftInputs, FirstPass, to_device


def vanilla_first_pass(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    successors: torch.Tensor | None,
    context_lens: torch.Tensor,
    *,
    chunk_lens: list[int],
    history_lens: list[int],
    window: int,
    kv_lens: torch.Tensor | None = None,  # the draft loop computes them in torch
    kv_floor: int | None = None,  # noqa: ARG001
    spare_rows: int = 0,
    step_rows: int | None = None,
    out: FirstPass | None = None,
) -> FirstPass:
    """The rows of depth 1; then the pools are moved on by this step.

    Args:
        tokens_pool: [S, K] int32. states_pool: [S, K, H].
        slot_ids: [R] int64. input_ids: [T]. positions: [T] int64. hidden_states: [T, H].
        num_accepted: [R] int32. last_tokens: [R] int32, any stride.
        successors: [C] int32, any stride: the token behind each chunk; None without contexts.
        context_lens: [C] chunk lengths on the device. chunk_lens: the same on the host.
        history_lens: history rows in front of each chunk, on the host.
        window: rows per generation.
        kv_lens, kv_floor: for implementations that give the loop's KV lengths on the way.
        step_rows: rows per generation in the step; None: one more than the pools keep.
        spare_rows: rows of states behind the last one, for windows that move by an offset.
        out: takes the result, all but the room behind the ids. Its ``states`` may be the step's
            own from their first row on, where the result's rows lie where theirs do: no history
            rows, windows of ``step_rows`` rows. None: new tensors.

    Raises:
        TensorContractError: ``out`` does not have the sizes of the result.
    """
    k = tokens_pool.shape[1]
    step_rows = k + 1 if step_rows is None else step_rows
    num_contexts, num_ctx_tokens = len(chunk_lens), sum(chunk_lens)
    slots = slot_ids.to(torch.int64)
    num_generations = slots.shape[0] - num_contexts
    if out is not None:
        check_vanilla_output(
            out,
            hidden_states,
            kv_lens,
            requests=slots.shape[0],
            num_contexts=num_contexts,
            num_ctx_tokens=num_ctx_tokens,
            num_history_rows=sum(history_lens),
            max_draft_len=k,
            window=window,
            step_rows=step_rows,
            spare_rows=spare_rows,
        )
    parts: list[DraftInputs] = []
    row_lens = context_lens.to(torch.int64)
    if num_contexts > 0 and successors is not None:
        contexts = slots[:num_contexts]
        chunks = slice(0, num_ctx_tokens)
        rows = draft_inputs.context_rows(
            input_ids[chunks], positions[chunks], hidden_states[chunks], context_lens, successors
        )
        if any(history_lens):
            rows = draft_inputs.context_rows_with_history(
                rows,
                input_ids[chunks],
                tokens_pool[contexts],
                states_pool[contexts],
                chunk_lens,
                history_lens,
            )
            row_lens = row_lens + to_device(history_lens, row_lens.dtype, row_lens.device)
        parts.append(rows)
    if num_generations > 0:
        generations = slots[num_contexts:]
        step_tokens = input_ids[num_ctx_tokens:].view(num_generations, step_rows)
        step_states = hidden_states[num_ctx_tokens:].view(num_generations, step_rows, -1)
        past_tokens, past_states = tokens_pool[generations], states_pool[generations]
        counts = num_accepted[num_contexts:].to(torch.int64)
        parts.append(
            draft_inputs.generation_window(
                torch.cat([past_tokens, step_tokens.to(past_tokens.dtype)], dim=1),
                torch.cat([past_states.to(step_states.dtype), step_states], dim=1),
                (counts + k - window).clamp_min(0),
                last_tokens[num_contexts:],
                positions[num_ctx_tokens::step_rows] + counts - window,
                window,
            )
        )
    inputs = parts[0] if len(parts) == 1 else draft_inputs.concatenate(*parts)
    # the window above was read from the history before this step advances it
    history.advance_history(
        tokens_pool,
        states_pool,
        slots,
        input_ids,
        hidden_states,
        num_accepted,
        context_lens,
        num_contexts=num_contexts,
        num_ctx_tokens=num_ctx_tokens,
        step_rows=step_rows,
    )
    lens = torch.cat([row_lens, row_lens.new_full((num_generations,), window)])
    spare = inputs.input_ids.new_zeros(k - 1)
    states = inputs.hidden_states
    if spare_rows:
        states = torch.cat([states, states.new_zeros(spare_rows, states.shape[1])])
    result = FirstPass(
        ids=torch.cat([inputs.input_ids, spare]),
        positions=inputs.position_ids,
        states=states,
        last_rows=lens.cumsum(0) - 1,
    )
    return result if out is None else out.fill(result)


def eagle_first_pass(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    successors: torch.Tensor | None,
    context_lens: torch.Tensor,
    *,
    num_contexts: int,
    num_ctx_tokens: int,
    max_position: int | None,
    kv_lens: torch.Tensor | None = None,
    kv_floor: int | None = None,  # noqa: ARG001
    out: FirstPass | None = None,
) -> FirstPass:
    """The rows of pass 1 of a reused layer, and where pass 2 starts.

    Args:
        accepted_tokens: [R, K+1] int32, negative behind the run. The others: as
            :func:`vanilla_first_pass`. max_position: positions stop here.
        out: takes ids, last rows, next positions and KV lengths; its positions and states are the
            step's own, as :meth:`FirstPass.beside_step` makes it. None: new tensors.

    Raises:
        TensorContractError: ``out`` does not have the sizes of the result.
    """
    if out is not None:
        requests = accepted_tokens.shape[0]
        check_eagle_output(out, positions, hidden_states, kv_lens, requests)
    num_generations, width = accepted_tokens.shape[0] - num_contexts, accepted_tokens.shape[1]
    parts: list[DraftInputs] = []
    ends = context_lens.to(torch.int64).cumsum(0) - 1
    if num_contexts > 0 and successors is not None:
        chunks = slice(0, num_ctx_tokens)
        parts.append(
            draft_inputs.context_rows(
                input_ids[chunks],
                positions[chunks],
                hidden_states[chunks],
                context_lens,
                successors,
            )
        )
    if num_generations > 0:
        rows = slice(num_ctx_tokens, None)
        parts.append(
            draft_inputs.accepted_rows(
                accepted_tokens[num_contexts:], positions[rows], hidden_states[rows]
            )
        )
    inputs = parts[0] if len(parts) == 1 else draft_inputs.concatenate(*parts)
    counts = num_accepted[num_contexts:].to(torch.int64).clamp_min(1)
    generation = torch.arange(num_generations, device=counts.device)
    last_rows = torch.cat([ends, num_ctx_tokens + generation * width + counts - 1])
    next_positions = inputs.position_ids[last_rows] + 1
    if max_position is not None:
        next_positions = next_positions.clamp_max(max_position)
    result = FirstPass(
        inputs.input_ids, inputs.position_ids, inputs.hidden_states, last_rows, next_positions
    )
    if out is None:
        return result
    return out.fill(replace(result, positions=out.positions, states=out.states))

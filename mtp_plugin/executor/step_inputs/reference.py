"""The inputs of generations in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.executor.row_table import StepRows


@dataclass(frozen=True)
class GenerationInputs:
    """The rows of the generations of a step, true lengths included, on the device.

    A generation of L committed tokens feeds K+1 rows at positions L .. L+K.
    """

    input_ids: torch.Tensor  # [G, K+1] int32: last emitted token, then drafts; absent ones are 0
    draft_tokens: torch.Tensor  # [G, K] int32: its columns from 1 on
    positions: torch.Tensor  # [G, K+1] int64, none past the last one of a sequence
    draft_lens: torch.Tensor  # [G] int32: drafts that count
    seq_lens: torch.Tensor  # [G] int32: K+1
    kv_lens: torch.Tensor  # [G] int32: L+K+1
    write_limit: torch.Tensor  # [G] int32: rows at or past it count for nobody
    capacity: torch.Tensor  # [G] int32: KV rows that the request may touch
    state_slot: torch.Tensor  # [G] int64


def generation_inputs(
    rows: StepRows, previous: Any | None, *, draft_len: int, max_seq_len: int
) -> GenerationInputs:
    """From the host where it is up to date, else from the step before.

    A request whose last result is only in the store emitted ``n`` tokens that the host has not
    seen: it is ``n`` tokens longer, and its inputs are those that the store holds. Drafts that find
    no room in the request's KV rows are absent.

    Args:
        rows: of the generations.
        previous: the sampler's store: ``new_tokens`` [>= K+1, S, 1] the next inputs and
            ``new_tokens_lens`` [S], addressed by sequence slot; None: the host knows everything.
        draft_len: K. max_seq_len: tokens that a sequence may hold.
    """
    width = draft_len + 1
    input_ids = rows.tokens[:, :width]
    length = rows.length.to(torch.int64)
    if previous is not None:
        is_late = rows.is_pending > 0
        slot = rows.seq_slot.to(torch.int64)
        device_ids = previous.new_tokens.squeeze(-1).T[slot][:, :width]
        input_ids = torch.where(is_late.unsqueeze(1), device_ids, input_ids)
        length = length + torch.where(is_late, previous.new_tokens_lens[slot], 0)
    room = (rows.capacity - 1 - length).clamp_min(0)
    draft_lens = torch.minimum(rows.draft_limit, room).to(torch.int32)
    columns = torch.arange(width, device=length.device)
    absent = columns > draft_lens.unsqueeze(1)
    input_ids = input_ids.masked_fill(absent, 0).clamp_min(0)
    end = length.to(torch.int32)
    return GenerationInputs(
        input_ids=input_ids,
        draft_tokens=input_ids[:, 1:].contiguous(),
        positions=(length.unsqueeze(1) + columns).clamp_max(max_seq_len - 1),
        draft_lens=draft_lens,
        seq_lens=torch.full_like(end, width),
        kv_lens=end + width,
        write_limit=torch.minimum(end + draft_lens + 1, rows.capacity),
        capacity=rows.capacity.contiguous(),
        state_slot=rows.state_slot.to(torch.int64),
    )

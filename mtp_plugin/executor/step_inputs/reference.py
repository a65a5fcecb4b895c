"""The inputs of generations in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.executor.row_table import StepRows
from mtp_plugin.executor.step_inputs.contract import GenerationInputs, LastResults


def generation_inputs(
    rows: StepRows, previous: LastResults | None, *, draft_len: int, max_seq_len: int
) -> GenerationInputs:
    """As at the door."""
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

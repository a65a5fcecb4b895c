"""The inputs of generations on the device, in one launch: outputs and grid."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.executor.row_table import StepRows
from mtp_plugin.executor.step_inputs.contract import GenerationInputs, LastResults
from mtp_plugin.executor.step_inputs.kernel import generation_inputs_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options


def generation_inputs(
    rows: StepRows, previous: LastResults | None, *, draft_len: int, max_seq_len: int
) -> GenerationInputs:
    """As at the door, in one launch."""
    expect_reachable(generation_inputs_kernel, "rows", rows.tokens)
    count, width = rows.tokens.shape[0], draft_len + 1
    int32: dict[str, Any] = {"dtype": torch.int32, "device": rows.tokens.device}
    int64: dict[str, Any] = {"dtype": torch.int64, "device": rows.tokens.device}
    inputs = GenerationInputs(
        input_ids=torch.empty(count, width, **int32),
        draft_tokens=torch.empty(count, draft_len, **int32),
        positions=torch.empty(count, width, **int64),
        draft_lens=torch.empty(count, **int32),
        seq_lens=torch.empty(count, **int32),
        kv_lens=torch.empty(count, **int32),
        write_limit=torch.empty(count, **int32),
        capacity=torch.empty(count, **int32),
        state_slot=torch.empty(count, **int64),
    )
    following = inputs.input_ids if previous is None else previous.new_tokens
    emitted = inputs.draft_lens if previous is None else previous.new_tokens_lens
    if count:
        generation_inputs_kernel[(count,)](
            rows.tokens,
            rows.length,
            rows.draft_limit,
            rows.capacity,
            rows.is_pending,
            rows.seq_slot,
            rows.state_slot,
            following,
            emitted,
            inputs.input_ids,
            inputs.draft_tokens,
            inputs.positions,
            inputs.draft_lens,
            inputs.seq_lens,
            inputs.kv_lens,
            inputs.write_limit,
            inputs.capacity,
            inputs.state_slot,
            rows.tokens.stride(0),
            following.stride(0),
            following.stride(1),
            emitted.stride(0),
            max_seq_len - 1,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            HAS_STORE=previous is not None,
            num_warps=1,
            **pdl_options(rows.tokens.device),
        )
    return inputs

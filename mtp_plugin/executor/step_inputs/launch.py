"""Outputs and grid of the inputs of generations: one launch for a step."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.executor.row_table import StepRows
from mtp_plugin.executor.step_inputs.kernel import generation_inputs_kernel
from mtp_plugin.executor.step_inputs.reference import GenerationInputs
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options


def generation_inputs(
    rows: StepRows, previous: Any | None, *, draft_len: int, max_seq_len: int
) -> GenerationInputs:
    """As the reference, in one launch.

    Raises:
        TensorContractError: rows that are not columns of one table, or too narrow.
    """
    expect_reachable(generation_inputs_kernel, "rows", rows.tokens)
    count, width = rows.tokens.shape[0], draft_len + 1
    stride = rows.tokens.stride(0)
    columns = (
        rows.length,
        rows.draft_limit,
        rows.capacity,
        rows.is_pending,
        rows.seq_slot,
        rows.state_slot,
    )
    expect(
        rows.tokens.shape[1] >= width and all(column.stride(0) == stride for column in columns),
        TensorContractError,
        f"step rows: expected columns of one table with at least {width} tokens, got "
        f"{list(rows.tokens.shape)} tokens and strides "
        f"{[column.stride(0) for column in (rows.tokens, *columns)]}",
    )
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
            *columns,
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
            stride,
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

"""What a first pass may be handed to write to, and the checks at its door."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.kernels.checks import expect_output
from mtp_plugin.speculative.step import FirstPass


def check_vanilla_output(
    out: FirstPass,
    hidden_states: torch.Tensor,
    kv_lens: torch.Tensor | None,
    *,
    requests: int,
    num_contexts: int,
    num_ctx_tokens: int,
    num_history_rows: int,
    max_draft_len: int,
    window: int,
    step_rows: int,
    spare_rows: int,
) -> bool:
    """Check ``out`` for a first pass over K layers; whether its states are the step's own.

    They may be, from the step's first row on, where every row of the result lies where the step's
    row does: no history rows, and windows of as many rows as the step has per generation.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    generation_rows = (requests - num_contexts) * window
    num_rows = num_ctx_tokens + num_history_rows + generation_rows
    shape = (num_rows + spare_rows, hidden_states.shape[1])
    device = hidden_states.device
    expect_output("first pass, ids", out.ids, (num_rows + max_draft_len - 1,), torch.int32, device)
    expect_output("first pass, positions", out.positions, (num_rows,), torch.int64, device)
    expect_output("first pass, states", out.states, shape, hidden_states.dtype, device)
    expect_output("first pass, last_rows", out.last_rows, (requests,), torch.int64, device)
    _check_kv_lens(out, kv_lens)
    if not _overlap(out.states, hidden_states):
        return False
    expect(
        out.states.data_ptr() == hidden_states.data_ptr()
        and (hidden_states.is_contiguous() or hidden_states.shape[0] == 1),
        TensorContractError,
        "first pass, states: expected memory of their own, or the step's states from the first row "
        "on; got some that overlap them elsewhere",
    )
    expect(
        num_history_rows == 0 and (generation_rows == 0 or window == step_rows),
        TensorContractError,
        "first pass, states: the step's own can stay in place only without history rows and with "
        f"windows of the step's {step_rows} rows, got {num_history_rows} history rows and windows "
        f"of {window}",
    )
    return True


def check_eagle_output(
    out: FirstPass,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    kv_lens: torch.Tensor | None,
    requests: int,
) -> None:
    """Check ``out`` for the first pass of a reused layer, see :meth:`FirstPass.beside_step`.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    device = hidden_states.device
    for name, own, given in (
        ("positions", positions, out.positions),
        ("states", hidden_states, out.states),
    ):
        same = own.data_ptr() == given.data_ptr() and own.stride() == given.stride()
        expect(
            same and own.shape == given.shape and own.dtype == given.dtype,
            TensorContractError,
            f"first pass, {name}: expected the step's own, which a reused layer reads, got another "
            f"tensor of {given.dtype} {list(given.shape)}",
        )
    num_rows = positions.shape[0]
    expect_output("first pass, ids", out.ids, (num_rows,), torch.int32, device)
    expect_output("first pass, last_rows", out.last_rows, (requests,), torch.int64, device)
    expect_output(
        "first pass, next_positions", out.next_positions, (requests,), torch.int64, device
    )
    _check_kv_lens(out, kv_lens)


def _check_kv_lens(out: FirstPass, kv_lens: torch.Tensor | None) -> None:
    if out.kv_lens is None:
        return
    if kv_lens is None:
        raise TensorContractError(
            "first pass, kv_lens: expected None where the step has no KV lengths, got "
            f"{out.kv_lens.dtype} {list(out.kv_lens.shape)}"
        )
    shape = tuple(kv_lens.shape)
    expect_output("first pass, kv_lens", out.kv_lens, shape, kv_lens.dtype, kv_lens.device)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without negative strides have bytes between the same addresses."""
    if one.numel() == 0 or other.numel() == 0:
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr() + (last + 1) * tensor.element_size())

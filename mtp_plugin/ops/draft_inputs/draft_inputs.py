"""Advance the history of requests, and build the inputs of the first draft pass.

S sequence slots, R requests of a step (C contexts, then G generations), T flat rows, H hidden size.
K is that of the pools; a step verifies that many drafts or fewer.
"""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, SIGNED, AtLeast, expect_tensor
from mtp_plugin.ops.draft_inputs.draft_inputs_reference import (
    advance_and_build_inputs_reference,
    advance_history_reference,
    build_reused_inputs_reference,
)
from mtp_plugin.ops.draft_inputs.types import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
)
from mtp_plugin.ops.step import DrafterInputs, StepLayout


def advance_history(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    *,
    backend: Backend,
) -> None:
    """Set every request's pool row to the last K pairs before its bonus token, in place.

    A generation keeps entries [n, n+K) of its K pool pairs followed by this step's inputs and
    states; a context keeps the last K pairs of pool and chunk. With K = 3, pool ``a b c``, inputs
    ``t u v w`` and n = 3 the pool becomes ``t u v``.

    Args:
        layout: of the step; its positions are not read.
        history: the pools, written in the rows of the step's slots.
        rows: the verified inputs, and the target's states of them, with contiguous rows.
        num_accepted: [R] integer, any stride, read for generations: output tokens n, 0 to K+1.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    _check_history(layout, history, rows, num_accepted)
    backend.dispatch(advance_history_reference)(layout, history, rows, num_accepted)


def advance_and_build_inputs(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    windows: DraftWindows,
    *,
    kv: DraftKVLengths | None = None,
    backend: Backend | str = "auto",
) -> DrafterInputs:
    """Build the rows of depth 1 over K layers, then advance the pools by this step.

    A context feeds ``history_lens`` pairs of its pool row, then its chunk, each state with the
    token that follows it. A generation feeds the ``window`` pairs that end at its last accepted
    position. With K = 3, pool ``q r s``, inputs ``t u v w``, n = 2 and the bonus ``x``, a window of
    4 holds the states of ``r s t u`` with the tokens ``s t u x``. Rows at negative positions are
    dead: their ids and positions are 0.

    Args:
        layout: of the step, with positions.
        history, num_accepted: as in :func:`advance_history`.
        rows: as in :func:`advance_history`, with ``successors`` if there are contexts.
        last_tokens: [R] integer, any stride, read for generations: the last output token, 0 if
            there is none.
        windows: rows of each request, within the pools.
        kv: KV lengths of the host engine. Those of the result are the same for contexts; for
            generations less the step's rows, plus n, and at least the floor.

    Returns:
        The inputs of the first pass. Elements after the last row in ``ids`` and ``states``, and
        from R on in ``kv_lens``, are unspecified. ``states`` may be the step's own if nothing is
        written to them, or if they may be overwritten.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, windows that do not
            fit the pools, or a layout without positions.

    Source: MTP modules of DeepSeek-V3 (2024); TensorRT-LLM, ``MTPWorker.prepare_drafter_inputs``.
    """
    device = _check_history(layout, history, rows, num_accepted)
    _check_positions(layout, "advance_and_build_inputs", device)
    requests = (layout.num_requests,)
    expect_tensor("last_tokens", last_tokens, dtype=INTEGERS, shape=requests, device=device)
    _check_successors(layout, rows, device)
    _check_windows(layout, history.max_draft_len, windows)
    _check_kv(layout, kv, device)
    backend = Backend.of(backend, device, "backend")
    return backend.dispatch(advance_and_build_inputs_reference)(
        layout, history, rows, num_accepted, last_tokens, windows, kv
    )


def build_reused_inputs(
    layout: StepLayout,
    rows: TargetRows,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    max_position: int | None,
    kv: DraftKVLengths | None = None,
    backend: Backend | str = "auto",
) -> DrafterInputs:
    """Build the rows of pass 1 of a reused layer, and the positions of pass 2.

    The rows are the step's own states and positions, each with the token that follows it. Inputs
    ``t u v w`` with output ``u v x`` are fed as ``u v x x``; results of rows after the last output
    token are not used.

    Args:
        layout: of the step, with positions.
        rows: as in :func:`advance_history`, of any stride, with ``successors`` if there are
            contexts.
        accepted_tokens: [R, K+1] signed integer, any strides, K that of the step, negative after
            the last output token; read for generations.
        num_accepted: [R] integer, any stride, read for generations: output tokens, 0 to K+1.
        max_position: upper limit of the positions of pass 2.
        kv: KV lengths of the host engine. Those of the result are those of pass 2: one more for
            contexts; for generations less K, plus their output tokens, and at least the floor.

    Returns:
        The inputs of the first pass with ``next_positions``; positions and states are the step's
        own. Elements from R on in ``kv_lens`` are unspecified.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or a layout without
            positions.

    Source: TensorRT-LLM, ``MTPEagleWorker.prepare_drafter_inputs``.
    """
    device = _check_rows(layout, rows)
    _check_positions(layout, "build_reused_inputs", device)
    requests, width = layout.num_requests, layout.step_rows
    shape = (requests, width)
    expect_tensor("accepted_tokens", accepted_tokens, dtype=SIGNED, shape=shape, device=device)
    expect_tensor("num_accepted", num_accepted, dtype=INTEGERS, shape=(requests,), device=device)
    _check_successors(layout, rows, device)
    _check_kv(layout, kv, device)
    backend = Backend.of(backend, device, "backend")
    return backend.dispatch(build_reused_inputs_reference)(
        layout, rows, accepted_tokens, num_accepted, max_position, kv
    )


def _check_rows(layout: StepLayout, rows: TargetRows) -> torch.device:
    """Return the device that everything must be on."""
    size = layout.num_tokens
    states = expect_tensor(
        "rows.hidden_states", rows.hidden_states, dtype=FLOATS, shape=(size, "H")
    )
    device = states.device
    expect_tensor("rows.input_ids", rows.input_ids, dtype=INTEGERS, shape=(size,), device=device)
    if layout.num_contexts:
        expect_tensor("step, context_lens", layout.context_lens, dtype=INTEGERS, device=device)
    return device


def _check_history(
    layout: StepLayout, history: History, rows: TargetRows, num_accepted: torch.Tensor
) -> torch.device:
    """Return the device that everything must be on."""
    device = _check_rows(layout, rows)
    expect_tensor("rows.hidden_states", rows.hidden_states, contiguous="rows")
    slots = AtLeast(1) if layout.num_requests else "S"
    tokens = expect_tensor(
        "history.tokens",
        history.tokens,
        dtype=torch.int32,
        shape=(slots, AtLeast(max(layout.draft_len, 1))),
        device=device,
        contiguous=True,
    )
    expect_tensor(
        "history.states",
        history.states,
        dtype=FLOATS,
        shape=(slots, int(tokens.shape[1]), int(rows.hidden_states.shape[1])),
        device=device,
        contiguous=True,
    )
    requests = (layout.num_requests,)
    for name, tensor in (("history.slot_ids", history.slot_ids), ("num_accepted", num_accepted)):
        expect_tensor(name, tensor, dtype=INTEGERS, shape=requests, device=device)
    return device


def _check_positions(layout: StepLayout, reader: str, device: torch.device) -> None:
    positions = layout.expect_positions(reader)
    expect_tensor("step, positions", positions, dtype=INTEGERS, device=device)


def _check_windows(layout: StepLayout, max_draft_len: int, windows: DraftWindows) -> None:
    expect_int("window", windows.window, 1, max_draft_len + 1)
    if len(windows.history_lens) != layout.num_contexts:
        raise TensorContractError(
            f"history_lens: expected one per context ({layout.num_contexts}), got "
            f"{list(windows.history_lens)}"
        )
    for count in windows.history_lens:
        expect_int("history_lens", count, 0, max_draft_len)
    expect_int("spare_rows", windows.spare_rows, 0)


def _check_successors(layout: StepLayout, rows: TargetRows, device: torch.device) -> None:
    if rows.successors is not None or layout.num_contexts:
        expect_tensor(
            "rows.successors",
            rows.successors,
            dtype=INTEGERS,
            shape=(layout.num_contexts,),
            device=device,
        )


def _check_kv(layout: StepLayout, kv: DraftKVLengths | None, device: torch.device) -> None:
    if kv is not None:
        requests = AtLeast(layout.num_requests)
        expect_tensor("kv.lens", kv.lens, dtype=INTEGERS, shape=(requests,), device=device)

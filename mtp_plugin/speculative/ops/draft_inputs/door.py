"""The doors of history and draft inputs.

S sequence slots, R requests of a step (C contexts, then G generations), T flat rows, H hidden size.
K is that of the pools; a step verifies that many drafts or fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers
from mtp_plugin.speculative.ops.draft_inputs import reference
from mtp_plugin.speculative.ops.draft_inputs.contract import (
    DraftKVLengths,
    History,
    TargetRows,
    check_accepted,
    check_history,
    check_kv,
    check_rows,
    check_successors,
    check_windows,
)
from mtp_plugin.speculative.step import DrafterInputs, StepLayout


def advance_history(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    *,
    backend: Backend,
) -> None:
    """Move every request's pool row to the last K pairs before its bonus token, in place.

    A generation keeps entries [n, n+K) of its K pool pairs followed by this step's inputs and
    states; a context keeps the last K pairs of pool and chunk. With K = 3, pool ``a b c``, inputs
    ``t u v w`` and n = 3 the pool becomes ``t u v``.

    Args:
        layout: of the step; its positions are not read.
        history: the pools, written in the rows of the step's slots.
        rows: the verified inputs, and the target's states of them, whose rows have no gaps.
        num_accepted: [R] int32, any stride, read for generations: emitted tokens n, 0 to K+1.

    Raises:
        TensorContractError: a tensor of another shape, dtype, stride or device.
    """
    check_history(layout, history, rows, num_accepted)
    _side(backend).advance_history(layout, history, rows, num_accepted)


def advance_and_build_inputs(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    successors: torch.Tensor | None,
    *,
    window: int,
    history_lens: Sequence[int],
    spare_rows: int = 0,
    kv: DraftKVLengths | None = None,
    may_overwrite_states: bool = False,
    backend: Backend,
) -> DrafterInputs:
    """The rows of depth 1 over K layers; then the pools are moved on by this step.

    A context feeds ``history_lens`` pairs of its pool row, then its chunk, each state with the
    token behind it. A generation feeds the ``window`` pairs that end at its last accepted position.
    With K = 3, pool ``q r s``, inputs ``t u v w``, n = 2 and the bonus ``x``, a window of 4 holds
    the states of ``r s t u`` with the tokens ``s t u x``. Rows at negative positions are dead:
    their ids and positions are 0.

    Args:
        layout: of the step, with positions.
        history, rows, num_accepted: as :func:`advance_history`.
        last_tokens: [R] int32, any stride: emitted last, 0 where nothing was; read for generations.
        successors: [C] int32, any stride: the token behind each chunk; None without contexts.
        window: rows per generation, at most K+1.
        history_lens: [C] on the host: history rows in front of each chunk, at most K.
        spare_rows: rows of states behind the last one, for windows that move by an offset.
        kv: the host's KV lengths, for the result's: those of contexts as they are, those of
            generations less the step's rows, plus n, and at least the floor.
        may_overwrite_states: nobody reads the step's states any more. The result's may then lie
            where they lie.

    Returns:
        The first pass; what stands behind the last row, in ``ids`` and ``states``, and behind R in
        ``kv_lens``, may be anything. ``states`` may be the step's own where nothing is written
        to them, or where they may be overwritten.

    Raises:
        TensorContractError: a tensor of another shape, dtype, stride or device, a step without
            positions, or more rows than history and step have.
    """
    positions = layout.expect_positions("advance_and_build_inputs")
    device = check_history(layout, history, rows, num_accepted)
    expect_integers("step, positions", positions, layout.num_tokens, device)
    expect_integers("last_tokens", last_tokens, layout.num_requests, device)
    check_successors(layout, successors, device)
    check_windows(layout, history.max_draft_len, window, history_lens, spare_rows)
    if kv is not None:
        check_kv(layout, kv, device)
    return _side(backend).advance_and_build_inputs(
        layout,
        history,
        rows,
        num_accepted,
        last_tokens,
        successors,
        positions=positions,
        window=window,
        history_lens=history_lens,
        spare_rows=spare_rows,
        kv=kv,
        may_overwrite_states=may_overwrite_states,
    )


def build_reused_inputs(
    layout: StepLayout,
    rows: TargetRows,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    successors: torch.Tensor | None,
    *,
    max_position: int | None,
    kv: DraftKVLengths | None = None,
    backend: Backend,
) -> DrafterInputs:
    """The rows of pass 1 of a reused layer, and where pass 2 starts.

    The step's own states and positions, each with the token behind it. Inputs ``t u v w`` that
    emitted ``u v x`` are fed as ``u v x x``; nobody reads what becomes of columns behind the run.

    Args:
        layout: of the step, with positions.
        rows: as :func:`advance_history`, of any stride.
        accepted_tokens: [R, K+1] int32, any strides, K that of the step; negative behind the run;
            read for generations.
        num_accepted: [R] int32, any stride, read for generations: emitted tokens, 0 to K+1.
        successors: [C] int32, any stride: the token behind each chunk; None without contexts.
        max_position: positions of pass 2 stop here; None: nowhere.
        kv: the host's KV lengths, for the result's, which are those of pass 2: one more for a
            context, for a generation less K, plus its emitted tokens, and at least the floor.

    Returns:
        The first pass with ``next_positions``; its positions and states are the step's own. What
        stands behind R in ``kv_lens`` may be anything.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device, or a step without
            positions.
    """
    positions = layout.expect_positions("build_reused_inputs")
    device = check_rows(layout, rows)
    expect_integers("step, positions", positions, layout.num_tokens, device)
    check_accepted(layout, accepted_tokens, device)
    expect_integers("num_accepted", num_accepted, layout.num_requests, device)
    check_successors(layout, successors, device)
    if kv is not None:
        check_kv(layout, kv, device)
    return _side(backend).build_reused_inputs(
        layout,
        rows,
        accepted_tokens,
        num_accepted,
        successors,
        positions=positions,
        max_position=max_position,
        kv=kv,
    )


class _Side(Protocol):
    def advance_history(
        self,
        layout: StepLayout,
        history: History,
        rows: TargetRows,
        num_accepted: torch.Tensor,
    ) -> None: ...

    def advance_and_build_inputs(
        self,
        layout: StepLayout,
        history: History,
        rows: TargetRows,
        num_accepted: torch.Tensor,
        last_tokens: torch.Tensor,
        successors: torch.Tensor | None,
        *,
        positions: torch.Tensor,
        window: int,
        history_lens: Sequence[int],
        spare_rows: int,
        kv: DraftKVLengths | None,
        may_overwrite_states: bool,
    ) -> DrafterInputs: ...

    def build_reused_inputs(
        self,
        layout: StepLayout,
        rows: TargetRows,
        accepted_tokens: torch.Tensor,
        num_accepted: torch.Tensor,
        successors: torch.Tensor | None,
        *,
        positions: torch.Tensor,
        max_position: int | None,
        kv: DraftKVLengths | None,
    ) -> DrafterInputs: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.draft_inputs import launch

    return launch

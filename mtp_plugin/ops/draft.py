"""Write the drafts of one pass of the draft loop, and prepare the next pass.

R rows of logits, one per request, and V columns; T' rows of a pass, H values of a hidden state.
"""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.logit_rows import (
    LogitRows,
    ThinkingRule,
    ThinkingState,
    process_logits,
    update_draft_mask,
)
from mtp_plugin.ops.step import DraftOutput, SlotRows, check_slots, expect_vocab


def propose(logits: torch.Tensor, output: DraftOutput, *, backend: Backend) -> None:
    """Write the argmax of each row of logits as its draft.

    Args:
        logits: [R, V] floating, rows of any stride; with ``output.vocab_ids`` those of a reduced
            vocabulary, whose columns are translated to token ids.
        output: results with contiguous rows, of which only the output's columns are written, and
            contiguous vectors; ``last_rows`` may have any stride.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    requests = _check_logits(logits)
    if output.vocab_ids is not None:
        expect_vocab(logits, output.vocab_ids)
    _check_output(output, requests)
    if requests > 0:
        backend.dispatch(propose_reference)(logits, output)


def propose_processed(
    logits: torch.Tensor,
    output: DraftOutput,
    rows: LogitRows,
    slots: SlotRows,
    following: LogitRows | None = None,
    thinking: ThinkingRule | None = None,
    *,
    backend: Backend,
) -> None:
    """As :func:`propose`, after logits processing: bias, allowed tokens and penalties.

    Tokens of a forced end of thinking replace the argmax. Takes as many launches as `propose`.

    Args:
        logits, output: as in :func:`propose`.
        rows: of the logits, one per request, with int32 drafts that are those of the output.
        slots: of the R requests; with ``draft_mask``, drafts are none of the disallowed tokens.
        following, thinking: as in :func:`write_drafts`.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    rows.check_logits(logits)
    if output.vocab_ids is not None:
        expect_vocab(logits, output.vocab_ids)
    requests = int(logits.shape[0])
    _check_output(output, requests)
    _check_rows("rows", rows, output, output.column)
    following = _checked_following(following, output, slots, thinking, logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1] if output.vocab_ids is None else None)
    if requests > 0:
        backend.dispatch(propose_processed_reference)(
            logits, output, rows, slots, following, thinking
        )


def write_drafts(
    drafts: torch.Tensor,
    output: DraftOutput,
    following: LogitRows | None = None,
    slots: SlotRows | None = None,
    thinking: ThinkingRule | None = None,
    *,
    backend: Backend,
) -> None:
    """Write sampled drafts; tokens of a forced end of thinking replace them.

    Args:
        drafts: [R] int32, any stride: ids of the whole vocabulary; -1, of a row without one, is
            written as 0.
        output: as in :func:`propose`; its ``vocab_ids`` are not read.
        following: the rows that propose the next drafts, with int32 drafts that are those of the
            output. ``slots.draft_mask`` is updated to mask the tokens disallowed in these rows.
            None: no draft follows.
        slots: of the R requests; None: no draft is masked or forced.
        thinking: thinking budgets, which need slots and int32 drafts that are those of the output.
            None: no request has a budget.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    expect_tensor("drafts", drafts, dtype=torch.int32, shape=("R",))
    _check_output(output, int(drafts.shape[0]))
    if slots is None:
        following = thinking = None
    else:
        following = _checked_following(following, output, slots, thinking, drafts.device)
    if drafts.shape[0] > 0:
        backend.dispatch(write_drafts_reference)(drafts, output, following, slots, thinking)


def draft_argmax(logits: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """Return the argmax of each row [R] int32: the lowest id on ties, NaN as -inf.

    Args:
        logits: [R, V] floating, rows of any stride.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    if _check_logits(logits) == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    return backend.dispatch(draft_argmax_reference)(logits)


def shift_state_window(
    states: torch.Tensor,
    outputs: torch.Tensor,
    last_rows: torch.Tensor,
    offset: int,
    *,
    backend: Backend,
) -> None:
    """Shift the window of hidden states of every sequence by one, in a buffer with spare rows.

    The previous pass read rows [offset - 1, ...), the next one reads rows [offset, ...). Only the
    last row of each sequence is new there: the last output of the previous pass. All of them are
    read before any is written, since a layer may return its input.

    Args:
        states: [T' + K-1, H] of any dtype, written in place.
        outputs: [T', H], possibly a view of ``states``.
        last_rows: [R] integer, ascending, as those of consecutive sequences.
        offset: number of passes done.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    expect_tensor("states", states, shape=("T' + K-1", "H"))
    expect_tensor("outputs", outputs, shape=("T'", int(states.shape[1])))
    expect_tensor("last_rows", last_rows, dtype=INTEGERS, shape=("R",))
    expect_int("offset", offset, 0)
    if last_rows.shape[0] > 0 and states.shape[1] > 0:
        backend.dispatch(shift_state_window_reference)(states, outputs, last_rows, offset)


def propose_reference(logits: torch.Tensor, output: DraftOutput) -> None:
    output.write(_argmax_ids(logits, output))


def propose_processed_reference(
    logits: torch.Tensor,
    output: DraftOutput,
    rows: LogitRows,
    slots: SlotRows,
    following: LogitRows | None,
    thinking: ThinkingRule | None,
) -> None:
    values = process_logits(logits, rows, slots.for_drafts(), vocab_ids=output.vocab_ids)
    drafts = _argmax_ids(values, output)
    write_drafts_reference(drafts, output, following, slots, thinking)


def write_drafts_reference(
    drafts: torch.Tensor,
    output: DraftOutput,
    following: LogitRows | None,
    slots: SlotRows | None,
    thinking: ThinkingRule | None,
) -> None:
    drafts = drafts.clamp_min(0)
    if thinking is not None and slots is not None:
        state = ThinkingState.read(slots, slice(0, drafts.shape[0]))
        for column in range(output.column):
            token = output.drafts[:, column].to(torch.int64)
            state = state.after(token, state.budget >= 0, thinking)
        forced = torch.where(state.budget >= 0, state.forced(thinking), -1)
        drafts = torch.where(forced >= 0, forced, drafts)
    output.write(drafts)
    if following is not None and slots is not None:
        update_draft_mask(following, slots)


def draft_argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.isnan(logits), -torch.inf).argmax(dim=-1).to(torch.int32)


def shift_state_window_reference(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    last = outputs[last_rows]
    states[last_rows + offset] = last.to(states.dtype)


def _argmax_ids(logits: torch.Tensor, output: DraftOutput) -> torch.Tensor:
    columns = draft_argmax_reference(logits)
    return columns if output.vocab_ids is None else output.vocab_ids.index_select(0, columns)


def _check_logits(logits: torch.Tensor) -> int:
    """Return R."""
    shape = "R", AtLeast(1)
    expect_tensor("logits", logits, dtype=FLOATS, shape=shape)
    if logits.shape[0]:
        expect_tensor("logits", logits, contiguous="rows")
    return int(logits.shape[0])


def _check_output(output: DraftOutput, requests: int) -> None:
    """Check that every tensor of the output has room for the drafts of so many requests."""
    column = output.column
    for name, tensor, width in (
        ("drafts", output.drafts, column + 1),
        ("next_tokens", output.next_tokens, column + 2),
    ):
        shape = (requests, AtLeast(width))
        expect_tensor(name, tensor, dtype=torch.int32, shape=shape, contiguous="rows")
    expect_int("column", column, 0)
    if output.shifted_ids is not None:
        _check_vector("shifted_ids", output.shifted_ids, AtLeast(column + 1))
        expect_tensor("last_rows", output.last_rows, shape=(requests,))
    if output.positions is not None:
        _check_vector("positions", output.positions, requests)
        if output.kv_lens is not None:
            _check_vector("kv_lens", output.kv_lens, AtLeast(requests))


def _check_vector(name: str, tensor: torch.Tensor, size: int | AtLeast) -> None:
    expect_tensor(name, tensor, dtype=INTEGERS, shape=(size,), contiguous=True)


def _checked_following(
    following: LogitRows | None,
    output: DraftOutput,
    slots: SlotRows,
    thinking: ThinkingRule | None,
    device: torch.device,
) -> LogitRows | None:
    """Check the slots, the thinking rule and ``following``; None if nothing is masked there."""
    check_slots(slots, int(output.drafts.shape[0]), device)
    if following is not None and slots.pools is not None and slots.draft_mask is not None:
        _check_rows("following rows", following, output, output.column + 1)
        slots.pools.check(output.drafts.device)
        slots.draft_mask.check(slots.pools)
    else:
        following = None
    if thinking is not None:
        thinking.check(device)
    return following


def _check_rows(name: str, rows: LogitRows, output: DraftOutput, column: int) -> None:
    """Check that the rows are one per request, of this column."""
    rows.check(output.drafts.device)
    expected = int(output.drafts.shape[0])
    if (rows.num_rows, rows.width, rows.column) != (expected, 1, column):
        raise TensorContractError(
            f"{name}: expected {expected} of width 1 and column {column}, got {rows.num_rows} of "
            f"width {rows.width} and column {rows.column}"
        )

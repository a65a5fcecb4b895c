"""The doors of what happens between two passes of the draft loop.

R rows of logits, one per request, and V columns; T' rows of a pass, H values of a state.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import is_integral
from mtp_plugin.speculative.logit_rows import DrawnRows, ThinkingRule
from mtp_plugin.speculative.ops.draft import reference
from mtp_plugin.speculative.step import DraftOutput, SlotRows, check_slots, expect_vocab


def propose(logits: torch.Tensor, place: DraftOutput, *, backend: Backend) -> None:
    """The draft of each row of logits, written to every place that reads it.

    Where the place has ``vocab_ids``, the logits are those of a cut vocabulary and a draft is the
    id of its column: columns of ``b d`` propose ``d`` where the second is the highest.

    Args:
        logits: [R, V] floats, rows of any stride.
        place: results with contiguous rows, of which only the place's columns are written, and
            contiguous vectors, written where the draft goes; ``last_rows`` may have any stride.

    Raises:
        TensorContractError: logits or tensors of the place that have other shapes or strides, or
            logits whose columns are not one per id of ``vocab_ids``.
    """
    if place.vocab_ids is not None:
        expect_vocab(logits, place.vocab_ids)
    rows, _ = _check_logits(logits, least=1)
    _check_place(place, rows)
    if rows > 0:
        _side(backend).propose(logits, place)


def propose_edited(
    logits: torch.Tensor,
    place: DraftOutput,
    rows: DrawnRows,
    slots: SlotRows,
    behind: DrawnRows | None = None,
    thinking: ThinkingRule | None = None,
    *,
    backend: Backend,
) -> None:
    """As :func:`propose`, of logits behind bias, allowed ids and penalties of the requests' slots,
    where the end of thinking must come its ids instead; in as many launches.

    Args:
        rows: of the logits, one per request, whose int32 drafts are the place's.
        slots: of the R requests; with ``bans``, ids that drafts must not be are none of them.
        behind, thinking: as :func:`place_drafts`.

    Raises:
        TensorContractError: as :func:`propose` and :func:`place_drafts`.
    """
    if place.vocab_ids is not None:
        expect_vocab(logits, place.vocab_ids)
    rows.check_logits(logits)
    _check_place(place, int(logits.shape[0]))
    _check_one_each("rows", rows, place, place.column)
    behind = _checked_behind(behind, place, slots, thinking, logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1] if place.vocab_ids is None else None)
    if logits.shape[0] > 0:
        _side(backend).propose_edited(logits, place, rows, slots, behind, thinking)


def place_drafts(
    drafts: torch.Tensor,
    place: DraftOutput,
    behind: DrawnRows | None = None,
    slots: SlotRows | None = None,
    thinking: ThinkingRule | None = None,
    *,
    backend: Backend,
) -> None:
    """Drafts that were drawn, written to every place that reads them; where the end of thinking
    must come, its ids instead.

    Args:
        drafts: [R] int32, any stride: ids of the whole vocabulary; -1, of a row that had none,
            counts as 0.
        place: as :func:`propose`; its ``vocab_ids`` are not read.
        behind: the rows that propose the drafts behind these, of int32 drafts that are the place's.
            Ids that must not come there are taken out of those that slots' ``bans`` let drafts be.
            None: no draft follows.
        slots: of the R requests; None: nobody keeps drafts from anything.
        thinking: what budgets go by, beside slots and int32 drafts in front that are the place's.
            None: no request has one.

    Raises:
        TensorContractError: drafts or tensors of the place that have other shapes, types or
            strides.
    """
    if drafts.dim() != 1 or drafts.dtype != torch.int32:
        raise TensorContractError(
            f"drafts: expected torch.int32 [R], got {drafts.dtype} {list(drafts.shape)}"
        )
    _check_place(place, drafts.shape[0])
    if slots is None:
        behind = thinking = None
    else:
        behind = _checked_behind(behind, place, slots, thinking, drafts.device)
    if drafts.shape[0] > 0:
        _side(backend).place_drafts(drafts, place, behind, slots, thinking)


def draft_argmax(logits: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """The draft of each row [R] int32: highest value, lowest id on ties, NaN as -inf.

    Args:
        logits: [R, V] floats, rows of any stride.

    Raises:
        TensorContractError: logits of another shape or type, or with gaps between the columns.
    """
    rows, _ = _check_logits(logits, least=1)
    if rows == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    return _side(backend).draft_argmax(logits)


def local_top1(
    logits: torch.Tensor, first_id: int, num_ids: int, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's best (value, global id) of each row, for a vocabulary split over ranks.

    Args:
        logits: [R, V_local] floats, rows of any stride: this rank's columns; those at or past
            ``num_ids`` are padding and are never read.
        first_id: global id of the first column. num_ids: real columns of this rank.

    Returns:
        values [R] float32 and ids [R] int32; ties go to the lowest id, a rank without columns gives
        -inf.

    Raises:
        TensorContractError: logits as for :func:`draft_argmax`, or fewer columns than ``num_ids``.
    """
    rows, width = _check_logits(logits, least=0)
    if not 0 <= num_ids <= width:
        raise TensorContractError(
            f"num_ids: expected 0..{width}, of the columns of the logits, got {num_ids}"
        )
    if rows == 0 or num_ids == 0:
        return (
            torch.full((rows,), -torch.inf, dtype=torch.float32, device=logits.device),
            torch.full((rows,), first_id, dtype=torch.int32, device=logits.device),
        )
    return _side(backend).local_top1(logits, first_id, num_ids)


def merge_top1(values: torch.Tensor, ids: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """The drafts of a split vocabulary [R] int32: highest value over ranks, lowest id on ties.

    Args:
        values: [ranks, R] float32, ids: [ranks, R] int32, any strides: every rank's
            :func:`local_top1`.

    Raises:
        TensorContractError: values or ids of other shapes, types or devices.
    """
    if values.dim() != 2 or values.shape[0] == 0 or values.dtype != torch.float32:
        raise TensorContractError(
            f"values: expected torch.float32 [ranks, R] of at least one rank, got {values.dtype} "
            f"{list(values.shape)}"
        )
    if ids.shape != values.shape or ids.dtype != torch.int32 or ids.device != values.device:
        raise TensorContractError(
            f"ids: expected torch.int32 {list(values.shape)} on {values.device}, got {ids.dtype} "
            f"{list(ids.shape)} on {ids.device}"
        )
    if values.shape[1] == 0:
        return torch.empty(0, dtype=torch.int32, device=values.device)
    return _side(backend).merge_top1(values, ids)


def place_last_states(
    states: torch.Tensor,
    outputs: torch.Tensor,
    last_rows: torch.Tensor,
    offset: int,
    *,
    backend: Backend,
) -> None:
    """Move every sequence's state window on by one: an offset into a buffer with spare rows.

    The pass before read rows [offset - 1, ...); the next one reads rows [offset, ...), in which
    only the last row of each sequence is new: the pass's last output. All of them are read before
    any is written, since a layer may return its input.

    Args:
        states: [T' + K-1, H], written in place. outputs: [T', H], possibly a view of ``states``.
        last_rows: [R] int64, rising, as those of sequences that lie one behind the other.
        offset: passes done.

    Raises:
        TensorContractError: states, outputs or rows of shapes that do not fit.
    """
    if states.dim() != 2 or outputs.dim() != 2 or states.shape[1] != outputs.shape[1]:
        raise TensorContractError(
            f"outputs: expected [T', H] for states {list(states.shape)}, got {list(outputs.shape)}"
        )
    if last_rows.dim() != 1 or not is_integral(last_rows):
        raise TensorContractError(
            f"last_rows: expected a vector of integers, got {last_rows.dtype} "
            f"{list(last_rows.shape)}"
        )
    if last_rows.shape[0] > 0 and states.shape[1] > 0:
        _side(backend).place_last_states(states, outputs, last_rows, offset)


class _Side(Protocol):
    def propose(self, logits: torch.Tensor, place: DraftOutput) -> None: ...

    def propose_edited(
        self,
        logits: torch.Tensor,
        place: DraftOutput,
        rows: DrawnRows,
        slots: SlotRows,
        behind: DrawnRows | None,
        thinking: ThinkingRule | None,
    ) -> None: ...

    def place_drafts(
        self,
        drafts: torch.Tensor,
        place: DraftOutput,
        behind: DrawnRows | None,
        slots: SlotRows | None,
        thinking: ThinkingRule | None,
    ) -> None: ...

    def draft_argmax(self, logits: torch.Tensor) -> torch.Tensor: ...

    def local_top1(
        self, logits: torch.Tensor, first_id: int, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def merge_top1(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...

    def place_last_states(
        self, states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.draft import launch

    return launch


def _check_logits(logits: torch.Tensor, least: int) -> tuple[int, int]:
    """Check logits of at least so many columns and return R and V."""
    shape = logits.shape
    if len(shape) == 2 and logits.is_floating_point():
        rows, columns = shape
        if columns >= least and (rows == 0 or logits.stride(1) == 1):
            return rows, columns
    raise TensorContractError(
        f"logits: expected floats [R, V], V >= {least}, with contiguous rows, got {logits.dtype} "
        f"{list(shape)} with strides {list(logits.stride())}"
    )


def _check_place(place: DraftOutput, rows: int) -> None:
    """Check that every tensor of the place has room for the drafts of so many rows."""
    column = place.column
    _check_matrix("drafts", place.drafts, rows, column)
    _check_matrix("next_tokens", place.next_tokens, rows, column + 1)
    if place.shifted_ids is not None:
        _check_written("shifted_ids", place.shifted_ids, column + 1)
        last_rows = place.last_rows
        if last_rows is None or last_rows.shape != (rows,):
            came = None if last_rows is None else list(last_rows.shape)
            raise TensorContractError(f"last_rows: expected [{rows}] with shifted_ids, got {came}")
    if place.positions is not None:
        _check_written("positions", place.positions, rows, exact=True)
        if place.kv_lens is not None:
            _check_written("kv_lens", place.kv_lens, rows)


def _checked_behind(
    behind: DrawnRows | None,
    place: DraftOutput,
    slots: SlotRows,
    thinking: ThinkingRule | None,
    device: torch.device,
) -> DrawnRows | None:
    """Check slots of the drafts, what follows and what budgets go by; the rows that follow, None
    where slots keep these from nothing."""
    check_slots(slots, int(place.drafts.shape[0]), device)
    if behind is not None and slots.pools is not None and slots.bans is not None:
        _check_one_each("rows behind", behind, place, place.column + 1)
        slots.pools.check(place.drafts.device)
        slots.bans.check(slots.pools)
    else:
        behind = None
    if thinking is not None:
        thinking.check(device)
    return behind


def _check_one_each(name: str, rows: DrawnRows, place: DraftOutput, column: int) -> None:
    """Check rows that are one of each request, of this column."""
    rows.check(place.drafts.device)
    expected = int(place.drafts.shape[0])
    if (rows.num_rows, rows.width, rows.column) != (expected, 1, column):
        raise TensorContractError(
            f"{name}: expected {expected} of width 1 and column {column}, got {rows.num_rows} of "
            f"width {rows.width} and column {rows.column}"
        )


def _check_matrix(name: str, tensor: torch.Tensor, rows: int, column: int) -> None:
    shape = tensor.shape
    if (
        len(shape) != 2
        or shape[0] != rows
        or not 0 <= column < shape[1]
        or tensor.dtype != torch.int32
        or (tensor.stride(1) != 1 and shape[1] > 1)
    ):
        raise TensorContractError(
            f"{name}: expected torch.int32 [{rows}, > {column}] with contiguous rows, got "
            f"{tensor.dtype} {list(shape)} with strides {list(tensor.stride())}"
        )


def _check_written(name: str, tensor: torch.Tensor, size: int, *, exact: bool = False) -> None:
    shape = tensor.shape
    if (
        len(shape) != 1
        or shape[0] < size
        or (exact and shape[0] > size)
        or not is_integral(tensor)
        or not tensor.is_contiguous()
    ):
        raise TensorContractError(
            f"{name}: expected a contiguous vector of integers [{'' if exact else '>= '}{size}], "
            f"got {tensor.dtype} {list(shape)} with strides {list(tensor.stride())}"
        )

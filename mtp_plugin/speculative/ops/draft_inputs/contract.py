"""The parcels of draft inputs, and the checks of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.speculative.step import StepLayout


@dataclass(frozen=True)
class History:
    """The last K pairs of (token, target state) of every slot, and which slots a step has.

    K is that of the pools, the most drafts that a step may verify; a step may have fewer. A host
    that replaces one pool may give it another S.
    """

    tokens: torch.Tensor  # [S, K] int32, contiguous
    states: torch.Tensor  # [S, K, H], contiguous, of any floating type
    slot_ids: torch.Tensor  # [R] int64, any stride; the padding rows of a batch may share one

    @property
    def max_draft_len(self) -> int:
        """K of the pools."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class TargetRows:
    """What the target read in a step, and what became of it."""

    input_ids: torch.Tensor  # [T] integer, any stride
    hidden_states: torch.Tensor  # [T, H]


@dataclass(frozen=True)
class DraftKVLengths:
    """The host's KV lengths, from which those of the draft loop follow."""

    lens: torch.Tensor  # [>= R] int32, any stride; what stands behind R is nobody's
    floor: int | None  # least length of a generation; None: none


def check_rows(layout: StepLayout, rows: TargetRows) -> torch.device:
    """Check the step's rows, and return the device that everything must be on.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    states, size = rows.hidden_states, layout.num_tokens
    device = states.device
    if states.dim() != 2 or states.shape[0] != size:
        raise TensorContractError(
            f"rows, hidden_states: expected [T, H] with T = {size}, got {_told(states)}"
        )
    expect_integers("rows, input_ids", rows.input_ids, size, device)
    if layout.num_contexts:
        expect_integers("step, context_lens", layout.context_lens, layout.num_contexts, device)
    return device


def check_history(
    layout: StepLayout, history: History, rows: TargetRows, num_accepted: torch.Tensor
) -> torch.device:
    """Check the step's rows and the pools that they go to, and return the device of all.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    device = check_rows(layout, rows)
    tokens, states, fresh = history.tokens, history.states, rows.hidden_states
    hidden = fresh.shape[1]
    if hidden > 1 and fresh.stride(1) != 1:
        raise TensorContractError(
            f"rows, hidden_states: expected rows without gaps, got {_told(fresh)}"
        )
    least = max(layout.draft_len, 1)
    if not (
        tokens.dim() == 2
        and tokens.shape[1] >= least
        and tokens.dtype == torch.int32
        and tokens.is_contiguous()
        and tokens.device == device
    ):
        raise TensorContractError(
            f"history, tokens: expected contiguous torch.int32 [S, K] on {device} with K >= "
            f"{least}, got {_told(tokens)}"
        )
    if not (
        states.dim() == 3
        and states.is_floating_point()
        and states.shape[1:] == (tokens.shape[1], hidden)
        and states.is_contiguous()
        and states.device == device
    ):
        raise TensorContractError(
            f"history, states: expected contiguous floats [S, K, H] on {device} with K = "
            f"{tokens.shape[1]} and H = {hidden}, got {_told(states)}"
        )
    requests = layout.num_requests
    expect_integers("history, slot_ids", history.slot_ids, requests, device)
    expect_integers("num_accepted", num_accepted, requests, device)
    return device


def check_windows(
    layout: StepLayout,
    max_draft_len: int,
    window: int,
    history_lens: Sequence[int],
    spare_rows: int,
) -> None:
    """Check the numbers of rows that a first pass is asked for, with K = ``max_draft_len``.

    Raises:
        TensorContractError: more rows than history and step have.
    """
    if not 1 <= window <= max_draft_len + 1:
        raise TensorContractError(
            f"window: expected 1 to K+1 = {max_draft_len + 1} rows per generation, got {window}"
        )
    if len(history_lens) != layout.num_contexts or not all(
        0 <= count <= max_draft_len for count in history_lens
    ):
        raise TensorContractError(
            f"history_lens: expected 0 to K = {max_draft_len} rows for each of "
            f"{layout.num_contexts} contexts, got {list(history_lens)}"
        )
    if spare_rows < 0:
        raise TensorContractError(f"spare_rows: expected 0 or more, got {spare_rows}")


def check_successors(
    layout: StepLayout, successors: torch.Tensor | None, device: torch.device
) -> None:
    """Check the token behind each chunk, which a step with contexts cannot do without.

    Raises:
        TensorContractError: none where there are contexts, or another number of them.
    """
    if successors is not None:
        expect_integers("successors", successors, layout.num_contexts, device)
    elif layout.num_contexts:
        raise TensorContractError(
            f"successors: expected the tokens behind {layout.num_contexts} chunks, got None"
        )


def check_accepted(layout: StepLayout, accepted_tokens: torch.Tensor, device: torch.device) -> None:
    """Check emitted tokens [R, K+1].

    Raises:
        TensorContractError: another shape, type or device.
    """
    shape = (layout.num_requests, layout.step_rows)
    if not (
        accepted_tokens.shape == shape
        and is_integral(accepted_tokens)
        and accepted_tokens.device == device
    ):
        raise TensorContractError(
            f"accepted_tokens: expected integers [R, K+1] = {list(shape)} on {device}, got "
            f"{_told(accepted_tokens)}"
        )


def check_kv(layout: StepLayout, kv: DraftKVLengths, device: torch.device) -> None:
    """Check the host's KV lengths.

    Raises:
        TensorContractError: lengths of fewer requests, or no integers.
    """
    expect_integers("kv, lens", kv.lens, layout.num_requests, device, at_least=True)


def _told(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}"
    )

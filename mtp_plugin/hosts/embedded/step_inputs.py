"""Builds the device inputs of target and worker for a step.

G generation requests with K drafts each, S sequence slots of the sampler's store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.embedded.row_table import UploadedRows
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import AtLeast, expect_tensor


class LastResults(Protocol):
    """The sampler's store, addressed by sequence slot; any strides."""

    @property
    def new_tokens(self) -> torch.Tensor:
        """[>= K+1, S, 1] int32: the next inputs."""

    @property
    def new_tokens_lens(self) -> torch.Tensor:
        """[S] int32: number of tokens of the last step."""


@dataclass(frozen=True)
class StepInputs:
    """T tokens of R sequences, contexts first, with their actual lengths, on the device.

    A generation of L committed tokens has K+1 tokens at positions L .. L+K; a context has the
    tokens of its chunk.
    """

    input_ids: torch.Tensor  # [T] int32; of a generation: newest token, drafts, 0 without a draft
    positions: torch.Tensor  # [T] int64, none past the last one of a sequence
    seq_lens: torch.Tensor  # [R] int32: tokens of this step
    kv_lens: torch.Tensor  # [R] int32: tokens after this step
    write_limit: torch.Tensor  # [R] int32: tokens at or past it write no KV
    capacity: torch.Tensor  # [R] int32: KV rows that the request may use
    draft_tokens: torch.Tensor  # [G*K] int32, -1: absent
    draft_lens: torch.Tensor  # [G] int32: number of drafts
    state_slot: torch.Tensor  # [R] int64
    next_prompt: torch.Tensor | None = None  # [C] int32: token after the chunk, -1: prompt's end
    last_rows: torch.Tensor | None = None  # [C] int64: last token of the chunk; None: no contexts

    @property
    def logit_rows(self) -> torch.Tensor | None:
        """[C+G*(K+1)] int64, the tokens whose logits are needed; None: all."""
        if self.last_rows is None:
            return None
        num_tokens = self.input_ids.shape[0]
        of_generations = self.draft_tokens.shape[0] + self.draft_lens.shape[0]
        rows = torch.arange(num_tokens - of_generations, num_tokens, device=self.input_ids.device)
        return torch.cat([self.last_rows, rows])

    def with_contexts(self, contexts: StepInputs) -> StepInputs:
        """Return these inputs with contexts inserted before the generations."""
        both = {
            name: torch.cat([getattr(contexts, name), getattr(self, name)])
            for name in _OF_CONTEXTS_TOO
        }
        return replace(self, **both, next_prompt=contexts.next_prompt, last_rows=contexts.last_rows)


_OF_CONTEXTS_TOO = (
    "input_ids",
    "positions",
    "seq_lens",
    "kv_lens",
    "write_limit",
    "capacity",
    "state_slot",
)


def generation_inputs(
    rows: UploadedRows,
    previous: LastResults | None,
    *,
    draft_len: int,
    max_seq_len: int,
    backend: Backend,
) -> StepInputs:
    """Build the inputs of generation requests from the host's rows and the previous step's results.

    If a request's last result (``n`` tokens) is only in the store, its length grows by ``n`` and
    its inputs come from the store. Drafts that do not fit the request's KV rows are dropped.

    Args:
        rows: rows of the generation requests; columns of one table.
        previous: the sampler's store; None: the host has read every result.
        draft_len: K.
        max_seq_len: maximum number of tokens of a sequence.
    """
    _check(rows, previous, draft_len)
    return backend.dispatch(generation_inputs_reference)(
        rows, previous, draft_len=draft_len, max_seq_len=max_seq_len
    )


def generation_inputs_reference(
    rows: UploadedRows, previous: LastResults | None, *, draft_len: int, max_seq_len: int
) -> StepInputs:
    width = draft_len + 1
    input_ids = rows.tokens[:, :width]
    length = rows.length.to(torch.int64)
    if previous is not None:
        is_pending = rows.is_pending > 0
        slot = rows.seq_slot.to(torch.int64)
        stored_ids = previous.new_tokens.squeeze(-1).T[slot][:, :width]
        input_ids = torch.where(is_pending.unsqueeze(1), stored_ids, input_ids)
        length = length + torch.where(is_pending, previous.new_tokens_lens[slot], 0)
    room = (rows.capacity - 1 - length).clamp_min(0)
    draft_lens = torch.minimum(rows.draft_limit, room).to(torch.int32)
    columns = torch.arange(width, device=length.device)
    absent = columns > draft_lens.unsqueeze(1)
    input_ids = input_ids.masked_fill(absent, 0)
    end = length.to(torch.int32)
    return StepInputs(
        input_ids=input_ids.clamp_min(0).flatten(),
        positions=(length.unsqueeze(1) + columns).clamp_max(max_seq_len - 1).flatten(),
        seq_lens=torch.full_like(end, width),
        kv_lens=end + width,
        write_limit=torch.minimum(end + draft_lens + 1, rows.capacity),
        capacity=rows.capacity.contiguous(),
        draft_tokens=input_ids[:, 1:].flatten(),
        draft_lens=draft_lens,
        state_slot=rows.state_slot.to(torch.int64),
    )


def _check(rows: UploadedRows, previous: LastResults | None, draft_len: int) -> None:
    width = draft_len + 1
    tokens = expect_tensor(
        "step rows: tokens",
        rows.tokens,
        dtype=torch.int32,
        shape=("G", AtLeast(width)),
        contiguous="rows",
    )
    expect_tensor("step rows: length", rows.length, dtype=torch.int32)
    stride = tokens.stride(0)
    columns = (
        rows.length,
        rows.draft_limit,
        rows.capacity,
        rows.is_pending,
        rows.seq_slot,
        rows.state_slot,
    )
    if any(column.stride(0) != stride for column in columns):
        raise TensorContractError(
            f"step rows: expected columns of one table with a stride of {stride}, got columns with "
            f"strides {[column.stride(0) for column in columns]}"
        )
    if previous is None:
        return
    new_tokens = expect_tensor(
        "new_tokens",
        previous.new_tokens,
        dtype=torch.int32,
        shape=(AtLeast(width), "S", 1),
        device=tokens.device,
    )
    expect_tensor(
        "new_tokens_lens",
        previous.new_tokens_lens,
        dtype=torch.int32,
        shape=(int(new_tokens.shape[1]),),
        device=tokens.device,
    )

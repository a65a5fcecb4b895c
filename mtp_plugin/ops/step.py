"""Data classes of one step.

Shape letters, used everywhere: R requests in the batch (contexts first, then generations); C
context requests; G generation requests (R = C + G); K draft length; T flat tokens; H hidden size; V
vocabulary size; S slots; W columns of the slot table. A context request contributes its prompt
chunk to the flat tokens, a generation request K+1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.checks import INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.logits_processor_state import DraftMask, LogitsProcessorState
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.requests.columns import TableColumns

PAD_TOKEN = -1
"""Fills the unused tail of returned token rows; never an input of a kernel or an embedding."""

NO_INPUT = 0
"""Fills the next inputs of a step with fewer drafts than the store holds. It is a valid token id
because a host whose next step has more drafts embeds it before it finds the draft missing."""

STATUS_OK = 0
STATUS_NO_FINITE_LOGIT = 1
"""A row of the request's logits has no finite value; only this request fails."""


class SamplingKind(IntEnum):
    """What the requests of a step need at most; a graph is captured for each."""

    GREEDY = 0  # every request takes the argmax of the target's logits
    SAMPLED = 1  # a request samples or wants log-probabilities; no logit is changed
    PROCESSED = 2  # a request changes logits: penalties, biases, masks, thinking budgets


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]] | torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """Return a copy of ``values`` on ``device``; from the host through pinned memory, without a
    synchronization.

    The caller may overwrite ``values`` at once.
    """
    host = (
        values.to(dtype) if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    )
    if host.device.type != "cpu" or torch.device(device).type != "cuda":
        return host.to(device, copy=host is values)
    if host is values and host.is_pinned():
        host = host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def expect_vocab(logits: torch.Tensor, vocab_ids: torch.Tensor) -> None:
    """Check that the columns of ``logits`` [R, V'] are those of a reduced vocabulary [V'] int32."""
    device = expect_tensor("logits", logits).device
    expect_tensor(
        "vocab_ids", vocab_ids, dtype=torch.int32, shape=("V'",), device=device, contiguous=True
    )
    if logits.dim() != 2 or logits.shape[1] != vocab_ids.shape[0]:
        raise TensorContractError(
            f"logits: expected [R, {vocab_ids.shape[0]}], a column per id of the draft "
            f"vocabulary, got {list(logits.shape)}"
        )


@dataclass(frozen=True)
class StepLayout:
    """The shape of a step: contexts first, each with its chunk, then generations of K+1 rows.

    The fields on the host decide shapes and grids, so they never change in a captured step.

    Raises:
        TensorContractError: a negative number, or a tensor of another shape or dtype.
    """

    chunk_lens: tuple[int, ...]  # [C] on the host: prompt rows of each context
    num_generations: int  # G
    draft_len: int  # K of this step
    context_lens: torch.Tensor  # [C] integer: chunk_lens on the device, any stride
    positions: torch.Tensor | None = None
    """[T] integer, any stride; None: unknown. The first position of a generation is exact, later
    ones may be clamped."""
    num_contexts: int = field(init=False)  # C
    num_requests: int = field(init=False)  # R = C + G
    num_ctx_tokens: int = field(init=False)  # rows of all contexts together
    step_rows: int = field(init=False)  # rows of a generation: K+1
    num_tokens: int = field(init=False)  # T
    num_logit_rows: int = field(init=False)  # one per context, K+1 per generation

    def __post_init__(self) -> None:
        contexts, generations = len(self.chunk_lens), self.num_generations
        if generations < 0 or self.draft_len < 0:
            raise TensorContractError(
                f"step: expected numbers >= 0, got G = {generations} generations and "
                f"K = {self.draft_len}"
            )
        generation_rows = generations * (self.draft_len + 1)
        counts = vars(self)  # the class is frozen
        counts["num_contexts"] = contexts
        counts["num_requests"] = contexts + generations
        counts["num_ctx_tokens"] = sum(self.chunk_lens)
        counts["step_rows"] = self.draft_len + 1
        counts["num_tokens"] = counts["num_ctx_tokens"] + generation_rows
        counts["num_logit_rows"] = contexts + generation_rows
        _expect_vector("context_lens", self.context_lens, contexts)
        if self.positions is not None:
            _expect_vector("positions", self.positions, self.num_tokens)

    def first_logit_positions(self, reader: str) -> torch.Tensor:
        """Return the position of the first logits row of every request [R]: the last row of a
        chunk, the first row of a generation; for a ``reader`` as :meth:`expect_positions`.

        They are computed once a step: verification and every draft pass read them.
        """
        self.expect_positions(reader)
        return self._logit_positions

    @cached_property
    def _logit_positions(self) -> torch.Tensor:
        positions = self.expect_positions("logits")
        of_generations = positions[self.num_ctx_tokens :: self.step_rows]
        if self.num_contexts == 0:
            return of_generations
        ends = self.context_lens.to(torch.int64).cumsum(0) - 1
        return torch.cat([positions[ends], of_generations])

    def expect_positions(self, reader: str) -> torch.Tensor:
        """Return the positions [T]; ``reader`` names the caller that needs them.

        Raises:
            TensorContractError: the step has none.
        """
        if self.positions is None:
            raise TensorContractError(f"{reader}: needs the step's positions, got None")
        return self.positions


def _expect_vector(name: str, tensor: torch.Tensor, size: int) -> None:
    expect_tensor(f"step, {name}", tensor, dtype=INTEGERS, shape=(size,))


@dataclass(frozen=True)
class Accepted:
    """Accepted tokens of every request of a step."""

    tokens: torch.Tensor  # [R, K+1] int32, PAD_TOKEN after the accepted tokens; 0 where filled
    num_accepted: torch.Tensor  # [R] int32: output tokens, accepted drafts plus the bonus
    status: torch.Tensor
    """[R] int32: STATUS_OK, STATUS_NO_FINITE_LOGIT, or the code of a verification method that
    failed."""
    scores: torch.Tensor | None = None
    """[C + G*(K+1), V] float32: scores for log-probabilities; None: the target's logits."""
    sums: RowSums | None = None
    """Log-sum-exp partials of the target's logits from sampling, reused for log-probabilities."""
    rows: torch.Tensor | None = None
    """[R, K+1] int32: the row of the logits of each output token, then -1; None: not kept."""

    @classmethod
    def unwritten(
        cls,
        requests: int,
        max_draft_len: int,
        device: torch.device | str,
        *,
        keeps_rows: bool = False,
        dtype: torch.dtype = torch.int32,
    ) -> Accepted:
        """Allocate the tensors for R ``requests`` and K = ``max_draft_len``.

        Args:
            dtype: of the tokens.
        """
        return cls(
            tokens=torch.empty(requests, max_draft_len + 1, dtype=dtype, device=device),
            num_accepted=torch.empty(requests, dtype=torch.int32, device=device),
            status=torch.empty(requests, dtype=torch.int32, device=device),
            rows=(
                torch.empty(requests, max_draft_len + 1, dtype=torch.int32, device=device)
                if keeps_rows
                else None
            ),
        )

    def last_tokens(self) -> torch.Tensor:
        """Return the last output token of every request [R] int32; 0 where there is none."""
        column = (self.num_accepted - 1).clamp_min(0).to(torch.int64).unsqueeze(1)
        return self.tokens.gather(1, column).squeeze(1).clamp_min(0)


@dataclass(frozen=True)
class DraftInputs:
    """Input rows of a draft layer, flat, contexts first."""

    input_ids: torch.Tensor  # [T'] int32
    position_ids: torch.Tensor  # [T'] position of the row's state; 0 for dead rows
    hidden_states: torch.Tensor  # [T', H]


@dataclass(frozen=True)
class DrafterInputs:
    """Inputs of the first pass of a draft loop, and the state of the loop."""

    ids: torch.Tensor
    """[T' + K-1] int32 for vanilla: depth d reads rows [d, d+T'); between depths only the last row
    of each request is written. [T'] for a reused layer."""
    positions: torch.Tensor
    """[T'] int64; 0 for dead rows. For a reused layer the step's own."""
    states: torch.Tensor  # [T', H], then K-1 spare rows if the window moves by an offset
    last_rows: torch.Tensor  # [R] int64: the row that proposes each request's first draft
    next_positions: torch.Tensor | None = None  # [R] int64, for a reused layer: those of pass 2
    kv_lens: torch.Tensor | None = None
    """[>= R] KV lengths of the loop, if those of the host engine were given."""


@dataclass(frozen=True)
class DraftOutput:
    """Where the draft of one pass is written: the result, the next inputs, the loop's state."""

    drafts: torch.Tensor  # [R, K] int32
    next_tokens: torch.Tensor  # [R, K+1] int32: the draft goes to column + 1
    column: int
    shifted_ids: torch.Tensor | None = None  # DrafterInputs.ids, if another depth reads them
    last_rows: torch.Tensor | None = None  # [R] int64, with shifted_ids
    positions: torch.Tensor | None = None  # [R] int64: increased by one, if given
    kv_lens: torch.Tensor | None = None  # [R] int32: increased by one, with positions
    max_position: int | None = None  # upper limit of positions
    vocab_ids: torch.Tensor | None = None
    """[V'] int32, ascending: token ids of the columns of the logits; None: the columns are ids."""

    def write(self, drafts: torch.Tensor) -> None:
        """Write ``drafts`` [R], ids of the whole vocabulary."""
        self.drafts[:, self.column] = drafts.to(self.drafts.dtype)
        self.next_tokens[:, self.column + 1] = drafts.to(self.next_tokens.dtype)
        if self.shifted_ids is not None and self.last_rows is not None:
            rows = self.last_rows + (self.column + 1)
            self.shifted_ids[rows] = drafts.to(self.shifted_ids.dtype)
        if self.positions is not None:
            self.positions.add_(1)
            if self.max_position is not None:
                self.positions.clamp_(max=self.max_position)
            if self.kv_lens is not None:
                self.kv_lens[: drafts.shape[0]].add_(1)


def slots_within(slot_ids: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return slot ids [N] as int64; an id outside 0 to S-1 is the last slot, S = ``num_slots``."""
    size = max(num_slots, 1)
    return slot_ids.to(torch.int64).clamp(-1, size - 1).remainder(size)


@dataclass(frozen=True)
class SlotRows:
    """Per-request state of a step in the slot table, read in place."""

    table: torch.Tensor  # [S, W] int32, rows without gaps; floats bit for bit
    slot_ids: torch.Tensor
    """[>= R] integer, any stride. The padding rows of a batch may share one; an id outside 0 to S-1
    is the last slot."""
    columns: TableColumns  # of the table
    pools: LogitsProcessorState | None = None  # None: no request has a row in a pool
    draft_mask: DraftMask | None = None  # None: drafts are not masked

    def for_drafts(self) -> SlotRows:
        """Return these rows with the allowed ids of drafts instead of those of the target."""
        if self.pools is None or self.draft_mask is None:
            return self
        return replace(self, pools=replace(self.pools, allowed=self.draft_mask.allowed))

    def part(self, requests: slice) -> SlotRows:
        """Return the rows of some of the step's requests."""
        return replace(self, slot_ids=self.slot_ids[requests])

    def of(self, requests: slice) -> torch.Tensor:
        """Return the slots of some of the step's requests [N] int64; an id outside the table is
        the last slot."""
        return slots_within(self.slot_ids[requests], self.table.shape[0])

    def read(self, name: str, requests: slice) -> torch.Tensor:
        """Gather a column for some of the step's requests: [N], or [N, width] for a wide column."""
        column, first = self.columns[name], self.columns.offset(name)
        rows = self.table[self.of(requests), first : first + column.width]
        rows = rows.view(torch.float32) if column.kind is float else rows
        return rows if column.width > 1 else rows.squeeze(1)


def check_slots(
    slots: SlotRows, requests: int, device: torch.device, columns: Sequence[str] = ()
) -> None:
    """Check the slot table, the slots of a step's requests, and that the table has ``columns``.

    A pool with a row per slot has at least as many rows as the table.
    """
    expect_tensor(
        "slot table",
        slots.table,
        dtype=torch.int32,
        shape=(AtLeast(1) if requests else "S", slots.columns.width),
        device=device,
        contiguous="rows",
    )
    expect_tensor(
        "slot_ids", slots.slot_ids, dtype=INTEGERS, shape=(AtLeast(requests),), device=device
    )
    missing = [name for name in columns if name not in slots.columns]
    if missing:
        there = ", ".join(column.name for column in slots.columns.columns)
        raise TensorContractError(
            f"slot table: expected columns {', '.join(missing)} too, got {there}"
        )

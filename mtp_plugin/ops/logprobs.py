"""Log-probabilities of generated tokens and of the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.step import SlotRows, StepLayout, check_slots
from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_INDEX,
    TOKEN_INDEX,
    TOP_IDS_INDEX,
    TOP_VALUES_INDEX,
    VALUE_INDEX,
)
from mtp_plugin.requests.options import MAX_LOGPROBS

LOGPROB_OPTIONS = frozenset({"logprobs"})
"""Request options that are read here."""


@dataclass(frozen=True)
class LogprobEntries:
    """An entry per generated token; its fields are columns of one tensor, for a single copy.

    Entries that were not requested, and those after a request's last token, hold fill values.
    """

    entries: torch.Tensor  # [R, K+1, ENTRY_WIDTH] int32, see `requests.logprobs`

    @property
    def tokens(self) -> torch.Tensor:
        """[R, K+1] int32, -1 without an entry."""
        return self.entries[..., TOKEN_INDEX]

    @property
    def ranks(self) -> torch.Tensor:
        """[R, K+1] int32: 1 for the most likely token; 0 without an entry."""
        return self.entries[..., RANK_INDEX]

    @property
    def values(self) -> torch.Tensor:
        """[R, K+1] float32: of the tokens; 0 without an entry."""
        return self.entries[..., VALUE_INDEX].view(torch.float32)

    @property
    def top_ids(self) -> torch.Tensor:
        """[R, K+1, MAX_LOGPROBS] int32: the most likely tokens, -1 after the requested number."""
        return self.entries[..., TOP_IDS_INDEX:TOP_VALUES_INDEX]

    @property
    def top_values(self) -> torch.Tensor:
        """[R, K+1, MAX_LOGPROBS] float32: of the most likely tokens, 0 where there is none."""
        return self.entries[..., TOP_VALUES_INDEX:].view(torch.float32)


def compute_logprobs(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    requested: SlotRows | int,
    *,
    sums: RowSums | None = None,
    backend: Backend | str = "auto",
) -> LogprobEntries:
    """Return the log-probabilities of generated tokens and of the most likely ones.

    They are the log-softmax in float32 of the given logits. Token i of a generation request belongs
    to its row i, the token of a context request to its only row. Tokens are ordered by logit, then
    by id. NaN counts as -inf; in a row with +inf the lowest such id has log-probability 0 and all
    others -inf; in a row of -inf alone all have -inf.

    Args:
        layout: reads its contexts, generations and K.
        logits: [C + G*(K+1), V] floating, contiguous rows with any stride between them; the
            target's own, before logits processing.
        tokens: [R, K+1] integer, any strides; those at or after ``counts`` are not read. A token
            outside the vocabulary has log-probability -inf and rank V+1.
        counts: [R] integer, any stride: generated tokens of each request.
        requested: slots of the requests, whose column ``logprobs`` holds the number of most likely
            tokens, up to `MAX_LOGPROBS`; 0: the token alone, -1: nothing. Or one such number for
            all requests.
        sums: partial results of sampling from these logits with the same slots; None: rows are
            read once more.

    Returns:
        Entries [R, K+1, ENTRY_WIDTH] int32, whose fields `LogprobEntries` reads.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, ``sums`` without
            slots, or a number of most likely tokens out of range.
    """
    requests = layout.num_requests
    device = expect_tensor(
        "logits",
        logits,
        dtype=FLOATS,
        shape=(layout.num_logit_rows, AtLeast(1)),
        contiguous="rows" if layout.num_logit_rows else False,
    ).device
    shape = (requests, layout.step_rows)
    expect_tensor("tokens", tokens, dtype=INTEGERS, shape=shape, device=device)
    expect_tensor("counts", counts, dtype=INTEGERS, shape=(requests,), device=device)
    if isinstance(requested, SlotRows):
        check_slots(requested, requests, device)
    else:
        expect_int("requested", requested, -1, MAX_LOGPROBS)
    if sums is not None:
        if not isinstance(requested, SlotRows):
            raise TensorContractError(
                f"sums: expected the slots that sampling had as requested, got {requested}"
            )
        sums.check(logits)
    backend = Backend.of(backend, device, "backend")
    return backend.dispatch(logprobs_reference)(layout, logits, tokens, counts, requested, sums)


def logprobs_reference(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    requested: SlotRows | int,
    sums: RowSums | None,
) -> LogprobEntries:
    requests, width = layout.num_requests, layout.step_rows
    device, contexts = logits.device, layout.num_contexts
    if isinstance(requested, SlotRows):
        num_top = requested.read("logprobs", slice(0, requests)).to(torch.int64)
    else:
        num_top = torch.full((requests,), requested, device=device)
    column = torch.arange(width, device=device)
    owner = torch.arange(requests, device=device).unsqueeze(1)
    first = torch.where(owner < contexts, owner, contexts + (owner - contexts) * width)
    has_row = (owner >= contexts) | (column == 0)
    live = (num_top.unsqueeze(1) >= 0) & (column < counts.unsqueeze(1)) & has_row  # [R, K+1]

    filler = torch.zeros(ENTRY_WIDTH, dtype=torch.int32, device=device)
    result = LogprobEntries(filler.repeat(requests, width, 1))
    result.tokens.fill_(-1)
    result.top_ids.fill_(-1)
    if device.type == "cpu":  # elsewhere their number would need a device sync
        cells = live.reshape(-1).nonzero().squeeze(1)
    else:
        cells = torch.arange(requests * width, device=device)
    rows = (first + column).reshape(-1)[cells].clamp_max(max(logits.shape[0] - 1, 0))
    if cells.shape[0] == 0:
        return result
    masses = None if sums is None else sums.masses[rows]
    written = _entries(logits[rows], tokens.reshape(-1)[cells], num_top[cells // width], masses)
    entries = result.entries.view(-1, ENTRY_WIDTH)
    entries[cells] = torch.where(live.reshape(-1, 1)[cells], written, entries[cells])
    return result


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, masses: torch.Tensor | None
) -> torch.Tensor:
    """Return the entries [N, ENTRY_WIDTH] int32 of rows [N, V] with a token each [N].

    Args:
        num_top: [N] most likely tokens to list.
        masses: [N] as in `RowSums`, if known.
    """
    vocab = logits.shape[1]
    ids = torch.arange(vocab, device=logits.device)
    # different logits may have equal log-probabilities: the order is that of the logits
    scores = _scores(logits)
    values = log_softmax(logits, masses)
    tokens = tokens.to(torch.int64).unsqueeze(1)
    is_known = (tokens >= 0) & (tokens < vocab)
    columns = tokens.clamp(0, vocab - 1)
    own = scores.gather(1, columns).masked_fill(~is_known, -torch.inf)
    ahead = (scores > own) | ((scores == own) & ((ids < tokens) | ~is_known))
    listed = min(MAX_LOGPROBS, vocab)
    # unique keys: by value, then the lowest id
    top = (_order(scores) * 2**32 - ids).topk(listed, dim=1).indices
    shown = torch.arange(MAX_LOGPROBS, device=logits.device) < num_top.clamp_max(listed).unsqueeze(
        1
    )
    top = torch.nn.functional.pad(top, (0, MAX_LOGPROBS - listed))
    fields = (
        tokens.to(torch.int32),
        ahead.sum(dim=1, keepdim=True, dtype=torch.int32) + 1,
        values.gather(1, columns).masked_fill(~is_known, -torch.inf).view(torch.int32),
        torch.where(shown, top, -1).to(torch.int32),
        torch.where(shown, values.gather(1, top), 0.0).view(torch.int32),
    )
    return torch.cat(fields, dim=1)


def log_softmax(logits: torch.Tensor, masses: torch.Tensor | None = None) -> torch.Tensor:
    """Return the log-softmax of rows [N, V] in float32; NaN, +inf as in `compute_logprobs`."""
    scores = _scores(logits)
    if masses is None:
        values = torch.log_softmax(scores, dim=1)
    else:
        norm = masses.log().masked_fill((logits == torch.inf).any(dim=1), 0.0)
        values = scores - scores.amax(dim=1, keepdim=True) - norm.unsqueeze(1)
    return values.masked_fill(scores == -torch.inf, -torch.inf)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 without NaN and +inf, in the order of their log-probabilities."""
    values = logits.to(torch.float32)
    values = values.masked_fill(values.isnan(), -torch.inf)
    infinite = values == torch.inf
    first = infinite & (infinite.cumsum(dim=1) == 1)
    single = torch.where(first, 0.0, -torch.inf)
    return torch.where(infinite.any(dim=1, keepdim=True), single, values)


def _order(values: torch.Tensor) -> torch.Tensor:
    """Return int64 in the order of float32 values; -0.0 equals 0.0."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)

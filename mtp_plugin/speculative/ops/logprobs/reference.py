"""Log-probabilities in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch

from mtp_plugin.requests.logprobs import ENTRY_WIDTH
from mtp_plugin.requests.options import MAX_LOGPROBS
from mtp_plugin.speculative.ops.logprobs.contract import LogProbs
from mtp_plugin.speculative.row_sums import RowSums
from mtp_plugin.speculative.step import SlotRows, StepLayout


def logprobs(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    asked: SlotRows | int,
    sums: RowSums | None,
) -> LogProbs:
    """As at the door."""
    requests, width = layout.num_requests, layout.step_rows
    device, contexts = logits.device, layout.num_contexts
    if isinstance(asked, SlotRows):
        most = asked.read("logprobs", slice(0, requests)).to(torch.int64)
    else:
        most = torch.full((requests,), asked, device=device)
    place = torch.arange(width, device=device)
    owner = torch.arange(requests, device=device).unsqueeze(1)
    first = torch.where(owner < contexts, owner, contexts + (owner - contexts) * width)
    has_row = (owner >= contexts) | (place == 0)
    live = (most.unsqueeze(1) >= 0) & (place < counts.unsqueeze(1)) & has_row  # [R, K+1]

    filler = torch.zeros(ENTRY_WIDTH, dtype=torch.int32, device=device)
    result = LogProbs(filler.repeat(requests, width, 1))
    result.tokens.fill_(-1)
    result.top_ids.fill_(-1)
    if device.type == "cpu":  # elsewhere nobody waits to know how many there are
        cells = live.reshape(-1).nonzero().squeeze(1)
    else:
        cells = torch.arange(requests * width, device=device)
    rows = (first + place).reshape(-1)[cells].clamp_max(max(logits.shape[0] - 1, 0))
    if cells.shape[0] == 0:
        return result
    masses = None if sums is None else sums.masses[rows]
    written = _entries(logits[rows], tokens.reshape(-1)[cells], most[cells // width], masses)
    entries = result.entries.view(-1, ENTRY_WIDTH)
    entries[cells] = torch.where(live.reshape(-1, 1)[cells], written, entries[cells])
    return result


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, most: torch.Tensor, masses: torch.Tensor | None
) -> torch.Tensor:
    """Of rows [N, V], a token each [N], and so many ids [N]: entries [N, ENTRY_WIDTH] int32.

    Args:
        masses: [N], as `RowSums` have them; None: nobody has.
    """
    vocab = logits.shape[1]
    ids = torch.arange(vocab, device=logits.device)
    # two logits may have one log-probability: the order is that of the logits
    scores = _scores(logits)
    values = log_softmax(logits, masses)
    tokens = tokens.to(torch.int64).clamp(0, vocab - 1).unsqueeze(1)
    own = scores.gather(1, tokens)
    ahead = (scores > own) | ((scores == own) & (ids < tokens))
    listed = min(MAX_LOGPROBS, vocab)
    # keys of which no two are equal: by value, then the lowest id
    top = (_order(scores) * 2**32 - ids).topk(listed, dim=1).indices
    shown = torch.arange(MAX_LOGPROBS, device=logits.device) < most.clamp_max(listed).unsqueeze(1)
    top = torch.nn.functional.pad(top, (0, MAX_LOGPROBS - listed))
    columns = (
        tokens.to(torch.int32),
        ahead.sum(dim=1, keepdim=True, dtype=torch.int32) + 1,
        values.gather(1, tokens).view(torch.int32),
        torch.where(shown, top, -1).to(torch.int32),
        torch.where(shown, values.gather(1, top), 0.0).view(torch.int32),
    )
    return torch.cat(columns, dim=1)


def log_softmax(logits: torch.Tensor, masses: torch.Tensor | None = None) -> torch.Tensor:
    """In float32 of rows [N, V]: NaN as -inf, all of it on the lowest id that holds +inf."""
    scores = _scores(logits)
    if masses is None:
        values = torch.log_softmax(scores, dim=1)
    else:
        norm = masses.log().masked_fill((logits == torch.inf).any(dim=1), 0.0)
        values = scores - scores.amax(dim=1, keepdim=True) - norm.unsqueeze(1)
    return values.masked_fill(scores == -torch.inf, -torch.inf)


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 without NaN and +inf, in the order of their log-probabilities."""
    values = logits.to(torch.float32)
    values = values.masked_fill(values.isnan(), -torch.inf)
    infinite = values == torch.inf
    first = infinite & (infinite.cumsum(dim=1) == 1)
    single = torch.where(first, 0.0, -torch.inf)
    return torch.where(infinite.any(dim=1, keepdim=True), single, values)


def _order(values: torch.Tensor) -> torch.Tensor:
    """int64 in the order of float32 values; both zeros are one."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)

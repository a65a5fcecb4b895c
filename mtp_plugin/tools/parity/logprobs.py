"""Compare log-probabilities of the executor with those of the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mtp_plugin.infer import SamplingRule
from mtp_plugin.infer.decoding import LogprobsMode
from mtp_plugin.infer.logprobs import raw_logprobs, usable
from mtp_plugin.requests.logprobs import Logprob, TokenLogprobs
from mtp_plugin.tools.parity.compare import TieRule
from mtp_plugin.tools.parity.reference import Oracle

ReportedLogprobs = Sequence[TokenLogprobs | None]


@dataclass(frozen=True)
class LogprobMismatch:
    """A log-probability that differs from the target's."""

    position: int
    """Position in prompt or output, counted from 0."""
    in_prompt: bool
    token: int
    """The token at the position, or another of the most likely ones."""
    reported: Logprob | None
    """None: missing, although the token is among the most likely."""
    expected: Logprob
    tolerance: float
    """Tolerance of log-probabilities, and of the ranks of tokens within it."""


@dataclass
class LogprobComparison:
    """Comparison of the log-probabilities of one prompt and its output with the target's."""

    num_values: int = 0
    """Number of compared log-probabilities."""
    largest_gap: float = 0.0
    mismatches: list[LogprobMismatch] = field(default_factory=list)

    def add(
        self, position: int, reported: TokenLogprobs, row: TargetRow, *, in_prompt: bool
    ) -> None:
        """Compare the reported entry of one position with the target's row."""
        for token, one in reported.items():
            self.num_values += 1
            expected = float(row.values[token])
            if one.logprob != expected:
                self.largest_gap = max(self.largest_gap, abs(one.logprob - expected))
            if not row.allows(token, one):
                self._note(position, token, one, row, in_prompt=in_prompt)
        for token in row.lacking(reported):
            self._note(position, token, None, row, in_prompt=in_prompt)

    def _note(
        self,
        position: int,
        token: int,
        reported: Logprob | None,
        row: TargetRow,
        *,
        in_prompt: bool,
    ) -> None:
        expected = row.expected(token)
        self.mismatches.append(
            LogprobMismatch(position, in_prompt, token, reported, expected, row.tolerance)
        )


@dataclass(frozen=True)
class TargetRow:
    """Log-probabilities of the target at one position.

    Args:
        values: [V], log-probabilities.
        token: the token at the position.
        num_top: number of most likely tokens in an entry.
        tolerance: how far off a log-probability may be.
    """

    values: torch.Tensor
    token: int
    num_top: int
    tolerance: float

    def allows(self, token: int, reported: Logprob) -> bool:
        """Whether log-probability and rank are those of the target, but for rounding."""
        value = float(self.values[token])
        ahead = int((self.values > value + 2 * self.tolerance).sum())
        alike = int((self.values >= value - 2 * self.tolerance).sum())
        return (
            math.isclose(reported.logprob, value, rel_tol=0, abs_tol=self.tolerance)
            and ahead < reported.rank <= alike
        )

    def lacking(self, reported: TokenLogprobs) -> list[int]:
        """Return the token ids that are missing in an entry."""
        lost = [] if self.token in reported else [self.token]
        ranks = {*range(1, self.num_top + 1)} - {one.rank for one in reported.values()}
        if ranks:
            order = self.values.sort(descending=True, stable=True).indices[: self.num_top].tolist()
            likely = [token for rank, token in enumerate(order, 1) if rank in ranks]
            lost += [t for t in likely if t != self.token and self.values[t] > -torch.inf]
        return lost

    def expected(self, token: int) -> Logprob:
        """Return the expected log-probability and rank of a token."""
        value = self.values[token]
        ahead = (self.values > value).sum() + (self.values[:token] == value).sum()
        return Logprob(float(value), int(ahead) + 1)


def compare_logprobs(
    oracle: Oracle,
    rule: TieRule,
    sampling: SamplingRule,
    emitted: Sequence[int],
    *,
    logprobs: ReportedLogprobs | None,
    prompt_logprobs: ReportedLogprobs | None,
    mode: LogprobsMode,
) -> LogprobComparison:
    """Compare the log-probabilities of a prompt and its output, each in one forward pass.

    Args:
        sampling: sampling rule of the request, with its prompt.
        emitted: its output tokens.
        logprobs: of the output, raw or processed by ``mode``; None: not requested.
        prompt_logprobs: of the prompt; None: not requested.
    """
    found, params, prompt = LogprobComparison(), sampling.params, list(sampling.prompt)
    if prompt_logprobs is not None and len(prompt) > 1:
        rows = oracle.logits(prompt[:-1], len(prompt) - 1)
        for place, logits in enumerate(rows, 1):
            row = _raw(rule, logits, prompt[place], params.prompt_logprobs or 0)
            found.add(place, _at(prompt_logprobs, place), row, in_prompt=True)
    if logprobs is not None and emitted:
        rows = oracle.logits([*prompt, *emitted[:-1]], len(emitted))
        for place, logits in enumerate(rows):
            row = _raw(rule, logits, emitted[place], params.logprobs or 0)
            if mode == "processed":
                row = _processed(rule, sampling, logits, emitted[:place], row)
            found.add(place, _at(logprobs, place), row, in_prompt=False)
    return found


def _raw(rule: TieRule, logits: torch.Tensor, token: int, num_top: int) -> TargetRow:
    tolerance = rule.logprob_tolerance(_largest(usable(logits)), 1.0)
    return TargetRow(raw_logprobs(logits), token, num_top, tolerance)


def _processed(
    rule: TieRule,
    sampling: SamplingRule,
    logits: torch.Tensor,
    output: Sequence[int],
    raw: TargetRow,
) -> TargetRow:
    """Return the row of processed logits."""
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    largest = _largest(sampling.edited(logits, output))
    return replace(
        raw,
        values=raw_logprobs(sampling.scores(logits, output)),
        tolerance=rule.logprob_tolerance(largest, temperature),
    )


def _at(reported: ReportedLogprobs, place: int) -> TokenLogprobs:
    """Return the entry of a position; empty if it is missing."""
    return (reported[place] if place < len(reported) else None) or {}


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().nan_to_num(posinf=0.0).max())

"""Log-probabilities that were told of a text beside those of the target alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mtp_plugin.infer import SamplingRule
from mtp_plugin.infer.decoding import LogprobsMode
from mtp_plugin.infer.logprobs import raw_logprobs, usable
from mtp_plugin.requests.logprobs import Logprob, TokenLogprobs
from mtp_plugin.tools.parity.oracle import Oracle
from mtp_plugin.tools.parity.ties import TieRule

Told = Sequence[TokenLogprobs | None]


@dataclass(frozen=True)
class Mistold:
    """What was told of a token and is not what the target says."""

    position: int
    """In prompt or text, counted from 0."""
    in_prompt: bool
    token: int
    """Of which it was told: the one that stands there, or another beside it."""
    told: Logprob | None
    """None: nothing, though it is among the most likely."""
    expected: Logprob
    tolerance: float
    """Of log-probabilities, and of ranks among those so close."""


@dataclass
class LogprobComparison:
    """What was told of one prompt and its text, beside what the target says."""

    num_values: int = 0
    """Log-probabilities that were compared."""
    largest_gap: float = 0.0
    mistold: list[Mistold] = field(default_factory=list)

    def add(self, position: int, told: TokenLogprobs, row: TargetRow, *, in_prompt: bool) -> None:
        """Compare what is told of one token."""
        for token, one in told.items():
            self.num_values += 1
            expected = float(row.values[token])
            if one.logprob != expected:
                self.largest_gap = max(self.largest_gap, abs(one.logprob - expected))
            if not row.allows(token, one):
                self._note(position, token, one, row, in_prompt=in_prompt)
        for token in row.lacking(told):
            self._note(position, token, None, row, in_prompt=in_prompt)

    def _note(
        self, position: int, token: int, told: Logprob | None, row: TargetRow, *, in_prompt: bool
    ) -> None:
        expected = row.expected(token)
        self.mistold.append(Mistold(position, in_prompt, token, told, expected, row.tolerance))


@dataclass(frozen=True)
class TargetRow:
    """What the target says of one token.

    Args:
        values: [V], log-probabilities.
        token: the one that stands there.
        num_top: most likely ones to be told of.
        tolerance: how far off a log-probability may be.
    """

    values: torch.Tensor
    token: int
    num_top: int
    tolerance: float

    def allows(self, token: int, told: Logprob) -> bool:
        """Whether log-probability and rank are those of the target, but for rounding."""
        value = float(self.values[token])
        ahead = int((self.values > value + 2 * self.tolerance).sum())
        alike = int((self.values >= value - 2 * self.tolerance).sum())
        return (
            math.isclose(told.logprob, value, rel_tol=0, abs_tol=self.tolerance)
            and ahead < told.rank <= alike
        )

    def lacking(self, told: TokenLogprobs) -> list[int]:
        """Ids that nothing is told of and something should be."""
        lost = [] if self.token in told else [self.token]
        ranks = {*range(1, self.num_top + 1)} - {one.rank for one in told.values()}
        if ranks:
            order = self.values.sort(descending=True, stable=True).indices[: self.num_top].tolist()
            likely = [token for rank, token in enumerate(order, 1) if rank in ranks]
            lost += [t for t in likely if t != self.token and self.values[t] > -torch.inf]
        return lost

    def expected(self, token: int) -> Logprob:
        """What should be told of an id."""
        value = self.values[token]
        ahead = (self.values > value).sum() + (self.values[:token] == value).sum()
        return Logprob(float(value), int(ahead) + 1)


def compare_logprobs(
    oracle: Oracle,
    rule: TieRule,
    sampling: SamplingRule,
    emitted: Sequence[int],
    *,
    logprobs: Told | None,
    prompt_logprobs: Told | None,
    mode: LogprobsMode,
) -> LogprobComparison:
    """What was told of a prompt and its text, each in one forward pass.

    Args:
        sampling: of the request, with its prompt.
        emitted: its tokens.
        logprobs: of those, as ``mode`` says; None: not asked for.
        prompt_logprobs: of the prompt; None: not asked for.
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
    """The same of what the token was chosen from."""
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    largest = _largest(sampling.edited(logits, output))
    return replace(
        raw,
        values=raw_logprobs(sampling.scores(logits, output)),
        tolerance=rule.logprob_tolerance(largest, temperature),
    )


def _at(told: Told, place: int) -> TokenLogprobs:
    """Nothing where less is told than there are tokens."""
    return (told[place] if place < len(told) else None) or {}


def _largest(values: torch.Tensor) -> float:
    """The largest finite magnitude."""
    return float(values.abs().nan_to_num(posinf=0.0).max())

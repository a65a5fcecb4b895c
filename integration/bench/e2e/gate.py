"""Compare the tokens of a run with the expected ones; without a match nothing is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from integration.bench.e2e.batch import Run
from integration.bench.e2e.subject import Subject
from mtp_plugin.tools.parity import (
    TIE_ULPS,
    Comparison,
    Divergence,
    Oracle,
    TieRule,
    compare_forced,
    first_difference,
    transformers_attention,
)

RANDOM_WEIGHTS_ULPS = 16.0
"""The highest logits of random weights are closer together than half precision resolves: executor
and target-only decoding chose tokens up to 7 ulps apart at one of a thousand positions."""
STANDARD_ERRORS = 4.0
"""Tolerance of measured synthetic acceptance around the configured rates."""


@dataclass(frozen=True)
class Match:
    """Result of a comparison."""

    compared_with: str
    num_tokens: int
    """Compared tokens."""
    num_ties: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether results may be reported."""
        return not self.mismatches

    def as_dict(self) -> dict[str, Any]:
        return {
            "compared_with": self.compared_with,
            "tokens": self.num_tokens,
            "ties": self.num_ties,
            "mismatches": self.mismatches,
        }


class Gate:
    """Compares runs of one subject over the same prompts.

    In float32 tokens must be equal. In half precision a request that differs is compared with the
    oracle, given the output before every position: each token must be the argmax or a tie.

    Args:
        num_oracle_requests: requests of each run without MTP to compare with target-only decoding.
        tie_ulps: see `TieRule`; None: its default, and more for random weights.
    """

    def __init__(self, subject: Subject, num_oracle_requests: int, tie_ulps: float | None) -> None:
        if tie_ulps is None:
            tie_ulps = TIE_ULPS if subject.is_trained else RANDOM_WEIGHTS_ULPS
        self.tie_ulps = tie_ulps
        self._subject = subject
        self._num_oracle_requests = num_oracle_requests
        self._rule = TieRule(subject.dtype, tie_ulps)

    def match_off(self, prompts: Sequence[list[int]], runs: Sequence[Run]) -> Match:
        """Without MTP: the same tokens in every run, and those of target-only decoding."""
        first, *others = runs
        mismatches = [
            f"request {number}: two runs without MTP differ from token {position + 1} on"
            for other in others
            for number, (one, two) in enumerate(zip(first.token_ids, other.token_ids, strict=True))
            if (position := first_difference(one, two)) is not None
        ]
        count = min(self._num_oracle_requests, len(prompts))
        found = self.match_oracle(prompts[:count], first.token_ids[:count])
        return replace(found, mismatches=mismatches + found.mismatches)

    def match_oracle(self, prompts: Sequence[list[int]], token_ids: Sequence[list[int]]) -> Match:
        """Compare tokens with target-only decoding."""
        with transformers_attention(self._subject.model):
            found = [
                self._with_oracle(prompt, tokens)
                for prompt, tokens in zip(prompts, token_ids, strict=True)
            ]
        return Match(
            f"target-only decoding of {len(prompts)} requests",
            sum(len(tokens) for tokens in token_ids),
            sum(len(each.ties) for each in found),
            describe_differences(found),
        )

    def match_on(self, prompts: Sequence[list[int]], runs: Sequence[Run], off: Run) -> Match:
        """Compare every run with MTP and real acceptance with the run without MTP."""
        different: list[list[list[int]]] = []
        for run in runs:
            if run.token_ids not in different:
                different.append(run.token_ids)
        return all_of([self.match_tokens(prompts, ids, off.token_ids) for ids in different])

    def match_tokens(
        self,
        prompts: Sequence[list[int]],
        token_ids: Sequence[list[int]],
        off: Sequence[list[int]],
    ) -> Match:
        """Compare tokens with those of the run without MTP."""
        with transformers_attention(self._subject.model):
            found = [
                self._with_tokens(prompt, tokens, expected)
                for prompt, tokens, expected in zip(prompts, token_ids, off, strict=True)
            ]
        return Match(
            "the run without MTP",
            sum(len(tokens) for tokens in token_ids),
            sum(len(each.ties) for each in found),
            describe_differences(found),
        )

    def match_synthetic(
        self,
        runs: Sequence[Run],
        num_tokens: int,
        shares: Sequence[float],
        measure: Callable[[Run], Sequence[float]],
    ) -> Match:
        """Check runs with synthetic acceptance: valid ids, number of tokens, acceptance rates.

        Args:
            num_tokens: of each request. shares: expected shares of steps that accept drafts 1..i.
            measure: returns these shares of a run. Runs are checked one by one, since they may
                repeat each other's random numbers.
        """
        vocab = self._subject.model.facts.vocab_size
        return all_of([_match_draws(run, num_tokens, vocab, shares, measure(run)) for run in runs])

    def compare_greedy(self, prompt: list[int], tokens: list[int]) -> Comparison:
        """Compare one greedy output with target-only decoding; the model must run with
        transformers' attention."""
        return self._with_oracle(prompt, tokens)

    def _with_tokens(self, prompt: list[int], tokens: list[int], expected: list[int]) -> Comparison:
        position = first_difference(tokens, expected)
        if position is None:
            return Comparison(len(tokens))
        same_length = len(tokens) == len(expected)
        if self._subject.dtype is torch.float32 or not same_length:
            return Comparison(position, [], _divergence(tokens, expected, position))
        oracle = Oracle(self._subject.model)
        return compare_forced(oracle, self._rule, prompt, tokens, start=position)

    def _with_oracle(self, prompt: list[int], tokens: list[int]) -> Comparison:
        oracle = Oracle(self._subject.model)
        if self._subject.dtype is torch.float32:
            return self._with_tokens(prompt, tokens, oracle.continuation(prompt, [], len(tokens)))
        return compare_forced(oracle, self._rule, prompt, tokens)


def _match_draws(
    run: Run, num_tokens: int, vocab: int, shares: Sequence[float], measured: Sequence[float]
) -> Match:
    mismatches = []
    for number, tokens in enumerate(run.token_ids):
        if len(tokens) != num_tokens:
            mismatches.append(f"request {number}: {len(tokens)} tokens, not {num_tokens}")
        odd = [token for token in tokens if not 0 <= token < vocab]
        if odd:
            mismatches.append(f"request {number}: {odd[0]} is no id below {vocab}")
    # every request draws for itself in every step; where a run is cut, one step may lean
    steps = max(1, len(run.steady))
    draws = max(1, sum(len(step.emitted) for step in run.steady))
    for i, (share, found) in enumerate(zip(shares, measured, strict=True), 1):
        error = STANDARD_ERRORS * math.sqrt(share * (1 - share) / draws) + 1 / steps
        if abs(found - share) > error:
            mismatches.append(
                f"drafts 1..{i} were accepted in {found:.3f} of the steps, expected "
                f"{share:.3f} within {error:.3f}"
            )
    return Match("valid ids and the configured acceptance", run.num_tokens, 0, mismatches)


def all_of(matches: list[Match]) -> Match:
    """Merge the results of several runs; equal mismatches are listed once."""
    return Match(
        matches[0].compared_with,
        sum(match.num_tokens for match in matches),
        sum(match.num_ties for match in matches),
        list(dict.fromkeys(line for match in matches for line in match.mismatches)),
    )


def _divergence(tokens: list[int], expected: list[int], position: int) -> Divergence:
    ours = tokens[position] if position < len(tokens) else None
    theirs = expected[position] if position < len(expected) else None
    return Divergence(position, ours, theirs)


def describe_differences(found: list[Comparison]) -> list[str]:
    """Return a line for each comparison that found a difference."""
    lines = []
    for number, comparison in enumerate(found):
        other = comparison.difference
        if other is None:
            continue
        gap = "" if other.gap is None else f", logits {abs(other.gap):.4g} apart"
        if other.tolerance:
            gap += f" where {other.tolerance:.4g} is a tie"
        lines.append(
            f"request {number}, token {other.position + 1}: {other.token}, expected "
            f"{other.expected}{gap}"
        )
    return lines

"""Whether a run's tokens are what they have to be; without that no figure is told."""

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
"""Best logits of random weights lie closer together than states are exact: executor and plain
decoding were seen to choose tokens up to 7 ulps apart in one of a thousand places."""
STANDARD_ERRORS = 4.0
"""How far measured synthetic acceptance may lie from what was asked for."""


@dataclass(frozen=True)
class Match:
    """What a comparison found."""

    compared_with: str
    num_tokens: int
    """Compared tokens."""
    num_ties: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether figures may be told."""
        return not self.mismatches

    def as_dict(self) -> dict[str, Any]:
        """For the JSON document."""
        return {
            "compared_with": self.compared_with,
            "tokens": self.num_tokens,
            "ties": self.num_ties,
            "mismatches": self.mismatches,
        }


class Gate:
    """Compares runs of one subject over the same prompts.

    In float32 tokens must be equal. In half precision a request that differs is compared with the
    oracle, given the emitted prefix at every place: each token must be the best one or a tie.

    Args:
        num_oracle_requests: of each run without MTP that target-only decoding is asked about.
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
        asked = min(self._num_oracle_requests, len(prompts))
        found = self.match_oracle(prompts[:asked], first.token_ids[:asked])
        return replace(found, mismatches=mismatches + found.mismatches)

    def match_oracle(self, prompts: Sequence[list[int]], token_ids: Sequence[list[int]]) -> Match:
        """Tokens of requests beside those of target-only decoding."""
        with transformers_attention(self._subject.model):
            found = [
                self._with_oracle(prompt, tokens)
                for prompt, tokens in zip(prompts, token_ids, strict=True)
            ]
        return Match(
            f"target-only decoding of {len(prompts)} requests",
            sum(len(tokens) for tokens in token_ids),
            sum(len(each.ties) for each in found),
            told_of(found),
        )

    def match_on(self, prompts: Sequence[list[int]], runs: Sequence[Run], off: Run) -> Match:
        """With MTP and real acceptance, each run: the tokens of the run without it."""
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
        """Tokens of requests beside those of the run without MTP."""
        with transformers_attention(self._subject.model):
            found = [
                self._with_tokens(prompt, tokens, expected)
                for prompt, tokens, expected in zip(prompts, token_ids, off, strict=True)
            ]
        return Match(
            "the run without MTP",
            sum(len(tokens) for tokens in token_ids),
            sum(len(each.ties) for each in found),
            told_of(found),
        )

    def match_synthetic(
        self,
        runs: Sequence[Run],
        num_tokens: int,
        shares: Sequence[float],
        measure: Callable[[Run], Sequence[float]],
    ) -> Match:
        """With synthetic acceptance, each run: valid ids, as many as asked, accepted as asked.

        Args:
            num_tokens: of each request. shares: of the steps that accept drafts 1..i.
            measure: these shares in a run. Each run is held against them by itself: others may
                repeat its draws.
        """
        vocab = self._subject.model.facts.vocab_size
        return all_of([_match_draws(run, num_tokens, vocab, shares, measure(run)) for run in runs])

    def compare_greedy(self, prompt: list[int], tokens: list[int]) -> Comparison:
        """One greedy text beside target-only decoding's; the model runs with transformers'
        attention."""
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
    return Match("valid ids and the asked-for acceptance", run.num_tokens, 0, mismatches)


def all_of(matches: list[Match]) -> Match:
    """What several runs gave; what they have in common is told once."""
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


def told_of(found: list[Comparison]) -> list[str]:
    """A line for each comparison that found a difference."""
    told = []
    for number, comparison in enumerate(found):
        other = comparison.difference
        if other is None:
            continue
        gap = "" if other.gap is None else f", logits {abs(other.gap):.4g} apart"
        if other.tolerance:
            gap += f" where {other.tolerance:.4g} is a tie"
        told.append(
            f"request {number}, token {other.position + 1}: {other.token}, expected "
            f"{other.expected}{gap}"
        )
    return told

"""Compare outputs with target-only decoding of the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from integration.bench.e2e.subject import Subject
from mtp_plugin.config import LLMConfig
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools import check
from mtp_plugin.tools.check import PromptResult

RANDOM_WEIGHTS_ULPS = 16.0
"""The highest logits of random weights are closer together than half precision resolves: executor
and target-only decoding chose tokens up to 7 ulps apart at one of a thousand positions."""
STANDARD_ERRORS = 4.0
"""Tolerance of measured synthetic acceptance around the configured rates."""


@dataclass(frozen=True)
class Match:
    """Result of a comparison."""

    compared_with: str
    num_tokens: int = 0
    num_ties: int = 0
    mismatches: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "compared_with": self.compared_with,
            "tokens": self.num_tokens,
            "ties": self.num_ties,
            "mismatches": self.mismatches,
        }


class Reference:
    """Target-only decoding with a model; equal requests are decoded once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[SamplingParams, check.KnownTexts] = {}
        self._tie_ulps = check.TIE_ULPS if subject.is_trained else RANDOM_WEIGHTS_ULPS

    def compare(self, results: Sequence[PromptResult], params: Sequence[SamplingParams]) -> Match:
        """Compare tokens and log-probabilities, except for rounding ties."""
        num_ties, mismatches = 0, []
        model = self._subject.model
        for number, (result, given) in enumerate(zip(results, params, strict=True), 1):
            text = replace(given.without_drafts(), logprobs=None)
            reference = check.Reference(
                model,
                given.without_drafts(),
                model.facts.max_position_embeddings,
                LLMConfig(model=self._subject.path),
                tie_ulps=self._tie_ulps,
                known=self._known.setdefault(text, {}),
            )
            # a request has a seed of its own, whatever its number
            _, found = reference.compare([replace(result, number=0)])
            if given.logprobs is not None:
                found += reference.compare_logprobs([result])[1]
            num_ties += sum(each.is_tie for each in found)
            for each in found:
                what = f"{each.token}, expected {each.expected}"
                if each.kind != check.TOKEN:
                    what = f"logprob of {each.token}"
                if not each.is_tie:
                    mismatches.append(f"request {number}, token {each.position}: {what}")
        return Match(
            f"target-only decoding of {len(results)} requests",
            sum(len(result.token_ids) for result in results),
            num_ties,
            mismatches,
        )


def check_synthetic(
    results: Sequence[PromptResult],
    num_tokens: int,
    vocab_size: int,
    shares: Sequence[float],
    stats: AcceptanceStats,
) -> Match:
    """Check outputs with synthetic acceptance: valid ids, number of tokens, acceptance rates.

    Args:
        shares: expected shares of steps that accept drafts 1..i.
        stats: of whole steps.
    """
    mismatches = [
        f"request {number}: expected {num_tokens} ids below {vocab_size}"
        for number, result in enumerate(results, 1)
        if len(result.token_ids) != num_tokens
        or not all(0 <= token < vocab_size for token in result.token_ids)
    ]
    for i, (share, found) in enumerate(zip(shares, stats.per_position, strict=True), 1):
        error = STANDARD_ERRORS * math.sqrt(share * (1 - share) / max(1, stats.steps)) + 0.01
        if abs(found - share) > error:
            mismatches.append(
                f"drafts 1..{i} were accepted in {found:.3f} of the steps, expected {share:.3f}"
            )
    num = sum(len(result.token_ids) for result in results)
    return Match("valid ids and the configured acceptance", num, 0, mismatches)

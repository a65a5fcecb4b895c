"""Outputs of finished requests, stored once per prompt, since all must be equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from integration.bench.e2e.gate import Gate
from integration.bench.soak.traffic import RequestPlan
from mtp_plugin.requests.states import FinishReason

MAX_ODD = 200
"""Maximum number of outputs that differ from others of their prompt and are kept for comparison."""


@dataclass
class Texts:
    """Outputs by prompt: the longest one, and those that are not a prefix of it.

    Args:
        prompts: token ids.
        end_ids: EOS token ids.
    """

    prompts: list[list[int]]
    end_ids: tuple[int, ...]
    longest: dict[int, list[int]] = field(default_factory=dict)
    odd: list[tuple[int, list[int]]] = field(default_factory=list)
    num_tokens: int = 0
    wrong_ends: list[str] = field(default_factory=list)

    def add(self, planned: RequestPlan, tokens: list[int], reason: FinishReason | None) -> None:
        """Add the output of a finished or aborted request."""
        self.num_tokens += len(tokens)
        problem = self._wrong_end(planned, tokens, reason)
        if problem:
            self.wrong_ends.append(f"prompt {planned.prompt}: {problem}")
        known = self.longest.get(planned.prompt, [])
        shared = min(len(known), len(tokens))
        if known[:shared] != tokens[:shared]:
            if len(self.odd) < MAX_ODD:
                self.odd.append((planned.prompt, tokens))
        elif len(tokens) > len(known):
            self.longest[planned.prompt] = tokens

    def _wrong_end(
        self, planned: RequestPlan, tokens: list[int], reason: FinishReason | None
    ) -> str:
        inside = [] if planned.ignore_eos else [t for t in tokens[:-1] if t in self.end_ids]
        if inside:
            return f"continues after the end token {inside[0]}"
        ended = bool(tokens) and not planned.ignore_eos and tokens[-1] in self.end_ids
        if reason is FinishReason.CANCELLED:
            return ""
        if reason is FinishReason.END_ID and ended:
            return ""
        if reason is FinishReason.LENGTH and not ended and len(tokens) == planned.max_new_tokens:
            return ""
        name = "nothing" if reason is None else reason.value
        return f"{len(tokens)} of {planned.max_new_tokens} tokens, ended by {name}"

    def compare(self, gate: Gate) -> tuple[list[str], int]:
        """Return (differences from non-speculative decoding, number of ties)."""
        mismatches: list[str] = []
        numbers = sorted(self.longest)
        match = gate.match_oracle(
            [self.prompts[number] for number in numbers],
            [self.longest[number] for number in numbers],
        )
        ties = match.num_ties
        mismatches += [f"longest outputs: {line}" for line in match.mismatches]
        if self.odd:
            match = gate.match_oracle(
                [self.prompts[number] for number, _ in self.odd],
                [tokens for _, tokens in self.odd],
            )
            ties += match.num_ties
            mismatches += [f"outputs unlike others: {line}" for line in match.mismatches]
        return mismatches, ties

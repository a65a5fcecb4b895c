"""Outputs of finished requests, stored once per prompt and kind, since all must be equal."""

from __future__ import annotations

from dataclasses import dataclass, field

from integration.bench.e2e.sampled_gate import SampledGate
from integration.bench.soak.traffic import OutputKey, RequestPlan
from mtp_plugin.requests.states import FinishReason

MAX_ODD = 200
"""Maximum number of outputs that differ from others of their key and are kept for comparison."""


@dataclass
class Texts:
    """Outputs by prompt and kind: the longest one, and those that are not a prefix of it.

    Args:
        prompts: token ids.
        end_ids: EOS token ids.
    """

    prompts: list[list[int]]
    end_ids: tuple[int, ...]
    longest: dict[OutputKey, list[int]] = field(default_factory=dict)
    odd: list[tuple[OutputKey, list[int]]] = field(default_factory=list)
    num_tokens: int = 0
    wrong_ends: list[str] = field(default_factory=list)

    def add(self, planned: RequestPlan, tokens: list[int], reason: FinishReason | None) -> None:
        """Add the output of a finished or aborted request."""
        self.num_tokens += len(tokens)
        problem = self._wrong_end(planned, tokens, reason)
        if problem:
            self.wrong_ends.append(f"prompt {planned.prompt}, {planned.kind}: {problem}")
        known = self.longest.get(planned.key, [])
        shared = min(len(known), len(tokens))
        if known[:shared] != tokens[:shared]:
            if len(self.odd) < MAX_ODD:
                self.odd.append((planned.key, tokens))
        elif len(tokens) > len(known):
            self.longest[planned.key] = tokens

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

    def compare(self, gate: SampledGate) -> tuple[list[str], int]:
        """Return (differences from non-speculative decoding, number of ties)."""
        mismatches: list[str] = []
        ties = 0
        for name, outputs in (
            ("longest outputs", sorted(self.longest.items())),
            ("outputs unlike others", self.odd),
        ):
            match = gate.match_tokens(
                [self.prompts[key.prompt] for key, _ in outputs],
                [key.params(len(tokens)) for key, tokens in outputs],
                [tokens for _, tokens in outputs],
            )
            ties += match.num_ties
            mismatches += [f"{name}: {line}" for line in match.mismatches]
        return mismatches, ties

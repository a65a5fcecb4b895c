"""Which of the listed ways a request's drafts are judged by, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.requests.options import DRAFTS_OF_VERIFICATION


@dataclass(frozen=True)
class MethodChoice:
    """What requests may choose of a config."""

    mtp: MTPPluginOptions

    @property
    def drafts_greedily(self) -> bool:
        """Whether no draft is ever drawn."""
        return self.mtp.draft_sampling == "greedy"

    def of(self, asked: Mapping[str, Any]) -> tuple[str, str]:
        """``verification`` and ``draft_sampling`` of a request with these options, which none of
        `refusals` are of."""
        verification = asked.get("verification") or self.mtp.verifications[0]
        return verification, asked.get("draft_sampling") or self.mtp.drafts_of(verification)

    def refusals(self, asked: Mapping[str, Any]) -> Iterator[str]:
        """Why a request with these options cannot be served."""
        verification, drafts = self.of(asked)
        listed = self.mtp.verifications
        if verification not in listed:
            yield (
                f"verification={verification!r} is not enabled; add it to "
                f"speculative_config.mtp.verification (enabled: {', '.join(listed)})"
            )
            return
        allowed = DRAFTS_OF_VERIFICATION[verification]
        if drafts not in allowed:
            yield (
                f"draft_sampling={drafts!r} cannot be verified by {verification!r}, expected one "
                f"of {', '.join(allowed)}"
            )
        elif self.drafts_greedily and drafts != "greedy":
            yield (
                f"draft_sampling={drafts!r} is not enabled; "
                f"speculative_config.mtp.draft_sampling is greedy for all requests, remove it"
            )

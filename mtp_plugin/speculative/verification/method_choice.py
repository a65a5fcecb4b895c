"""The verification method and the kind of drafts of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.verifications import drafts_of


@dataclass(frozen=True)
class MethodChoice:
    """Resolves ``verification`` and ``draft_sampling`` of requests among those a config enables."""

    mtp: MTPPluginOptions

    def resolve(self, requested: Mapping[str, Any]) -> tuple[str, str]:
        """Return ``verification`` and ``draft_sampling`` of a request with these options; where it
        sets none, the defaults of the config."""
        verification = requested.get("verification") or self.mtp.verifications[0]
        drafts = requested.get("draft_sampling") or self.mtp.drafts_of(verification)
        return verification, drafts

    def refusals(self, requested: Mapping[str, Any]) -> Iterator[str]:
        """Yield why a request with these options cannot be served."""
        verification, drafts = self.resolve(requested)
        listed = self.mtp.verifications
        if verification not in listed:
            yield (
                f"verification={verification!r} is not enabled; add it to "
                f"speculative_config.mtp.verification (enabled: {', '.join(listed)})"
            )
            return
        allowed = drafts_of(verification)
        if drafts not in allowed:
            yield (
                f"draft_sampling={drafts!r} cannot be verified by {verification!r}, expected one "
                f"of {', '.join(allowed)}"
            )
        elif self.mtp.draft_sampling == "greedy" and drafts != "greedy":
            yield (
                f"draft_sampling={drafts!r} is not enabled; "
                f"speculative_config.mtp.draft_sampling is greedy for all requests, remove it"
            )

"""Counts of drafts in engines that propose K drafts for every request."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence

from mtp_plugin.speculative.metrics.alarms import MTP_HINT, CollapseAlarm

_NGRAM_HINT = "Do outputs repeat parts of their prompts?"
_HINTS = {"mtp": MTP_HINT, "ngram": _NGRAM_HINT, "ngram_gpu": _NGRAM_HINT}


def collapse_alarm(logger: logging.Logger, drafter: str) -> CollapseAlarm:
    """Return the alarm on acceptance of an engine.

    Args:
        drafter: as the engine names it.
    """
    hint = _HINTS.get(drafter, "Does the draft model belong to this target?")
    return CollapseAlarm(logger, hint)


class WithheldDrafts:
    """Drafts beyond limits of requests, which are never accepted and must not count as proposed.

    A step costs time per request with a limit or a grammar, not per request.

    Args:
        logger: of the alarm on acceptance; None: there is no alarm.
        drafter: as the engine names it.
    """

    def __init__(self, logger: logging.Logger | None, drafter: str) -> None:
        self._limits: dict[str, int] = {}
        self._alarm = None if logger is None else collapse_alarm(logger, drafter)

    def set_limit(self, identifier: str, limit: int | None) -> None:
        """Keep the most drafts of a step that a new request may accept; None: all."""
        self._limits.pop(identifier, None)
        if limit is not None:
            self._limits[identifier] = limit

    def add_to(
        self,
        invalid: dict[str, int],
        requests: Container[str],
        drafts: Mapping[str, Sequence[int]],
        outputs: Sequence[Sequence[int]],
    ) -> set[str]:
        """Count the withheld drafts of a step as invalid ones.

        Args:
            invalid: number of invalid drafts by request, changed. requests: ids of all requests of
                the engine. drafts: by request. outputs: tokens of each request of the step.

        Returns:
            ids of requests without any draft, whose steps must not count.
        """
        withheld = set()
        for identifier, limit in list(self._limits.items()):
            if identifier not in requests:
                del self._limits[identifier]
            elif identifier in drafts:
                beyond = max(0, len(drafts[identifier]) - limit)
                invalid[identifier] = max(beyond, invalid.get(identifier, 0))
                if limit == 0:
                    withheld.add(identifier)
        if self._alarm is not None:
            # drafts that a grammar forbids are no sign of a wrong drafter
            count = len(drafts) - sum(
                len(drafts.get(identifier, ())) == number for identifier, number in invalid.items()
            )
            if count > 0:
                accepted = sum(map(len, outputs)) - len(outputs) + outputs.count([])
                self._alarm.record_steps(count, count + accepted)
        return withheld

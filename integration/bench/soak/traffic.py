"""Random arrivals, lengths and aborts, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mtp_plugin.executor import LlmRequest

IMPATIENT = 0.1
"""Share of requests that are aborted."""
SILENT = 0.05
"""Share of requests without drafts."""
STOPPING = 0.25
"""Share of requests that end at an end token."""
BURST = 3
"""Maximum number of requests that arrive in one step."""


@dataclass(frozen=True)
class RequestPlan:
    """Options of one request."""

    prompt: int
    max_new_tokens: int
    ignore_eos: bool
    speculate: bool
    patience: int | None
    """Steps after which it is aborted, if it has not finished; None: never."""


class Traffic:
    """Generates the arrivals of every step; the same seed gives the same ones.

    Args:
        num_prompts: to choose from. longest_output: maximum output tokens.
        batch_size: that the executor runs; arrivals are a little more than it serves.
    """

    def __init__(self, seed: int, num_prompts: int, longest_output: int, batch_size: int) -> None:
        self._rng = random.Random(seed)
        self._num_prompts = num_prompts
        self._longest_output = longest_output
        # a step serves batch_size requests by about two tokens each
        rate = 1.2 * batch_size * 4 / longest_output
        self._chance = min(0.9, rate / ((1 + BURST) / 2))

    def arrivals(self) -> list[RequestPlan]:
        """Those of the next step."""
        rng = self._rng
        if rng.random() >= self._chance:
            return []
        return [self._plan() for _ in range(rng.randint(1, BURST))]

    def _plan(self) -> RequestPlan:
        rng = self._rng
        impatient = rng.random() < IMPATIENT
        return RequestPlan(
            prompt=rng.randrange(self._num_prompts),
            max_new_tokens=rng.randint(1, self._longest_output),
            ignore_eos=rng.random() >= STOPPING,
            speculate=rng.random() >= SILENT,
            patience=rng.randint(0, self._longest_output // 4) if impatient else None,
        )


def random_chunks(seed: int) -> Callable[[LlmRequest, int], int]:
    """A chunk policy: any length that fits, by seed, request and place in the prompt."""

    def chunk(request: LlmRequest, limit: int) -> int:
        key = f"{seed} {request.request_id} {request.context_current_position}"
        return random.Random(key).randint(1, max(1, limit))

    return chunk

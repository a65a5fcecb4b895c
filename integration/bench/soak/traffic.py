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
"""Share of requests that stop at an EOS token."""
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
    """Number of steps after which an unfinished request is aborted; None: never."""


class Traffic:
    """Generate the arrivals of every step, determined by the seed.

    Args:
        num_prompts: number of prompts to choose from.
        longest_output: maximum number of output tokens.
        batch_size: batch size of the executor; slightly more requests arrive than it can serve.
    """

    def __init__(self, seed: int, num_prompts: int, longest_output: int, batch_size: int) -> None:
        self._rng = random.Random(seed)
        self._num_prompts = num_prompts
        self._longest_output = longest_output
        # a step serves batch_size requests by about two tokens each
        rate = 1.2 * batch_size * 4 / longest_output
        self._chance = min(0.9, rate / ((1 + BURST) / 2))

    def arrivals(self) -> list[RequestPlan]:
        """Return the requests that arrive in the next step."""
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
    """Return a chunk policy with random lengths, determined by seed, request and position."""

    def chunk(request: LlmRequest, limit: int) -> int:
        key = f"{seed} {request.request_id} {request.context_current_position}"
        return random.Random(key).randint(1, max(1, limit))

    return chunk

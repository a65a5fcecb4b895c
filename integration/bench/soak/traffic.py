"""Random arrivals, lengths and aborts, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from integration.bench.e2e.request_kinds import GREEDY, REQUEST_KINDS
from mtp_plugin.hosts.embedded import LlmRequest, SamplingParams

IMPATIENT = 0.1
"""Share of requests that are aborted."""
SILENT = 0.05
"""Share of requests without drafts."""
STOPPING = 0.25
"""Share of requests that stop at an EOS token."""
BURST = 3
"""Maximum number of requests that arrive in one step."""


class OutputKey(NamedTuple):
    """Prompt and kind: requests with equal keys have the same seed, and thus the same output."""

    prompt: int
    kind: str = GREEDY

    def params(self, max_new_tokens: int) -> SamplingParams:
        """Return the options of a request that does not stop at an EOS token."""
        return REQUEST_KINDS[self.kind].params(1, max_new_tokens, seed=self.prompt)[0]


@dataclass(frozen=True)
class RequestPlan:
    """Options of one request."""

    prompt: int
    max_new_tokens: int
    ignore_eos: bool
    speculate: bool
    patience: int | None
    """Number of steps after which an unfinished request is aborted; None: never."""
    kind: str = GREEDY

    @property
    def key(self) -> OutputKey:
        return OutputKey(self.prompt, self.kind)

    def params(self) -> SamplingParams:
        """Return the options of the request."""
        params = self.key.params(self.max_new_tokens)
        return replace(params, ignore_eos=self.ignore_eos, speculate=self.speculate)


class Traffic:
    """Generate the arrivals of every step, determined by the seed.

    Args:
        num_prompts: number of prompts to choose from.
        longest_output: maximum number of output tokens.
        batch_size: batch size of the executor; slightly more requests arrive than it can serve.
        kinds: names of `REQUEST_KINDS` to choose from.
    """

    def __init__(
        self,
        seed: int,
        num_prompts: int,
        longest_output: int,
        batch_size: int,
        kinds: Sequence[str] = (GREEDY,),
    ) -> None:
        self._rng = random.Random(seed)
        # separate, so that arrivals do not depend on the kinds
        self._rng_of_kinds = random.Random(f"{seed} kinds")
        self._kinds = kinds
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
            kind=self._rng_of_kinds.choice(self._kinds),
        )


def random_chunks(seed: int) -> Callable[[LlmRequest, int], int]:
    """Return a chunk policy with random lengths, determined by seed, request and position."""

    def chunk(request: LlmRequest, limit: int) -> int:
        key = f"{seed} {request.request_id} {request.context_current_position}"
        return random.Random(key).randint(1, max(1, limit))

    return chunk

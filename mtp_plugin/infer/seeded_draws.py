"""Seeded draws of one row in plain numbers: what sampled decoding has to reproduce."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import philox, seed_words

_WORD = 2**32 - 1
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SeededDraws:
    """The draws of one request: of every row and index the same token, whoever asks.

    Gumbel-max: the highest of (x - maximum) / temperature + noise, among what top-k, then top-p of
    the rest, then min-p leave; the lowest id where several are.
    """

    temperature: float
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    key: tuple[int, int] = (0, 0)
    """Low and high word of the seed."""

    @classmethod
    def of(cls, params: SamplingParams, number: int) -> SeededDraws:
        """Those of a request with these options, the ``number``-th that its engine got."""
        temperature = 1.0 if params.temperature is None else params.temperature
        low, high = seed_words(params.seed, number)
        return cls(
            temperature=0.0 if params.is_greedy else temperature,
            top_k=params.top_k or 0,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p or 0.0,
            key=(low & _WORD, high & _WORD),
        )

    def choose(self, logits: torch.Tensor, index: int) -> int:
        """The token of absolute index ``index``, of the row [V] that predicts it."""
        values = [-math.inf if math.isnan(x) else x for x in logits.tolist()]
        highest = max(values)
        if self.temperature < _GREEDY_BELOW or highest == math.inf:
            return values.index(highest)
        scores = [(x - highest) / self.temperature for x in values]
        noisy = {token: scores[token] + self.noise(token, index) for token in self._kept(scores)}
        return min(noisy, key=lambda token: (-noisy[token], token))

    def noise(self, token: int, index: int) -> float:
        """Gumbel noise of one id at one index."""
        word = philox((token >> 2, index, 0, 0), self.key)[token & 3]
        rounded = float(torch.tensor(word, dtype=torch.int64).to(torch.float32)) + 0.5
        unit = min(float(torch.tensor(rounded, dtype=torch.float32)) * 2**-32, 1 - 2**-24)
        return -math.log(-math.log1p(-unit))

    def _kept(self, scores: list[float]) -> list[int]:
        """The ids that may be drawn."""
        order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
        order = [token for token in order if scores[token] > -math.inf]
        if self.top_k > 0:
            order = order[: self.top_k]
        weights = [math.exp(scores[token]) for token in order]
        if self.top_p < 1:
            total, ahead, count = sum(weights), 0.0, 0
            while count < len(order) and ahead < self.top_p * total:
                ahead += weights[count]
                count += 1
            order, weights = order[:count], weights[:count]
        return [token for token, weight in zip(order, weights, strict=True) if weight >= self.min_p]

"""Choose the tokens of one request from logits according to its options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from mtp_plugin.errors import RequestError, expect, format_value
from mtp_plugin.infer.logprobs import usable
from mtp_plugin.infer.noise import Role, gumbel
from mtp_plugin.infer.thinking import Thinking, forced_token
from mtp_plugin.requests.columns import within_float32
from mtp_plugin.requests.options import GREEDY_BELOW, SamplingParams
from mtp_plugin.requests.seeds import ENGINE_SEED, seed_words

NO_TOKEN = -1
"""Returned for a row without any usable value."""

_NEITHER_SERVED_NOR_IDLE = frozenset(
    {
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "no_repeat_ngram_size",
        "top_p_decay",
        "top_p_min",
        "top_p_reset_ids",
        "logits_processor",
        "guided_decoding",
    }
)
"""Options that would change tokens and are not applied here."""


class SamplingRule:
    """Chooses a request's tokens, each from a row of logits and the tokens before it.

    The order is: logit bias, allowed ids and bad words, ``min_tokens``, penalties, temperature,
    top-k, top-p (of the tokens kept by top-k), min-p, seeded sampling. When the thinking budget is
    spent, only the next token of the end-of-thinking tag is allowed.

    Args:
        params: the request options; speculation options have no effect.
        prompt_ids: tokens of the prompt.
        number: request number; determines the seed if ``params`` has none.
        end_ids: EOS token ids of the model.
        thinking: the thinking tags; required for a thinking budget.

    Raises:
        RequestError: an option is not supported, or a budget is given without ``thinking``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        number: int = 0,
        end_ids: Iterable[int] = (),
        thinking: Thinking | None = None,
        engine_seed: int = ENGINE_SEED,
    ) -> None:
        _expect_served(params, thinking)
        self.params = params
        self.prompt = tuple(prompt_ids)
        self.seed = seed_words(params.seed, number, engine_seed)
        self.temperature = _temperature(params)
        self.thinking = thinking
        ends = () if params.ignore_eos else tuple(end_ids)
        self._end_ids = {*ends, *params.stop_token_ids}
        self._bad_words: list[tuple[int, ...]] = [(token,) for token in params.bad_token_ids]
        self._bad_words += [word for word in params.bad_words if not isinstance(word, str)]

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the argmax."""
        return self.temperature < GREEDY_BELOW

    def choose(self, logits: torch.Tensor, output: Sequence[int], role: Role = Role.TARGET) -> int:
        """Choose the token after ``output`` from its row of logits [V]; may return `NO_TOKEN`.

        Args:
            role: what the noise is for; coupled drafts use the noise of the target.
        """
        scores = self.scores(logits, output)
        if scores.max() == -torch.inf:
            return NO_TOKEN
        if self.is_greedy:
            return int(scores.argmax())
        return int((scores + self.noise(output, len(scores), role)).argmax())

    def first(self, logits: torch.Tensor, output: Sequence[int]) -> int:
        """Return the argmax of the processed logits, also for sampled requests, or `NO_TOKEN`."""
        values = self.edited(logits, output)
        return NO_TOKEN if values.max() == -torch.inf else int(values.argmax())

    def noise(
        self, output: Sequence[int], vocab_size: int, role: Role = Role.TARGET
    ) -> torch.Tensor:
        """[V] float64: Gumbel noise for the token after ``output``."""
        return gumbel(self.seed, len(self.prompt) + len(output), vocab_size, role)

    def probabilities(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """[V] float64: probabilities from which the token after ``output`` is sampled."""
        return self.scores(logits, output).double().softmax(dim=0)

    def scores(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """[V] float32: `scaled` logits, -inf for truncated tokens; greedy: not truncated."""
        scores = self.scaled(logits, output)
        return scores if self.is_greedy or scores.max() == -torch.inf else self._truncate(scores)

    def scaled(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """[V] float32: (x - maximum) / temperature of processed logits; greedy: temperature 1. In
        a row with +inf only the lowest such id is kept."""
        values = self.edited(logits, output)
        highest = values.max()
        if highest == torch.inf:
            return _alone(int(values.argmax()), len(values))
        if highest == -torch.inf:
            return values
        return (values - highest) / _single(1.0 if self.is_greedy else self.temperature)

    def edited(self, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """[V] float32: logits after all processing that precedes the temperature."""
        forced = self.forced(output)
        if forced is not None:
            return _alone(forced, len(logits))
        values = usable(logits)
        values = self._biased(values)
        values[self._excluded(output, len(values))] = -torch.inf
        values = self._without_ends(values, output)
        return self._penalised(values, output)

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the token forced by a spent thinking budget, or None."""
        budget = self.params.thinking_token_budget
        if budget is None or self.thinking is None:
            return None
        return forced_token(self.thinking, budget, self.prompt, output)

    def _biased(self, values: torch.Tensor) -> torch.Tensor:
        bias = self.params.logit_bias
        if not bias:
            return values
        _expect_in_vocabulary("logit_bias", bias, len(values))
        added = torch.stack([_single(value) for value in bias.values()])
        return values.index_add(0, torch.tensor(list(bias)), added)

    def _excluded(self, output: Sequence[int], vocab_size: int) -> torch.Tensor:
        """[V] bool: tokens that are not allowed or would complete a bad word."""
        allowed, excluded = self.params.allowed_token_ids, torch.zeros(vocab_size, dtype=torch.bool)
        if allowed is not None:
            _expect_in_vocabulary("allowed_token_ids", allowed, vocab_size)
            excluded[:] = True
            excluded[list(allowed)] = False
        tokens = (*self.prompt, *output)
        for word in self._bad_words:
            _expect_in_vocabulary("bad_words and bad_token_ids", word, vocab_size)
            beginning, last = word[:-1], word[-1]
            if tokens[max(0, len(tokens) - len(beginning)) :] == beginning:
                excluded[last] = True
        return excluded

    def _without_ends(self, values: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """Mask stop tokens before ``min_tokens``, unless no other token is left."""
        if len(output) >= self.params.min_tokens:
            return values
        others = values.clone()
        others[[token for token in self._end_ids if token < len(values)]] = -torch.inf
        return values if others.max() == -torch.inf else others

    def _penalised(self, values: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        params, vocab_size = self.params, len(values)
        if params.repetition_penalty != 1:
            is_seen = _counts((*self.prompt, *output), vocab_size) > 0
            penalty = _single(params.repetition_penalty)
            smaller = torch.where(values > 0, values / penalty, values * penalty)
            values = torch.where(is_seen, smaller, values)
        if params.presence_penalty or params.frequency_penalty:
            counts = _counts((*self.prompt[params.prompt_ignore_length :], *output), vocab_size)
            penalised = values - _single(params.presence_penalty)
            penalised = penalised - _single(params.frequency_penalty) * counts
            values = torch.where(counts > 0, penalised, values)
        return usable(values)  # -inf + inf of a masked token is NaN

    def _truncate(self, scores: torch.Tensor) -> torch.Tensor:
        """Truncate scores [V] by top-k, then top-p, then min-p; of equal scores the lowest ids are
        kept."""
        params = self.params
        ordered, order = scores.sort(descending=True, stable=True)
        if params.top_k:
            ordered[params.top_k :] = -torch.inf
        weights = ordered.double().exp()
        if params.top_p is not None and params.top_p < 1:
            mass_before = weights.cumsum(0) - weights
            is_outside = mass_before >= _single(params.top_p) * weights.sum()
            is_outside[0] = False
            ordered[is_outside] = -torch.inf
        if params.min_p:
            ordered[weights < _single(params.min_p)] = -torch.inf
        return torch.empty_like(scores).scatter(0, order, ordered)


def _temperature(params: SamplingParams) -> float:
    if params.is_greedy:
        return 0.0
    return 1.0 if params.temperature is None else params.temperature


def _alone(token: int, vocab_size: int) -> torch.Tensor:
    values = torch.full((vocab_size,), -torch.inf)
    values[token] = 0.0
    return values


def _single(value: float) -> torch.Tensor:
    """Round to float32 as stored on the device, clamped to its range."""
    return torch.tensor(within_float32(value), dtype=torch.float32)


def _counts(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """[V] float32: number of occurrences of each token id."""
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size)
    return counts[:vocab_size].to(torch.float32)


def _expect_served(params: SamplingParams, thinking: Thinking | None) -> None:
    problems = [
        f"{name}={format_value(value)}"
        for name, value in params.requested_options().items()
        if name in _NEITHER_SERVED_NOR_IDLE
    ]
    problems += [
        f"bad_words={format_value(word)} (expected its token ids)"
        for word in params.bad_words
        if isinstance(word, str)
    ]
    if params.thinking_token_budget is not None and thinking is None:
        budget = params.thinking_token_budget
        problems.append(f"thinking_token_budget={budget} (expected the ids of the thinking tags)")
    expect(
        not problems,
        RequestError,
        f"non-speculative decoding: not supported: {', '.join(problems)}",
    )


def _expect_in_vocabulary(option: str, ids: Collection[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    expect(
        highest < vocab_size,
        RequestError,
        f"{option}: {highest} is outside the vocabulary of {vocab_size}",
    )

"""Speculative decoding at its plainest: guess some tokens, read them all at once, keep what holds.

A forward pass over several tokens takes hardly longer than one over a single token. So somebody
cheap drafts what may follow (`Drafter`), the target reads all drafts in one pass (`Scorer`), and
its rows say how many of them stand (`coupled`, `rejection`) and what follows the last that does. A
step emits that token at least, and one more for every draft that stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.infer.decoding import Continuation, Decoded, as_language_model, device_of
from mtp_plugin.infer.kv_cache import DynamicKVCache
from mtp_plugin.infer.language_model import LanguageModel
from mtp_plugin.infer.noise import Role, gumbel, uniform
from mtp_plugin.infer.sampling_rule import NO_TOKEN, SamplingRule
from mtp_plugin.requests.options import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Draft(NamedTuple):
    """Guesses of what follows a text."""

    token_ids: list[int]
    probabilities: list[torch.Tensor] | None = None
    """[V] each, what a guess was drawn from; None: nobody drew, each was the only one."""


class Drafter(Protocol):
    """Whoever guesses: bad guesses cost time, and change no text."""

    def draft(self, rule: SamplingRule, output: Sequence[int], num_drafts: int) -> Draft:
        """At most so many tokens that may follow the prompt of the rule and this output."""
        ...


Verify = Callable[[SamplingRule, torch.Tensor, Draft, Sequence[int]], list[int]]
"""The request's rule, the target's rows [K + 1, V], its drafts and the output before them -> the
run of tokens that a step emits: the drafts that stand, then one token of the target's."""


class Speculated(NamedTuple):
    """A text and how it came about."""

    decoded: Decoded
    emitted: list[int]
    """Tokens of every step, a forward pass of the target each; the first one reads the prompt."""
    drafted: list[int]
    """Drafts of every step."""
    num_accepted: int
    """Drafts that stand in the text."""

    @property
    def num_steps(self) -> int:
        """Forward passes of the target."""
        return len(self.emitted)


def speculative_decode(
    model: LanguageModel | PreTrainedModel,
    drafter: Drafter,
    text: Continuation,
    *,
    num_drafts: int,
    verify: Verify | None = None,
) -> Speculated:
    """Continue a prompt with the help of drafts.

    Args:
        model: the target.
        text: the prompt and its options.
        num_drafts: in a step at most; the options may allow fewer.
        verify: `rejection`, or `coupled` (None), whose text is that of `decode`.

    Raises:
        ConfigError: a negative number of drafts.
    """
    expect(num_drafts >= 0, ConfigError, f"num_drafts: expected at least 0, got {num_drafts}")
    num_drafts = _allowed(num_drafts, text.params)
    scorer, verify = Scorer(model), coupled if verify is None else verify
    num_accepted = 0
    emitted: list[int] = []
    drafted: list[int] = []
    while text.finish_reason is None:
        draft = drafter.draft(text.rule, text.output, num_drafts)
        num_rows = len(draft.token_ids) + 1
        rows = scorer.score([*text.tokens, *draft.token_ids], num_rows)
        if not emitted:
            text.tell_prompt(rows)
        rows = rows[-num_rows:].clone()  # the prompt's rows are not kept alive
        run = verify(text.rule, rows, draft, text.output)
        num_standing, length = len(run) - 1, len(text.output)
        text.extend(run, rows, num_standing)
        emitted.append(len(text.output) - length)
        drafted.append(len(draft.token_ids))
        num_accepted += min(num_standing, emitted[-1])
    return Speculated(text.decoded(), emitted, drafted, num_accepted)


def _allowed(num_drafts: int, params: SamplingParams) -> int:
    """So many drafts of a step, as far as a request's options want them."""
    if not params.speculate:
        return 0
    return num_drafts if params.max_draft_len is None else min(num_drafts, params.max_draft_len)


class Scorer:
    """A model and what it has read."""

    def __init__(self, model: LanguageModel | PreTrainedModel) -> None:
        self._model, self._device = as_language_model(model), device_of(model)
        self._cache = DynamicKVCache()
        self._read: list[int] = []

    def score(self, tokens: Sequence[int], num_rows: int = 1) -> torch.Tensor:
        """Rows [N, V] behind the last N tokens: those not read before, and ``num_rows`` at least.

        What was read and is not among the tokens, as drafts that did not stand, is forgotten.
        """
        kept, most = 0, min(len(self._read), len(tokens) - num_rows)
        while kept < most and self._read[kept] == tokens[kept]:
            kept += 1
        self._cache.crop(len(self._read) - kept)
        self._read = list(tokens)
        query = torch.tensor([self._read[kept:]], device=self._device)
        return self._model.forward(query, self._cache)[0]


# --- which drafts stand ---


def coupled(
    rule: SamplingRule, rows: torch.Tensor, draft: Draft, output: Sequence[int]
) -> list[int]:
    """A draft stands while it is what the target chooses there: the text is the target's own.

    The noise of a draw depends on its place alone, so a drafter with the same noise often guesses
    right. Greedy decoding is the same without noise.
    """
    run: list[int] = []
    for row, guess in zip(rows, (*draft.token_ids, NO_TOKEN), strict=True):
        run.append(rule.choose(row, [*output, *run]))
        if run[-1] != guess:
            break
    return run


def rejection(
    rule: SamplingRule, rows: torch.Tensor, draft: Draft, output: Sequence[int]
) -> list[int]:
    """A draft drawn from q stands with probability p / q, else the token is drawn from what of p
    lies above q: the text is another than the target's own, its distribution the same. The first
    token is the target's own where nobody drafted for it."""
    if rule.is_greedy or not (draft.token_ids or output):
        return coupled(rule, rows, draft, output)
    run: list[int] = []
    for place, row in enumerate(rows):
        index = len(rule.prompt) + len(output) + place
        target = rule.probabilities(row, [*output, *run])
        if target.isnan().any():
            return [*run, NO_TOKEN]
        left = target
        if place < len(draft.token_ids):
            guess = draft.token_ids[place]
            drafted = _one_point(guess, target)
            if draft.probabilities is not None:
                drafted = draft.probabilities[place]
            chance = uniform(rule.seed, index, 1, Role.ACCEPTANCE)
            if chance < target[guess] / drafted[guess]:
                run.append(guess)
                continue
            left = (target - drafted).clamp_min(0)
            left = left if left.sum() > 0 else target
        noise = gumbel(rule.seed, index, len(left), Role.RESIDUAL)
        run.append(int((left.log() + noise).argmax()))
        break
    return run


def _one_point(token: int, like: torch.Tensor) -> torch.Tensor:
    probabilities = torch.zeros_like(like)
    probabilities[token] = 1
    return probabilities

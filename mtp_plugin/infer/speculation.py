"""Minimal speculative decoding: draft tokens, score all of them in one forward pass, verify.

A forward pass over several tokens takes hardly longer than over one. A cheap `Drafter` proposes
draft tokens, the target scores all of them in one pass (`Scorer`), and verification (`coupled`,
`rejection`) determines how many are accepted. A step generates the accepted drafts and one bonus
token from the target.
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
    """Draft tokens of one step."""

    token_ids: list[int]
    probabilities: list[torch.Tensor] | None = None
    """[V] each, the distribution each draft was sampled from; None: drafts are deterministic."""


class Drafter(Protocol):
    """Proposes draft tokens; bad drafts cost time but do not change the output."""

    def draft(self, rule: SamplingRule, output: Sequence[int], num_drafts: int) -> Draft:
        """Return at most ``num_drafts`` tokens that may follow the rule's prompt and ``output``."""
        ...


Verify = Callable[[SamplingRule, torch.Tensor, Draft, Sequence[int]], list[int]]
"""(rule, target logits [K + 1, V], drafts, output before them) -> output tokens of the step: the
accepted drafts and one token from the target."""


class Speculated(NamedTuple):
    """Result of speculative decoding with its statistics."""

    decoded: Decoded
    emitted: list[int]
    """Output tokens per step (one forward pass of the target); the first step is the prefill."""
    drafted: list[int]
    """Draft tokens per step."""
    num_accepted: int
    """Number of accepted drafts in the output."""

    @property
    def num_steps(self) -> int:
        """Number of forward passes of the target."""
        return len(self.emitted)


def speculative_decode(
    model: LanguageModel | PreTrainedModel,
    drafter: Drafter,
    text: Continuation,
    *,
    num_drafts: int,
    verify: Verify | None = None,
) -> Speculated:
    """Decode a request speculatively.

    Args:
        model: the target.
        text: the request.
        num_drafts: maximum number of drafts per step; the request may set a lower limit.
        verify: `rejection`, or `coupled` (default), whose output is that of `decode`.

    Raises:
        ConfigError: ``num_drafts`` is negative.
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
            text.add_prompt_logprobs(rows)
        rows = rows[-num_rows:].clone()  # the prompt's rows are not kept alive
        run = verify(text.rule, rows, draft, text.output)
        num_kept, length = len(run) - 1, len(text.output)
        text.extend(run, rows, num_kept)
        emitted.append(len(text.output) - length)
        drafted.append(len(draft.token_ids))
        num_accepted += min(num_kept, emitted[-1])
    return Speculated(text.decoded(), emitted, drafted, num_accepted)


def _allowed(num_drafts: int, params: SamplingParams) -> int:
    """Limit the number of drafts by the request's options."""
    if not params.speculate:
        return 0
    return num_drafts if params.max_draft_len is None else min(num_drafts, params.max_draft_len)


class Scorer:
    """A model with the KV cache of one sequence."""

    def __init__(self, model: LanguageModel | PreTrainedModel) -> None:
        self._model, self._device = as_language_model(model), device_of(model)
        self._cache = DynamicKVCache()
        self._read: list[int] = []

    def score(self, tokens: Sequence[int], num_rows: int = 1) -> torch.Tensor:
        """Return the logits [N, V] of the tokens not in the cache, and of at least ``num_rows``.

        Cached tokens that differ from ``tokens``, such as rejected drafts, are dropped.
        """
        kept, most = 0, min(len(self._read), len(tokens) - num_rows)
        while kept < most and self._read[kept] == tokens[kept]:
            kept += 1
        self._cache.crop(len(self._read) - kept)
        self._read = list(tokens)
        query = torch.tensor([self._read[kept:]], device=self._device)
        return self._model.forward(query, self._cache)[0]


# --- verification ---


def coupled(
    rule: SamplingRule, rows: torch.Tensor, draft: Draft, output: Sequence[int]
) -> list[int]:
    """Accept drafts as long as they equal the target's own token: the output is the target's.

    The noise depends only on seed, token id and position, so that a drafter with the same noise
    often samples the same token. Greedy decoding is the case without noise.
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
    """Standard rejection sampling: accept a draft from q with probability min(1, p / q).

    After a rejection, sample from the recovered distribution max(0, p - q). The output has the
    target's distribution. A first token without drafts is the target's own.
    """
    if rule.is_greedy or not (draft.token_ids or output):
        return coupled(rule, rows, draft, output)
    run: list[int] = []
    for place, row in enumerate(rows):
        index = len(rule.prompt) + len(output) + place
        target = rule.probabilities(row, [*output, *run])
        if target.isnan().any():
            return [*run, NO_TOKEN]
        recovered = target
        if place < len(draft.token_ids):
            guess = draft.token_ids[place]
            drafted = _one_point(guess, target)
            if draft.probabilities is not None:
                drafted = draft.probabilities[place]
            chance = uniform(rule.seed, index, 1, Role.ACCEPTANCE)
            if chance < target[guess] / drafted[guess]:
                run.append(guess)
                continue
            recovered = (target - drafted).clamp_min(0)
            recovered = recovered if recovered.sum() > 0 else target
        noise = gumbel(rule.seed, index, len(recovered), Role.RESIDUAL)
        run.append(int((recovered.log() + noise).argmax()))
        break
    return run


def _one_point(token: int, like: torch.Tensor) -> torch.Tensor:
    probabilities = torch.zeros_like(like)
    probabilities[token] = 1
    return probabilities

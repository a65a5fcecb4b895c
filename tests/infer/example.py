"""Processing and sampling of one row of one request, written over lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtp_plugin.infer import Thinking
from mtp_plugin.requests.options import SamplingParams
from tests.ops.sampling import example as draws
from tests.ops.sampling.example import rounded


def choose(
    row: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    thinking: Thinking | None = None,
) -> int:
    """The token after prompt and output; the seed is required; -1: no usable value."""
    forced = forced_id(params, prompt, output, thinking)
    if forced is not None:
        return forced
    temperature = 1.0 if params.temperature is None else params.temperature
    options = draws.Options(
        temperature=0.0 if params.is_greedy else rounded(temperature),
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else rounded(params.top_p),
        min_p=rounded(params.min_p or 0.0),
        seed=(params.seed or 0) % 2**64,
    )
    index = len(prompt) + len(output)
    return draws.draw(edited(row, params, prompt, output, end_ids), options, index, 0)


def edited(
    row: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int] = (),
) -> list[float]:
    """The row as it is before temperature."""
    text = [*prompt, *output]
    values = [-math.inf if math.isnan(value) else rounded(value) for value in row]
    for token, bias in (params.logit_bias or {}).items():
        values[token] = rounded(values[token] + rounded(bias))
    for token in range(len(values)):
        allowed = params.allowed_token_ids
        if (allowed is not None and token not in allowed) or token in params.bad_token_ids:
            values[token] = -math.inf
    for word in params.bad_words:
        if [*text, word[-1]][-len(word) :] == list(word):
            values[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
        others = [-math.inf if t in ends else value for t, value in enumerate(values)]
        values = others if max(others) > -math.inf else values
    return [_penalised(token, value, params, prompt, output) for token, value in enumerate(values)]


def _penalised(
    token: int,
    value: float,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
) -> float:
    if token in (*prompt, *output):
        penalty = rounded(params.repetition_penalty)
        value = rounded(value / penalty if value > 0 else value * penalty)
    count = [*prompt[params.prompt_ignore_length :], *output].count(token)
    if count == 0:
        return value
    value = rounded(value - rounded(params.presence_penalty))
    return rounded(value - rounded(rounded(params.frequency_penalty) * count))


def forced_id(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    thinking: Thinking | None,
) -> int | None:
    """The id that the spent budget demands: by reading the whole text again, word by word."""
    budget = params.thinking_token_budget
    if budget is None or thinking is None:
        return None
    text, end = [*prompt, *output], list(thinking.end)
    at = 0
    while thinking.begin in text[at:]:
        begin = text.index(thinking.begin, at)
        at = begin + 1
        # where the budget is spent, if nothing ends the phase before
        limit = max(at, len(prompt)) + budget
        natural = next(
            (n for n in range(at + len(end), limit + 1) if text[n - len(end) : n] == end), None
        )
        if natural is not None and natural <= len(text):
            at = natural
            continue
        if limit > len(text):
            return None
        under_way = max(n for n in range(len(end)) if text[max(at, limit - n) : limit] == end[:n])
        at = limit + len(end) - under_way
        if at > len(text):
            return end[under_way + len(text) - limit]
    return None

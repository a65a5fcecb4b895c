"""Greedy decoding without drafts, which returns only tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mtp_plugin.infer import decode
from mtp_plugin.requests.options import SamplingParams


def greedy_decode(
    model: Any,
    prompt: Sequence[int],
    count: int,
    eos_token_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The tokens that a prompt is continued with, ``count`` at most."""
    params = SamplingParams(max_new_tokens=count, min_tokens=min_tokens)
    return decode(model, prompt, params, end_ids=eos_token_ids).token_ids

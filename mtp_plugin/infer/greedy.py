"""Greedy decoding of one prompt: what speculative decoding has to reproduce token for token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypeIs

from mtp_plugin.errors import RequestError
from mtp_plugin.infer.kv_cache import DynamicKVCache
from mtp_plugin.infer.language_model import LanguageModel, TransformersLanguageModel
from mtp_plugin.infer.sample_strategy import GreedySampleStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def greedy_decode(
    model: LanguageModel | PreTrainedModel,
    prompt_ids: list[int],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    choose: Callable[[torch.Tensor, int], int] | None = None,
) -> list[int]:
    """The continuation of a prompt, greedy unless ``choose`` draws it.

    Args:
        model: a language model, or a transformers causal language model as it is.
        prompt_ids: at least one token.
        max_new_tokens: how many tokens to emit at most.
        eos_token_ids: ids that end the run; the one that does is the last token returned.
        min_tokens: how many tokens to emit before one of those ids may be chosen.
        choose: a row of logits [V] and the absolute index of the token behind it -> the token, as
            `SeededDraws.choose`; None: the first choice.

    Returns:
        The emitted tokens, without the prompt.

    Raises:
        RequestError: an empty prompt or a negative count.
    """
    problems = [] if prompt_ids else ["prompt_ids: expected at least one token, got none"]
    problems += [
        f"{name}: expected at least 0, got {value}"
        for name, value in (("max_new_tokens", max_new_tokens), ("min_tokens", min_tokens))
        if value < 0
    ]
    if problems:
        raise RequestError("; ".join(problems))
    device = None
    if _is_of_transformers(model):
        device = model.device
        model = TransformersLanguageModel(model)
    ends = sorted(set(eos_token_ids))
    greedy, kv_cache = GreedySampleStrategy(), DynamicKVCache()
    emitted: list[int] = []
    query = prompt_ids
    while len(emitted) < max_new_tokens:
        logits = model.forward(torch.tensor([query], device=device), kv_cache)[:, -1]
        if len(emitted) < min_tokens:
            logits[:, ends] = -float("inf")
        index = len(prompt_ids) + len(emitted)
        token = int(greedy.sample(logits)) if choose is None else choose(logits[0], index)
        emitted.append(token)
        if token in ends:
            break
        query = [token]
    return emitted


def _is_of_transformers(model: LanguageModel | PreTrainedModel) -> TypeIs[PreTrainedModel]:
    """Where the package is not loaded, no model is of its classes."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)

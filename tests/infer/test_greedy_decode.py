from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from mtp_plugin.infer import TransformersLanguageModel
from tests.greedy import greedy_decode

Target = Callable[[str], PreTrainedModel]
PROMPT = [3, 9, 27, 81]
FAMILIES = ["glm4_moe", "deepseek_v3", "mimo", "qwen3_next"]


def recomputed(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The same text without any cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_equals_full_recomputation(target: Target, family: str, length: int) -> None:
    model = target(family)
    assert greedy_decode(model, PROMPT[:length], 12) == recomputed(model, PROMPT[:length], 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate(target: Target, family: str) -> None:
    model, prompt = target(family), torch.tensor([PROMPT])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert greedy_decode(model, PROMPT, 10) == text[0, 4:].tolist()


def test_takes_language_models_too(target: Target) -> None:
    model = target("mimo")
    wrapped = TransformersLanguageModel(model)
    assert greedy_decode(wrapped, PROMPT, 5) == greedy_decode(model, PROMPT, 5)


def test_the_end_token_is_included(target: Target) -> None:
    model = target("glm4_moe")
    text = greedy_decode(model, PROMPT, 10)
    end = text[4]
    cut = text[: text.index(end) + 1]
    assert greedy_decode(model, PROMPT, 10, [end]) == cut
    assert greedy_decode(model, PROMPT, 10, {511, end}) == cut
    assert greedy_decode(model, PROMPT, 10, ()) == text


def test_the_models_own_end_token_counts_only_when_given(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target("glm4_moe")
    text = greedy_decode(model, PROMPT, 6)
    monkeypatch.setattr(model.config, "eos_token_id", text[0])
    assert greedy_decode(model, PROMPT, 6) == text


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 8])
def test_min_tokens_masks_every_end_token(target: Target, min_tokens: int) -> None:
    model = target("deepseek_v3")
    free = greedy_decode(model, PROMPT, 8)
    ends = free[:3]
    text = greedy_decode(model, PROMPT, 8, ends, min_tokens)
    # the same rule, without a cache
    expected: list[int] = []
    with torch.no_grad():
        while len(expected) < 8 and not (expected and expected[-1] in ends):
            logits = model(torch.tensor([PROMPT + expected])).logits[0, -1]
            if len(expected) < min_tokens:
                logits[ends] = -torch.inf
            expected.append(int(logits.argmax()))
    assert text == expected
    assert not set(text[:min_tokens]) & set(ends)

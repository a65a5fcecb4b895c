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

"""The same options in transformers: its processors and its warpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mtp_plugin.infer import SamplingRule
from mtp_plugin.requests.options import SamplingParams

PROMPT = [3, 9, 27, 81, 9]


END_ID = 11


def processors(params: SamplingParams) -> LogitsProcessorList:
    """Those of the requested options, in the order of `SamplingRule`."""
    words = [list(word) for word in params.bad_words]
    found = {
        "logit_bias": lambda bias: SequenceBiasLogitsProcessor(
            [[[token], value] for token, value in bias.items()]
        ),
        "bad_words": lambda _: NoBadWordsLogitsProcessor(words),
        "bad_token_ids": SuppressTokensLogitsProcessor,
        "min_tokens": lambda count: MinNewTokensLengthLogitsProcessor(len(PROMPT), count, END_ID),
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    options = params.requested_options()
    return LogitsProcessorList(
        made(options[name]) for name, made in found.items() if name in options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4, "temperature": 1.0},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8},
        {"temperature": 1.8, "top_k": 400, "top_p": 0.3},
        {"temperature": 1.0, "logit_bias": {token: token / 50 - 3 for token in range(1, 300, 2)}},
        {"temperature": 1.0, "bad_words": ((5, 6), (PROMPT[-1], 7), (8, 9, 10))},
        {"temperature": 1.0, "bad_token_ids": tuple(range(60))},
        {"temperature": 1.0, "min_tokens": 3},
        {
            "temperature": 0.9,
            "top_p": 0.7,
            "min_tokens": 9,
            "repetition_penalty": 1.5,
            "logit_bias": {END_ID: 9.0, 20: 4.0},
            "bad_words": ((PROMPT[-1], 20),),
            "bad_token_ids": (21, 22),
        },
    ],
)
def test_distributions(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    chain = processors(params)
    assert len(chain) == len(options)
    rng = torch.Generator().manual_seed(0)
    rule = SamplingRule(params, PROMPT, end_ids=(END_ID,))
    changed = 0
    for place in range(40):
        row = torch.randn(300, generator=rng) * 3
        # words that were begun among them, and none
        output = [*torch.randint(0, 300, (place % 6,), generator=rng).tolist(), *[5, 8, 9][:place]]
        output = output[: place % 7]
        expected = chain(torch.tensor([PROMPT + output]), row.unsqueeze(0).clone())[0].softmax(0)
        found = rule.probabilities(row, output).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert torch.equal(found > 0, expected > 0)
        changed += not torch.allclose(found, row.softmax(0), atol=1e-6)
    assert changed > 3

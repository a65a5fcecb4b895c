"""What the plain inferencer and its parts refuse, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from mtp_plugin.errors import MTPPluginError
from mtp_plugin.infer import (
    BasicInferencer,
    Continuation,
    DynamicKVCache,
    GreedySampleStrategy,
    KVState,
    RandomSampleStrategy,
    RequestSampleStrategy,
    SamplingRule,
    TransformersLanguageModel,
    decode,
    speculative_decode,
)
from mtp_plugin.requests.options import SamplingParams
from tests.infer.models import TableModel
from tests.infer.test_inferencer import CountingModel

GREEDY = GreedySampleStrategy()
MODEL = TableModel(seed=1)
NO_ROWS = "logits: expected [B, V] with at least"
UNSERVED = "RequestError: non-speculative decoding: not supported: "


def ids(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def decode_batch(query: torch.Tensor, count: int = 3, eos: int | None = 1) -> object:
    model = CountingModel(*([] if eos is None else [eos]))
    return BasicInferencer(model).decode(query, DynamicKVCache(), count, GREEDY)


def prefill(query: torch.Tensor) -> object:
    return BasicInferencer(CountingModel(1)).prefill(query, DynamicKVCache(), GREEDY)


def states(tokens: int, width: int = 4, dtype: torch.dtype = torch.float32) -> list[KVState]:
    return [KVState(torch.zeros(2, 2, tokens, 4), torch.zeros(2, 2, tokens, width, dtype=dtype))]


def update(*updates: list[KVState], crop: int = 0) -> None:
    """Updates of one cache, which holds the same after one that is refused; then a crop."""
    cache = DynamicKVCache()
    for number, kv_states in enumerate(updates):
        before = cache.get_num_tokens()
        try:
            cache.update(kv_states)
        except MTPPluginError:
            assert (number + 1, cache.get_num_tokens()) == (len(updates), before)
            raise
    cache.crop(crop)


def rule(vocab_size: int = 0, **options: Any) -> None:
    made = SamplingRule(SamplingParams(**options), [0])
    if vocab_size:
        made.choose(torch.zeros(vocab_size), [])


def of_request(*shape: int) -> torch.Tensor:
    return RequestSampleStrategy(SamplingRule(SamplingParams(), [0])).sample(torch.zeros(shape))


def recurrent() -> object:
    with torch.device("meta"):
        return TransformersLanguageModel(Qwen3NextForCausalLM(Qwen3NextConfig(num_hidden_layers=4)))


def continuation(mode: str, given: str) -> object:
    params = SamplingParams(logprobs=0, logprobs_mode=mode)
    return Continuation([1], params, logprobs_mode=given)


# fmt: off
ROWS: list[tuple[Callable[[], object], str]] = [
    (lambda: decode_batch(ids(1, 1), eos=None),
     "CheckpointError: CountingModel: expected an eos_token_id, got none"),
    (lambda: decode_batch(ids(1, 1), 0), "ConfigError: max_new_tokens: expected at least 1, got 0"),
    (lambda: decode_batch(ids(1, 2)), "query_token_ids: expected [B, 1], got [1, 2]"),
    (lambda: decode_batch(ids(0, 1)), "query_token_ids: expected [B, 1], got [0, 1]"),
    (lambda: prefill(ids(1, 0)), "expected [B, Q] with at least one token, got [1, 0]"),
    (lambda: update([]), "TensorContractError: kv_states: expected at least 1 layer"),
    (lambda: update(states(3), states(1) * 2),
     "kv_states: expected 1 layer(s), one entry each, got 2"),
    (lambda: update([*states(2), *states(3)]),
     "kv_states: expected the same batch and tokens in all layers, got (batch, tokens) [(2, 2), "
     "(2, 3)]"),
    (lambda: update([KVState(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4))]),
     "expected [batch, heads, tokens, head_dim"),
    (lambda: update(states(1), states(1, dtype=torch.float64)),
     "as stored, got [2, 2, tokens, 4] torch.float64 on cpu"),
    (lambda: update(states(3), crop=4),
     "num_tokens_crop: expected 0 to 3, the number of stored tokens, got 4"),
    (recurrent,
     "UnsupportedModelError: Qwen3NextForCausalLM: expected layers of types full_attention, "
     "sliding_attention, chunked_attention, got linear_attention"),
    (lambda: GREEDY.sample(torch.zeros(3)), NO_ROWS),
    (lambda: RandomSampleStrategy().sample(torch.zeros(2, 0)), NO_ROWS),
    (lambda: GREEDY.sample(torch.tensor([[0.0, 1.0], [math.nan, -math.inf]])),
     "in every row, got none in rows [1]"),
    (lambda: RandomSampleStrategy(0.0),
     "ConfigError: temperature: expected a finite number above 0, got 0.0"),
    (lambda: RandomSampleStrategy(math.nan),
     "temperature: expected a finite number above 0, got nan"),
    (lambda: of_request(2, 3), "TensorContractError: logits: expected [1, V], got [2, 3]"),
    (lambda: rule(n=2), UNSERVED + "n=2"),
    (lambda: rule(guided_decoding="x" * 999), f"{UNSERVED}guided_decoding='{'x' * 200}'..."),
    (lambda: rule(bad_words=["no"]), UNSERVED + "bad_words='no' (expected its token ids)"),
    (lambda: rule(thinking_token_budget=3),
     UNSERVED + "thinking_token_budget=3 (expected the ids of the thinking tags)"),
    (lambda: rule(4, logit_bias={4: 1.0}),
     "RequestError: logit_bias: 4 is outside the vocabulary of 4"),
    (lambda: rule(4, allowed_token_ids=[4]), "allowed_token_ids: 4 is outside the vocabulary of 4"),
    (lambda: rule(4, bad_words=[(4, 1)]),
     "bad_words and bad_token_ids: 4 is outside the vocabulary of 4"),
    (lambda: decode(MODEL, [], SamplingParams()),
     "RequestError: prompt_ids: expected at least one token, got none"),
    (lambda: decode(MODEL, [1], SamplingParams(stop="x")),
     "stop=('x',): expected a tokenizer, got none"),
    (lambda: Continuation([1], SamplingParams()).decoded(),
     "the request has not finished after 0 tokens"),
    (lambda: continuation("raw", "processed"),
     "RequestError: logprobs_mode='raw': expected 'processed', the"),
    (lambda: speculative_decode(MODEL, None, Continuation([1], SamplingParams()), num_drafts=-1),  # type: ignore[arg-type]
     "ConfigError: num_drafts: expected at least 0, got -1"),
]
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_call_is_refused(row: tuple[Callable[[], object], str]) -> None:
    call, message = row
    with pytest.raises(MTPPluginError) as refused:
        call()
    assert message in f"{type(refused.value).__name__}: {refused.value}"


def test_modes_of_log_probabilities_that_agree() -> None:
    continuation("raw", "raw")
    continuation("processed", "processed")

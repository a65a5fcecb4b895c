from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from mtp_plugin.errors import CheckpointError
from mtp_plugin.infer import (
    BasicInferencer,
    DynamicKVCache,
    GreedySampleStrategy,
    Inferencer,
    KVCache,
    KVState,
    LanguageModel,
    TransformersLanguageModel,
)

Target = Callable[[str], PreTrainedModel]
PROMPT = torch.tensor([[3, 9, 27, 81, 243], [5, 6, 7, 8, 9]])
GREEDY = GreedySampleStrategy()


class CountingModel:
    """After any token t says t + 1, in a vocabulary of 10; keeps the tokens it saw as states."""

    def __init__(self, *eos: int) -> None:
        self.eos = eos
        self.fed: list[list[list[int]]] = []

    @property
    def eos_token_id(self) -> int:
        if not self.eos:
            raise CheckpointError("CountingModel: expected an eos_token_id, got none")
        return self.eos[0]

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        self.fed.append(query_token_ids.tolist())
        states = query_token_ids[:, None, :, None].float()
        kv_cache.update([KVState(states, states)])
        return torch.nn.functional.one_hot((query_token_ids + 1) % 10, 10).float()


class InferencerContract:
    """What every `Inferencer` promises; subclasses make one around a model."""

    def make_inferencer(self, model: LanguageModel, **kwargs: object) -> Inferencer:
        raise NotImplementedError

    @pytest.fixture(params=["glm4_moe", "deepseek_v3"])
    def model(self, request: pytest.FixtureRequest, target: Target) -> PreTrainedModel:
        return target(request.param)

    def test_prefill(self, model: PreTrainedModel) -> None:
        cache = DynamicKVCache()
        inferencer = self.make_inferencer(TransformersLanguageModel(model))
        output = inferencer.prefill(PROMPT, cache, GREEDY)
        expected = model(PROMPT).logits
        torch.testing.assert_close(output.token_logits, expected, rtol=0, atol=1e-5)
        assert torch.equal(output.token_ids, expected[:, -1:].argmax(dim=-1))
        assert cache.get_num_tokens() == 5

    def test_prefill_after_other_tokens(self, model: PreTrainedModel) -> None:
        cache = DynamicKVCache()
        inferencer = self.make_inferencer(TransformersLanguageModel(model))
        inferencer.prefill(PROMPT[:, :2], cache, GREEDY)
        output = inferencer.prefill(PROMPT[:, 2:], cache, GREEDY)
        expected = model(PROMPT).logits[:, 2:]
        torch.testing.assert_close(output.token_logits, expected, rtol=0, atol=1e-5)

    def test_decode_equals_full_recomputation(self, model: PreTrainedModel) -> None:
        cache = DynamicKVCache()
        inferencer = self.make_inferencer(TransformersLanguageModel(model), eos_token_ids=())
        first = inferencer.prefill(PROMPT, cache, GREEDY).token_ids
        output = inferencer.decode(first, cache, 8, GREEDY)
        assert cache.get_num_tokens() == 5 + 8
        text = torch.cat([PROMPT, first], dim=1)
        for step in range(8):
            logits = model(text).logits[:, -1]
            torch.testing.assert_close(output.token_logits[:, step], logits, rtol=0, atol=1e-5)
            assert torch.equal(output.token_ids[:, step], logits.argmax(dim=-1))
            text = torch.cat([text, output.token_ids[:, step : step + 1]], dim=1)

    def test_decode_shapes_and_cache_growth(self) -> None:
        model, cache = CountingModel(9), DynamicKVCache()
        inferencer = self.make_inferencer(model)
        output = inferencer.decode(torch.tensor([[2]]), cache, 4, GREEDY)
        assert output.token_ids.tolist() == [[3, 4, 5, 6]]
        assert output.token_logits.shape == (1, 4, 10)
        # the query and all but the last new token were fed
        assert model.fed == [[[2]], [[3]], [[4]], [[5]]]
        assert cache.get_num_tokens() == 4

    def test_decode_ends_at_the_end_token(self) -> None:
        cache = DynamicKVCache()
        output = self.make_inferencer(CountingModel(5)).decode(
            torch.tensor([[2]]), cache, 100, GREEDY
        )
        assert output.token_ids.tolist() == [[3, 4, 5]]
        assert cache.get_num_tokens() == 3

    def test_an_end_token_at_once(self) -> None:
        output = self.make_inferencer(CountingModel(3)).decode(
            torch.tensor([[2]]), DynamicKVCache(), 100, GREEDY
        )
        assert output.token_ids.tolist() == [[3]]

    def test_an_end_token_as_query_ends_nothing(self) -> None:
        output = self.make_inferencer(CountingModel(5)).decode(
            torch.tensor([[5]]), DynamicKVCache(), 2, GREEDY
        )
        assert output.token_ids.tolist() == [[6, 7]]

    def test_a_batch_ends_with_its_last_row(self) -> None:
        output = self.make_inferencer(CountingModel(7)).decode(
            torch.tensor([[5], [2]]), DynamicKVCache(), 100, GREEDY
        )
        assert output.token_ids.tolist() == [[6, 7, 7, 7, 7], [3, 4, 5, 6, 7]]

    def test_logits_of_ended_rows_match_their_tokens(self) -> None:
        output = self.make_inferencer(CountingModel(7)).decode(
            torch.tensor([[5], [2], [6]]), DynamicKVCache(), 100, GREEDY
        )
        assert output.token_ids.tolist() == [[6, 7, 7, 7, 7], [3, 4, 5, 6, 7], [7, 7, 7, 7, 7]]
        assert torch.equal(output.token_logits.argmax(dim=-1), output.token_ids)

    def test_given_end_tokens_go_before_the_models(self) -> None:
        inferencer = self.make_inferencer(CountingModel(4), eos_token_ids=[8, 6])
        output = inferencer.decode(torch.tensor([[2]]), DynamicKVCache(), 100, GREEDY)
        assert output.token_ids.tolist() == [[3, 4, 5, 6]]

    def test_several_end_tokens_of_a_model(
        self, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = target("mimo")
        free = self.make_inferencer(TransformersLanguageModel(model), eos_token_ids=())
        text = free.decode(PROMPT[:1, :1], DynamicKVCache(), 6, GREEDY).token_ids[0].tolist()
        # the second of two ends, met at its first place in the text
        monkeypatch.setattr(model.config, "eos_token_id", [511, text[3]])
        bound = self.make_inferencer(TransformersLanguageModel(model))
        output = bound.decode(PROMPT[:1, :1], DynamicKVCache(), 6, GREEDY)
        assert output.token_ids[0].tolist() == text[: text.index(text[3]) + 1]

    def test_a_model_without_an_end_token(self) -> None:
        with pytest.raises(CheckpointError, match="expected an eos_token_id, got none"):
            self.make_inferencer(CountingModel()).decode(
                torch.tensor([[2]]), DynamicKVCache(), 3, GREEDY
            )
        endless = self.make_inferencer(CountingModel(), eos_token_ids=())
        output = endless.decode(torch.tensor([[2]]), DynamicKVCache(), 12, GREEDY)
        assert output.token_ids.shape == (1, 12)


class TestBasicInferencer(InferencerContract):
    def make_inferencer(self, model: LanguageModel, **kwargs: object) -> Inferencer:
        return BasicInferencer(model, **kwargs)  # type: ignore[arg-type]

    def test_the_prompt_is_fed_at_once(self) -> None:
        model = CountingModel(1)
        self.make_inferencer(model).prefill(PROMPT % 10, DynamicKVCache(), GREEDY)
        assert len(model.fed) == 1

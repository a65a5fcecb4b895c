from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from mtp_plugin.errors import CheckpointError, TensorContractError
from mtp_plugin.infer import DynamicKVCache, LanguageModel, TransformersLanguageModel

Target = Callable[[str], PreTrainedModel]
IDS = torch.tensor([[3, 9, 27, 81, 243, 217, 139], [5, 6, 7, 8, 9, 10, 11]])


class LanguageModelContract:
    """What every `LanguageModel` promises; subclasses give a model of at least 300 words."""

    @pytest.fixture
    def language_model(self, target: Target) -> LanguageModel:
        raise NotImplementedError

    def logits(self, model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
        return model.forward(ids, DynamicKVCache())

    def test_shapes(self, language_model: LanguageModel) -> None:
        cache = DynamicKVCache()
        logits = language_model.forward(IDS, cache)
        assert logits.shape[:2] == IDS.shape
        assert logits.shape[2] > 300
        assert cache.get_num_tokens() == IDS.shape[1]

    @pytest.mark.parametrize("split", [[1] * 7, [3, 4]])
    def test_cached_equals_recomputed(
        self, language_model: LanguageModel, split: list[int]
    ) -> None:
        cache = DynamicKVCache()
        parts = [language_model.forward(part, cache) for part in IDS.split(split, dim=1)]
        assert cache.get_num_tokens() == 7
        torch.testing.assert_close(
            torch.cat(parts, dim=1), self.logits(language_model, IDS), rtol=0, atol=1e-5
        )

    @pytest.mark.parametrize("cropped", [3, 7])
    def test_cropped_tokens_leave_no_trace(
        self, language_model: LanguageModel, cropped: int
    ) -> None:
        cache = DynamicKVCache()
        wrong = IDS.clone()
        wrong[:, 7 - cropped :] += 20
        language_model.forward(wrong, cache)
        cache.crop(cropped)
        rest = language_model.forward(IDS[:, 7 - cropped :], cache)
        torch.testing.assert_close(
            rest, self.logits(language_model, IDS)[:, 7 - cropped :], rtol=0, atol=1e-5
        )

    def test_rows_are_independent(self, language_model: LanguageModel) -> None:
        alone = torch.cat([self.logits(language_model, row[None]) for row in IDS])
        torch.testing.assert_close(self.logits(language_model, IDS), alone, rtol=0, atol=1e-5)

    def test_no_gradients(self, language_model: LanguageModel) -> None:
        assert not self.logits(language_model, IDS).requires_grad

    @pytest.mark.parametrize("shape", [(7,), (1, 0)])
    def test_bad_query(self, language_model: LanguageModel, shape: tuple[int, ...]) -> None:
        with pytest.raises(TensorContractError) as caught:
            language_model.forward(torch.ones(shape, dtype=torch.int64), DynamicKVCache())
        assert str(caught.value) == (
            f"query_token_ids: expected [B, Q] with at least one token, got {list(shape)}"
        )

    def test_eos(self, language_model: LanguageModel) -> None:
        assert language_model.eos_token_id == 1


class TestGlm4Moe(LanguageModelContract):
    @pytest.fixture
    def language_model(self, target: Target) -> LanguageModel:
        return TransformersLanguageModel(target("glm4_moe"))


class TestLatentAttention(LanguageModelContract):
    @pytest.fixture
    def language_model(self, target: Target) -> LanguageModel:
        return TransformersLanguageModel(target("deepseek_v3"))

    def test_the_cache_holds_latents(self, language_model: LanguageModel) -> None:
        cache = DynamicKVCache()
        language_model.forward(IDS, cache)
        keys, values = cache.get_kv_states()[0]
        assert (keys.shape, values.shape) == ((2, 1, 7, 32), (2, 1, 7, 8))


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "mimo", "qwen3_next"])
def test_logits_are_the_models_own(target: Target, family: str) -> None:
    model = target(family)
    logits = TransformersLanguageModel(model).forward(IDS, DynamicKVCache())
    torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (7, (7,)), ([7, 8], (7, 8))])
def test_end_tokens_of_the_config(
    target: Target, monkeypatch: pytest.MonkeyPatch, eos: object, ids: tuple[int, ...]
) -> None:
    model = target("mimo")
    monkeypatch.setattr(model.config, "eos_token_id", eos)
    language_model = TransformersLanguageModel(model)
    assert language_model.eos_token_ids == ids
    if ids:
        assert language_model.eos_token_id == ids[0]
        return
    with pytest.raises(CheckpointError) as caught:
        _ = language_model.eos_token_id
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "Qwen2ForCausalLM: expected an eos_token_id in the config, got none"
    )

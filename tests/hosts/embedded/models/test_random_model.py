"""Random models without a checkpoint: whole, seeded, and of the requested sizes."""

from __future__ import annotations

import pytest
import torch

from integration.random_models import random_model
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import FAMILIES, LoadedModel
from tests.greedy import greedy_decode


def tensors(model: LoadedModel) -> dict[str, torch.Tensor]:
    found = {f"target.{k}": v for k, v in model.target.state_dict().items()}
    return found | {f"mtp.{k}": v for k, v in model.mtp_layers.state_dict().items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_has_seeded_values(family: str) -> None:
    one, two, other = (tensors(random_model(family, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one)
    assert all(value.isfinite().all() and value.std() > 0 for value in one.values())
    parts = random_model(family).target._keep_in_fp32_modules_strict or ()
    for name, value in one.items():
        assert value.dtype is torch.bfloat16 or any(part in name for part in parts)


def test_sizes_reach_modules_and_facts() -> None:
    model = random_model(
        "glm4_moe",
        num_mtp_layers=2,
        hidden_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    facts = model.facts
    assert (facts.hidden_size, facts.vocab_size, facts.num_hidden_layers) == (32, 100, 3)
    assert (facts.num_mtp_layers, len(model.mtp_layers)) == (2, 2)
    assert facts.dtype is torch.bfloat16
    assert model.lm_head.weight.shape == (100, 32)
    assert model.lm_head.weight is model.embed_tokens.weight
    experts = ["experts" in dict(layer.mlp.named_children()) for layer in model.target.model.layers]
    assert experts == [False, False, True]


def test_an_executor_runs_it_losslessly() -> None:
    model = random_model("glm4_moe", dtype=torch.float32, init_std=0.08, vocab_size=128)
    config = {
        "model": "random",
        "max_seq_len": 64,
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 2},
    }
    prompt = [5, 6, 7]
    with LLM(config, model=model) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    model.set_attn_implementation("sdpa")
    assert output.token_ids == greedy_decode(model.target, prompt, 12)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="dtype: expected float32, float16 or bfloat16"):
        random_model("glm4_moe", dtype=torch.float64)
    with pytest.raises(ConfigError, match="qwen3_next checkpoints always have 1, got 2"):
        random_model("qwen3_next", num_mtp_layers=2)
    with pytest.raises(ConfigError, match="attn_implementation"):
        random_model("glm4_moe", attn_implementation="no-such-attention")

"""Text over fused layers, and how the option chooses them."""

from __future__ import annotations

import pytest

from integration.random_models import write_random_checkpoint
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import FusedModel, fuse, load_model
from tests.ops.on_device import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="models on a CPU need interpreted kernels"
)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def config_of(harness, **options) -> dict:
    return {
        "model": harness.path,
        "max_batch_size": 4,
        "max_num_tokens": 64,
        "max_seq_len": 64,
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 512},
        **options,
    }


def mtp(k: int) -> dict:
    options = {"max_draft_len": k, "use_mtp_vanilla": True, "mtp": {"check_metadata": True}}
    return {"decoding_type": "MTP", **options}


def test_greedy_text_is_the_targets(harness, target, prompts) -> None:
    model = fuse(load_model(harness.path, num_mtp_layers=3), kernels="triton")
    assert model.report.left == ()
    config = config_of(harness, speculative_config=mtp(3))
    with LLM(config, model=model) as llm:
        outputs = llm.generate(prompts[:4], PARAMS)
    for output in outputs:
        assert output.token_ids == target.greedy(output.prompt_token_ids, 12)
    assert sum(output.acceptance.acceptance_length for output in outputs) > len(outputs)


@pytest.mark.parametrize(("option", "fused"), [("auto", False), (False, False), (True, True)])
def test_the_option_on_a_cpu(harness, target, prompts, option, fused) -> None:
    lines: list[str] = []
    config = config_of(harness, device="cpu", fused_layers=option, speculative_config=mtp(2))
    with LLM(config, on_progress=lines.append) as llm:
        assert isinstance(llm.model, FusedModel) is fused
        assert any(line.startswith("fused with torch") for line in lines) is fused
        (output,) = llm.generate([prompts[4]], PARAMS)
    assert output.token_ids == target.greedy(prompts[4], 12)


def test_a_shared_model_must_match_the_config(harness) -> None:
    fused = fuse(load_model(harness.path, num_mtp_layers=0))
    with pytest.raises(ConfigError, match="fused_layers: false was requested, the loaded model is"):
        LLM(config_of(harness, fused_layers=False), model=fused)
    with pytest.raises(ConfigError, match="fused_layers: true was requested, no layer of the glm"):
        LLM(config_of(harness, fused_layers=True), model=harness.model)
    for model in (fused, harness.model):
        with LLM(config_of(harness, fused_layers="auto"), model=model) as llm:
            assert llm.model is model


def test_a_family_that_cannot_be_fused_is_refused(tmp_path) -> None:
    write_random_checkpoint(tmp_path, "qwen3_next")
    config = {"model": str(tmp_path), "max_seq_len": 64, "kv_cache_config": {"max_tokens": 256}}
    with pytest.raises(ConfigError, match="no layer of the qwen3_next model is fused"):
        LLM({**config, "fused_layers": True})
    with LLM({**config, "fused_layers": "auto"}) as llm:
        assert llm.model.facts.model_type == "qwen3_next"

"""The table of families against the MTP model types of vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtp_plugin.checkpoint import DSPARK, FAMILIES, SEPARATE_DRAFTERS, read_checkpoint
from mtp_plugin.hosts.vllm.model_check import serve_command, verdict
from tests.checkpoint.forms import write_file

BY_MODEL_TYPE = {
    "0.32": "bailing_hybrid deepseek_v3 deepseek_v32 deepseek_v4 deepseek_v41 dots3_note "
    "ernie4_5_moe exaone4_5 exaone_moe gemma4_assistant gemma4_unified_assistant glm5_next "
    "glm_moe_dsa hy_v3 hy_v4 inkling_mm_model inkling_model intern_s2_preview interns2_mobius "
    "kimi_k3 longcat_flash minimax_m3_vl nemotron_h nemotron_h_puzzle pangu_ultra_moe qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text step3p5 "
    "step3p7",
    "0.33": "muse_glimmer_assistant step5 step5_vl",
}
"""Model types for which vLLM makes a drafter: those of the oldest version, and what later ones
add."""
BY_ARCHITECTURE = {"glm4_moe", "glm4_moe_lite", "glm_ocr", "mimo", "mimo_v2", "mimo_v2_flash"}
"""Model types of the table that vLLM knows by their architectures."""


def test_every_family_of_vllm_is_in_the_table() -> None:
    known = {name for types in BY_MODEL_TYPE.values() for name in types.split()}
    assert {*FAMILIES, *SEPARATE_DRAFTERS, *DSPARK} == known | BY_ARCHITECTURE


@pytest.mark.parametrize(
    ("model_type", "found", "method"),
    [
        ("llama", "not known, whether it drafts with family llama", None),
        ("deepseek_v41", "refuses method mtp, drafts with dspark", "dspark"),
        ("gemma4_unified_assistant", "drafts for another checkpoint", "mtp"),
        ("muse_glimmer_assistant", "drafts for another checkpoint", "dflash"),
    ],
)
def test_without_mtp_layers_of_its_own(
    tmp_path: Path, model_type: str, found: str, method: str | None
) -> None:
    config = {"model_type": model_type, "num_nextn_predict_layers": 0 if method is None else 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_file(tmp_path / "model.safetensors", {"mtp.0.enorm.weight": ("BF16", [8])})
    checkpoint = read_checkpoint(tmp_path)
    assert verdict(checkpoint) == found
    assert (f'"method": "{method}"' in serve_command(checkpoint)) == (method is not None)


@pytest.mark.parametrize(
    ("model_type", "name", "is_enough"),
    [("hy_v4", "mtp_layers.0.enorm", True), ("glm4_moe", "layers.0.enorm", False)],
)
def test_one_layer_of_two_that_are_declared(
    tmp_path: Path, model_type: str, name: str, is_enough: bool
) -> None:
    """Hy4 declares one more than it has."""
    config = {"model_type": model_type, "num_nextn_predict_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_file(tmp_path / "model.safetensors", {f"model.{name}.weight": ("BF16", [8])})
    problems = [problem.text for problem in read_checkpoint(tmp_path).problems]
    assert any("declares 2 MTP layers" in text for text in problems) != is_enough

"""``mtp-plugin doctor -- sglang serve ...`` with SGLang's own parser, and its loaders."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt import models
from sglang.srt.configs.model_config import ModelConfig

from mtp_plugin.checkpoint import FAMILIES as CHECKPOINTS
from mtp_plugin.hosts.sglang.model_check import FAMILIES, NEWER, ONE_LAYER, problems
from mtp_plugin.hosts.sglang.versions import release
from tests.sglang.test_start import WRONG
from tests.tools.test_launch_line import EAGLE, LINES, check_verdict, run

SGLANG = [row for row in LINES if "sglang" in row[2]]
MODELS = Path(models.__path__[0])
LOADERS = {
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepseek_common.deepseek_weight_loader"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "deepseek_common.deepseek_weight_loader"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "deepseek_common.deepseek_weight_loader"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", None),  # SGLang sets the number to 1
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4_moe"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "glm4_moe_lite"),
    "GlmOcrForConditionalGeneration": ("glm_ocr", "glm_ocr"),
    "LongcatFlashForCausalLM": ("longcat_flash", "longcat_flash_nextn"),
    "MiMoForCausalLM": ("mimo", "mimo_mtp"),
    "MiMoV2ForCausalLM": ("mimo_v2", "mimo_v2_nextn"),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", "mimo_v2_nextn"),
    "Step3p5ForCausalLM": ("step3p5", "step3p5"),
    "Step3p7ForConditionalGeneration": ("step3p7", "step3p5"),
    "InklingForConditionalGeneration": ("inkling_mm_model", "inkling"),
    "BailingMoeV2ForCausalLM": ("", None),
    "BailingMoeForCausalLM": ("", None),
    "BailingMoeV2_5ForCausalLM": ("bailing_hybrid", "bailing_moe_linear"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "ernie4_eagle"),
    "Qwen3NextForCausalLM": ("qwen3_next", None),
    "Qwen3MoeForCausalLM": ("", None),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", None),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", None),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", None),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", None),
    "InternS2PreviewForConditionalGeneration": ("intern_s2_preview", None),
    "ExaoneMoEForCausalLM": ("exaone_moe", None),
    "NemotronHForCausalLM": ("nemotron_h", None),
    "NemotronHPuzzleForCausalLM": ("nemotron_h_puzzle", None),
    "HYV3ForCausalLM": ("hy_v3", None),
}
"""Architecture -> model type (empty: not in our table), module that may refuse several layers."""
NEWER_LOADERS = {
    "BailingMoeV3ForCausalLM": ("bailing_hybrid", "bailing_moe_v3"),
    "ExaoneMoeForCausalLM": ("exaone_moe", None),
    "GigaChat35ForCausalLM": ("", None),
    "Glm5NextForConditionalGeneration": ("glm5_next", None),
    "HYV4ForCausalLM": ("hy_v4", None),
    "InternS2MobiusForConditionalGeneration": ("interns2_mobius", None),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp", None),
}
"""Those that 0.5.23 has in addition; it names dots3_note by the class of its config alone."""


@pytest.mark.parametrize(("verdict", "words", "line"), SGLANG)
def test_verdict_by_the_own_parser(
    capsys: pytest.CaptureFixture[str], verdict: str, words: str, line: str
) -> None:
    check_verdict(capsys, verdict, words, line)


@pytest.mark.parametrize("name", WRONG)
def test_the_word_is_that_of_the_start(capsys: pytest.CaptureFixture[str], name: str) -> None:
    value, message = WRONG[name]
    flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    code, lines = run(capsys, f"sglang serve X/Y {EAGLE} {flag}")
    assert code == 1
    assert any(line.startswith(f"problem: {message}") for line in lines)


def test_what_the_own_parser_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, "sglang serve X/Y --speculative-config 3")
    assert code == 1
    assert any("unrecognized arguments: --speculative-config" in line for line in lines)


def test_families_are_those_of_the_loaders() -> None:
    is_newer = release() == "0.5.23"
    loaders = LOADERS | (NEWER_LOADERS if is_newer else {})
    source = inspect.getsource(ModelConfig._config_draft_model)
    found = set(re.findall(r'== "(\w+For(?:CausalLM|ConditionalGeneration))"', source))
    found |= set(re.findall(r'^ +"(\w+For(?:CausalLM|ConditionalGeneration))",$', source, re.M))
    assert found | {"MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"} == set(loaders)
    families = {family for family, _ in loaders.values() if family}
    if is_newer:
        assert "isinstance(self.hf_text_config, Dots3Config)" in source
        families.add("dots3_note")
    assert families == (FAMILIES | NEWER if is_newer else FAMILIES)
    for family, module in loaders.values():
        if module is not None:
            file = MODELS.joinpath(*module.split(".")).with_suffix(".py")
            refuses = "Only 1 nextn layer is supported" in file.read_text()
            assert refuses == (family in ONE_LAYER), family


def test_a_family_of_newer_versions_is_a_problem_of_older_ones() -> None:
    for name, is_old in (("hy_v4", False), ("qwen3_next", True)):
        family = CHECKPOINTS[name]
        lines = problems(SimpleNamespace(family=family, declared=1, problems=()))
        assert (lines == []) == (is_old or release() != "0.5.17")
        assert all("install 0.5.23" in line for line in lines)

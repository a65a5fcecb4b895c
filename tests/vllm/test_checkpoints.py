"""The doctor's verdicts against vLLM: its tables, its functions, and engines on odd checkpoints."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    get_dynamic_override,
    is_layer_gptq_quantized,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from mtp_plugin.checkpoint import FAMILIES
from mtp_plugin.checkpoint.skipped import Skipped
from mtp_plugin.hosts.vllm.versions import release
from tests.checkpoint.forms import CHECKPOINTS, LEFT_OUT, O_PROJ, TARGET, UP_PROJ, pack, write
from tests.checkpoint.test_families import BY_MODEL_TYPE
from tests.vllm.engines import STARTED


def test_the_stored_model_types_are_those_of_vllm():
    """Texts with which the override of a draft model's config compares `model_type`."""
    tree = ast.parse(dedent(inspect.getsource(SpeculativeConfig.hf_config_override)))
    compared = {
        each.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "model_type" in ast.unparse(node)
        for each in ast.walk(node)
        if isinstance(each, ast.Constant)
    }
    stored = {
        name
        for version, types in BY_MODEL_TYPE.items()
        if tuple(map(int, version.split("."))) <= release()
        for name in types.split()
    }
    compared -= {"model_type", None}
    assert {name for name in compared if not name.endswith("_mtp")} == stored


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.mark.parametrize(("method", "entry", "module", "is_left_out"), LEFT_OUT)
def test_the_stored_entries_are_matched_as_by_vllm(method, entry, module, is_left_out):
    stem, _, word = module.rpartition(".")
    experts, is_expert, _ = module.partition(".experts.")
    fused = next((name for name, parts in FUSED.items() if word in parts), word)
    prefix = f"{experts}.experts" if is_expert else f"{stem}.{fused}"
    if method == "gptq":
        found = get_dynamic_override(SimpleNamespace(dynamic={entry: {}}), prefix) is False
    elif method == "compressed-tensors":
        found = should_ignore_layer(module if is_expert else prefix, [entry], FUSED)
    else:
        mode = {"awq": "substring"}.get(method, "exact")
        found = is_layer_skipped(prefix, [entry], FUSED, match_mode=mode)
    assert found == is_left_out


@pytest.mark.parametrize("config", [AutoAWQConfig, AutoGPTQConfig])
def test_unquantized_layers_are_found_in_the_files_but_for_experts(tmp_path, config):
    write(tmp_path, pack(*TARGET))
    values = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "zero_point": True}
    made, method = config.from_config(values), config.__name__[4:-6].lower()
    made.maybe_update_config(str(tmp_path))
    for module in (O_PROJ, UP_PROJ, O_PROJ.replace("12", "3")):
        if method == "gptq":
            found = not is_layer_gptq_quantized(module, made.modules_in_block_to_quantize)
        else:
            module = module.partition(".experts.")[0] + ".experts" * ("experts" in module)
            found = is_layer_skipped(module, made.modules_to_not_convert, match_mode="substring")
        # GPTQ never looks up experts
        if method == "awq" or "experts" not in module:
            is_unquantized = ".12." in module and "experts" not in module
            assert found == is_unquantized
    ours = Skipped({"quant_method": method})
    assert ours.is_found_in_files(f"{O_PROJ}.weight")
    assert not ours.is_found_in_files(f"{UP_PROJ}.weight")


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("bailing_hybrid", "bailing_moe_mtp"),
        ("deepseek_v3", "deepseek_mtp"),
        ("ernie4_5_moe", "ernie_mtp"),
        ("exaone_moe", "exaone_moe_mtp"),
        ("glm4_moe", "glm4_moe_mtp"),
        ("glm4_moe_lite", "glm4_moe_lite_mtp"),
        ("hy_v3", "hy_v3_mtp"),
        ("longcat_flash", "longcat_flash_mtp"),
        ("mimo", "mimo_mtp"),
        ("nemotron_h", "nemotron_h_mtp"),
        ("qwen3_5", "qwen3_5_mtp"),
        ("qwen3_next", "qwen3_next_mtp"),
        ("step3p5", "step3p5_mtp"),
    ],
)
def test_projections_that_vllm_never_quantizes(family, module):
    source = Path(vllm.__file__).parent / "model_executor" / "models" / f"{module}.py"
    is_plain = re.search(r"_proj = nn\.Linear\(\s*config\.hidden_size \* 2", source.read_text())
    assert FAMILIES[family].has_plain_projection == bool(is_plain)


@pytest.mark.engines("checkpoints")
@pytest.mark.parametrize("name", STARTED)
def test_an_engine_does_what_the_doctor_says(results, name):
    """Its verdicts on these forms are compared by ``tests/checkpoint``."""
    found, whole = results("checkpoints")[name], results("checkpoints")["whole"]
    answer = "drafts" if found.get("accepted") else "drafts at random"
    if found.get("tokens") != whole["tokens"]:
        answer = "refuses"
    assert answer == CHECKPOINTS[name][2], found

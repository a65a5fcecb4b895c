"""The doctor's verdicts against vLLM: its tables, its functions, and engines on odd checkpoints."""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from mtp_plugin.hosts.vllm.versions import release
from tests.checkpoint.forms import CHECKPOINTS, LEFT_OUT
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


@pytest.mark.engines("checkpoints")
@pytest.mark.parametrize("name", STARTED)
def test_an_engine_does_what_the_doctor_says(results, name):
    """Its verdicts on these forms are compared by ``tests/checkpoint``."""
    found, whole = results("checkpoints")[name], results("checkpoints")["whole"]
    answer = "drafts" if found.get("accepted") else "drafts at random"
    if found.get("tokens") != whole["tokens"]:
        answer = "refuses"
    assert answer == CHECKPOINTS[name][2], found

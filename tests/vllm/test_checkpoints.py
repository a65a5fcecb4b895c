"""The doctor's verdicts against vLLM: its tables, its functions, and engines on odd checkpoints."""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent

import pytest

pytest.importorskip("vllm")

from vllm.config.speculative import SpeculativeConfig

from mtp_plugin.hosts.vllm.versions import release
from tests.checkpoint.test_families import BY_MODEL_TYPE


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

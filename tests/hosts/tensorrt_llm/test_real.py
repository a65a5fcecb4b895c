"""Inside TensorRT-LLM itself, where it is installed: seams resolve, classes are whole, text holds.

``MTP_PLUGIN_TRTLLM_MODEL`` names a checkpoint with MTP layers for the last of them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from mtp_plugin.hosts import tensorrt_llm as plugin
from mtp_plugin.hosts.tensorrt_llm import checks

pytestmark = [
    pytest.mark.tensorrt_llm,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed"
    ),
]
MODEL = os.environ.get("MTP_PLUGIN_TRTLLM_MODEL")
SCRIPT = """
import sys
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import MTPDecodingConfig
from mtp_plugin.hosts import tensorrt_llm as plugin
model, way = sys.argv[1:]
config = None
if way == "mtp":
    plugin.install()
    name = "num_nextn_predict_layers" if plugin.status().line == "1.2" else "max_draft_len"
    config = MTPDecodingConfig(**{name: 3})
with LLM(model, speculative_config=config) as llm:
    params = SamplingParams(max_tokens=64, temperature=0.0)
    print("IDS", llm.generate("def add(a, b):", params).outputs[0].token_ids)
"""


def test_seams_resolve_and_classes_are_whole() -> None:
    seen = checks.examine()
    assert seen.problems == []
    assert plugin.install().line == seen.line
    try:
        assert len(plugin.status().rebound) >= 4
    finally:
        plugin.uninstall()


@pytest.mark.skipif(MODEL is None, reason="MTP_PLUGIN_TRTLLM_MODEL names no checkpoint")
def test_text_with_and_without_drafts() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(MODEL), way],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for way in ("mtp", "plain")
    ]
    ids = [[row for row in each.splitlines() if row.startswith("IDS ")] for each in outputs]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 1

"""Files in configs/trtllm/: keys of their line alone, and the executor reads them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    host_keys,
    load_config,
    load_plugin_options,
)
from mtp_plugin.config.host_keys import HostKey
from mtp_plugin.config.schema import ConfigModel
from tests.contract_host.recorded import load_line

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "trtllm"
CHECKPOINT = ROOT / "integration" / "tiny_model" / "checkpoint"
OPTIONS = FOLDER / "mtp_plugin.yaml"
FILES = sorted(set(FOLDER.glob("*.yaml")) - {OPTIONS})
LINES = ("1.2", "1.3a", "1.3b")
ARGUMENTS = "tensorrt_llm.llmapi.llm_args"
CLASSES = {
    "top": ("BaseLlmArgs", "TorchLlmArgs"),
    "kv_cache_config": ("KvCacheConfig",),
    "cuda_graph_config": ("CudaGraphConfig", "BaseCudaGraphConfig", "DecodeCudaGraphConfig"),
    "moe_config": ("MoeConfig",),
    "speculative_config": ("DecodingBaseConfig", "MTPDecodingConfig"),
}
"""Section -> the classes of its keys, in any line."""
KINDS = {"eagle", "vanilla", "relaxed"}

pytestmark = pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers:FutureWarning")


SECTIONS: dict[str, tuple[type[ConfigModel], Mapping[str, HostKey]]] = {
    "top": (LLMConfig, host_keys.TOP_LEVEL),
    "kv_cache_config": (KVCacheConfig, host_keys.KV_CACHE),
    "cuda_graph_config": (CudaGraphConfig, host_keys.CUDA_GRAPHS),
    "speculative_config": (MTPDecodingConfig, host_keys.SPECULATIVE),
}


def recorded_keys(line: str, section: str) -> set[str]:
    """What a line's public text has."""
    classes = load_line(line).modules[ARGUMENTS].classes
    named = [classes[name] for name in CLASSES[section] if name in classes]
    assert named
    every = {field.name for each in named for field in each.fields}
    return {name for name in every if not name.startswith("_")}


def line_of(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


def kind_of(path: Path) -> str:
    return path.stem.rsplit("_", 1)[1]


def test_every_line_has_its_files() -> None:
    assert {line_of(path) for path in FILES} == set(LINES)
    for line in LINES:
        assert {kind_of(path) for path in FILES if line_of(path) == line} >= KINDS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_keys_are_recorded_ones_of_the_line(path: Path) -> None:
    line, file = line_of(path), yaml.safe_load(path.read_text())
    assert set(file) <= recorded_keys(line, "top")
    for section, inner in file.items():
        if isinstance(inner, dict):
            assert set(inner) <= recorded_keys(line, section), section


@pytest.mark.parametrize("line", LINES)
def test_every_recorded_key_is_known_by_name(line: str) -> None:
    for section, (model, table) in SECTIONS.items():
        known = {*model.model_fields, *model.renamed, *table, "num_nextn_predict_layers"}
        assert recorded_keys(line, section) <= known
    inside = host_keys.TOP_LEVEL["moe_config"].inside or {}
    assert recorded_keys(line, "moe_config") <= set(inside)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_k_has_the_name_that_the_line_reads(path: Path) -> None:
    spec = yaml.safe_load(path.read_text())["speculative_config"]
    names = {"num_nextn_predict_layers", "max_draft_len"} & set(spec)
    assert (
        names
        == {
            "1.2": {"num_nextn_predict_layers"},
            "1.3a": {"max_draft_len"},
            "1.3b": {"max_draft_len"},
        }[line_of(path)]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_executor_reads_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(path, model=CHECKPOINT, plugin_options=OPTIONS)
    spec = config.speculative_config
    assert isinstance(spec, MTPDecodingConfig)
    assert config.model == str(CHECKPOINT)
    assert spec.resolve(3).draft_len == 3
    assert spec.use_mtp_vanilla is (kind_of(path) == "vanilla")
    assert spec.use_relaxed_acceptance_for_thinking is (kind_of(path) == "relaxed")
    assert (spec.draft_len_schedule is not None) is (kind_of(path) == "schedule")
    assert spec.mtp == load_plugin_options(OPTIONS, str(OPTIONS))
    (expected,) = caplog.messages
    assert expected.startswith(f"{path}: set aside, as they change no output: ")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_lines_say_the_same(kind: str) -> None:
    each = {load_config(FOLDER / f"{line}_{kind}.yaml", model=CHECKPOINT) for line in LINES}
    assert len(each) == 1


def test_options_file_names_the_thinking_tags() -> None:
    options = load_plugin_options(OPTIONS, str(OPTIONS))
    assert (options.begin_thinking_phase, options.end_thinking_phase) == ("<think>", "</think>")

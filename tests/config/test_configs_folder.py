"""Every YAML file in configs/ loads, and reference.yaml reports the truth about the defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
    load_config,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.y*ml"))
CHECKPOINT = ROOT / "integration" / "tiny_model" / "checkpoint"
REFERENCE = ROOT / "configs" / "reference.yaml"
MAPPINGS: dict[str, type[BaseModel]] = {
    "kv_cache_config": KVCacheConfig,
    "cuda_graph_config": CudaGraphConfig,
    "speculative_config": MTPDecodingConfig,
    "mtp": MTPPluginOptions,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_loads_and_names_the_bundled_checkpoint(path: Path) -> None:
    config = load_config(path)
    assert Path(config.model) == CHECKPOINT
    assert CHECKPOINT.is_dir()


def test_the_folder_holds_the_promised_files() -> None:
    promised = {"eagle", "vanilla", "relaxed", "synthetic", "trtllm_window", "no_mtp"}
    assert {path.stem for path in CONFIGS} >= {f"tiny_{name}" for name in promised} | {"reference"}


@pytest.mark.parametrize(
    ("name", "vanilla", "draft_len"),
    [("tiny_eagle", False, 3), ("tiny_vanilla", True, 3), ("tiny_trtllm_window", True, 3)],
)
def test_tiny_files_say_what_they_are_named(name: str, vanilla: bool, draft_len: int) -> None:
    spec = load_config(ROOT / "configs" / f"{name}.yaml").speculative_config
    assert isinstance(spec, MTPDecodingConfig)
    assert spec.spec_dec_mode.is_mtp_vanilla() is vanilla
    assert spec.resolve(3).draft_len == draft_len
    assert spec.mtp.draft_window == ("trtllm" if "trtllm" in name else "exact")
    assert spec.mtp.chain == ("target_shift" if "trtllm" in name else None)


def test_tiny_relaxed_names_the_thinking_tags() -> None:
    spec = load_config(ROOT / "configs" / "tiny_relaxed.yaml").speculative_config
    assert isinstance(spec, MTPDecodingConfig)
    assert spec.use_relaxed_acceptance_for_thinking
    assert (spec.relaxed_topk, spec.relaxed_delta) == (10, 0.6)
    assert (spec.mtp.begin_thinking_phase, spec.mtp.end_thinking_phase) == ("<think>", "</think>")


def test_tiny_synthetic_names_its_rates() -> None:
    spec = load_config(ROOT / "configs" / "tiny_synthetic.yaml").speculative_config
    assert isinstance(spec, MTPDecodingConfig)
    assert spec.mtp.verification == "synthetic"
    assert spec.mtp.acceptance_shares(spec.draft_len) == (0.8, 0.6, 0.4)


def test_tiny_no_mtp_drafts_nothing() -> None:
    assert load_config(ROOT / "configs" / "tiny_no_mtp.yaml").speculative_config is None


def test_tiny_files_differ_only_in_how_they_draft() -> None:
    tiny = [load_config(path) for path in CONFIGS if path.stem.startswith("tiny")]
    assert len({config.model_copy(update={"speculative_config": None}) for config in tiny}) == 1


def test_reference_values_are_the_defaults() -> None:
    config = load_config(REFERENCE)
    spec = MTPDecodingConfig()
    assert config == LLMConfig(model=str(CHECKPOINT), speculative_config=spec)


def test_reference_documents_every_key() -> None:
    documented: dict[str, str] = {}
    parents: list[str] = []
    for line in with_graphs(REFERENCE.read_text()):
        written, _, comment = line.strip().partition("  # ")
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [written.split(":")[0]]
        documented[".".join(parents)] = comment
    assert documented == {path: field.description for path, field in all_fields(LLMConfig)}


def test_reference_names_the_defaults_of_cuda_graphs() -> None:
    graphs = yaml.safe_load("\n".join(with_graphs(REFERENCE.read_text())))["cuda_graph_config"]
    assert graphs == CudaGraphConfig().model_dump()


def with_graphs(text: str) -> list[str]:
    """The lines that set a key, with the commented-out mapping of cuda_graph_config put to use."""
    lines = text.replace("# cuda_graph_config:\n", "").replace("#   ", "  ").splitlines()
    used = [line for line in lines if not line.startswith("#")]
    return [line.replace("cuda_graph_config: null", "cuda_graph_config:") for line in used]


def all_fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield path + name, field
        if name in MAPPINGS:
            yield from all_fields(MAPPINGS[name], f"{path}{name}.")

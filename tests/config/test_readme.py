"""The page on configuration names every key of every section, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
)

FOLDER = Path(__file__).parents[2] / "configs"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type[BaseModel]] = {
    "The file": LLMConfig,
    "kv_cache_config": KVCacheConfig,
    "cuda_graph_config": CudaGraphConfig,
    "speculative_config": MTPDecodingConfig,
    "speculative_config.mtp": MTPPluginOptions,
}


def first_cells(section: str) -> list[str]:
    """Of the rows of a section's table."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_named(section: str) -> None:
    named = [name for cell in first_cells(section) for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(named) == sorted(SECTIONS[section].model_fields)


def test_sections_are_those_of_the_file() -> None:
    """A mapping that the models got since would have a section of its own."""
    mappings = {
        name
        for model in SECTIONS.values()
        for name, field in model.model_fields.items()
        if re.search(r"Config\b|Options\b", str(field.annotation))
    }
    assert mappings == {name.split(".")[-1] for name in SECTIONS} - {"The file"}


def test_every_file_of_the_folder_is_named() -> None:
    listed = PAGE.split("\n## ")[0]
    there = {path.name for path in FOLDER.glob("*.yaml")} | {"trtllm/"}
    assert set(re.findall(r"`([\w/]+(?:\.yaml|/))`", listed)) == there

"""Made checkpoints and a plain attention metadata for these tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from integration.random_models import write_random_checkpoint

Tensors = dict[str, torch.Tensor]


class PlainAttention:
    """Flat rows of whole sequences, or further rows of a single one, over a dynamic cache."""

    def __init__(self, *seq_lens: int, past: int = 0, cache: DynamicCache | None = None) -> None:
        self._seq_lens_cuda = torch.tensor(seq_lens)
        self.past = past
        self.cache = DynamicCache() if cache is None else cache

    def model_kwargs(self) -> dict[str, Any]:
        sequence = torch.repeat_interleave(
            torch.arange(len(self._seq_lens_cuda)), self._seq_lens_cuda
        )
        rows = torch.arange(len(sequence))
        columns = torch.arange(self.past + len(sequence))
        of_column = torch.cat([sequence.new_zeros(self.past), sequence])
        causal = columns[None] <= rows[:, None] + self.past
        mask = causal & (of_column[None] == sequence[:, None])
        return {
            "past_key_values": self.cache,
            "attention_mask": mask[None, None],
            "use_cache": True,
            "attn_metadata": self,
        }


@pytest.fixture
def plain_attention() -> type[PlainAttention]:
    return PlainAttention


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`write_random_checkpoint` without the path, once per set of arguments; do not edit these."""
    written: dict[str, Path] = {}

    def write(family: str, **kwargs: Any) -> Path:
        key = f"{family} {sorted(kwargs.items())}"
        if key not in written:
            written[key] = write_random_checkpoint(
                tmp_path_factory.mktemp(family), family, **kwargs
            )
        return written[key]

    return write


@pytest.fixture
def edited(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a made checkpoint after `edit_config` and `edit_tensors` had their way with it."""

    def edit(
        family: str,
        edit_config: Callable[[dict[str, Any]], object] | None = None,
        edit_tensors: Callable[[Tensors], object] | None = None,
        **kwargs: Any,
    ) -> Path:
        path = tmp_path / family
        shutil.copytree(checkpoint(family, **kwargs), path)
        if edit_config is not None:
            config = json.loads((path / "config.json").read_text())
            edit_config(config)
            (path / "config.json").write_text(json.dumps(config))
        if edit_tensors is not None:
            tensors = load_file(path / "model.safetensors")
            edit_tensors(tensors)
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return edit


@pytest.fixture
def sharded() -> Callable[[Path], Path]:
    """Splits a checkpoint in place into two files and an index."""

    def split(path: Path) -> Path:
        tensors = load_file(path / "model.safetensors")
        names = sorted(tensors)
        files = {
            "model-00001-of-00002.safetensors": names[::2],
            "model-00002-of-00002.safetensors": names[1::2],
        }
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
        weight_map = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        (path / "model.safetensors").unlink()
        return path

    return split

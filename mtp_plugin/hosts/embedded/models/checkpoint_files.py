"""Read tensors of a checkpoint, and show transformers its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open

from mtp_plugin.checkpoint import Checkpoint
from mtp_plugin.checkpoint.files import INDEX_FILE, StoredTensor
from mtp_plugin.errors import CheckpointError


def read_tensors(
    stored: Mapping[str, StoredTensor], names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, on the CPU, file by file.

    Raises:
        CheckpointError: one cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, in_file in by_file.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in in_file:
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: a tensor cannot be read: {error}") from error


@contextmanager
def indexed_directory(checkpoint: Checkpoint) -> Iterator[Path]:
    """The directory of a checkpoint; if it lacks an index, one with links to its files and an
    index, without which transformers reads no shards."""
    if checkpoint.is_indexed:
        yield checkpoint.directory
        return
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    weight_map = {name: tensor.file.name for name, tensor in checkpoint.tensors.items()}
    with TemporaryDirectory() as made:
        directory = Path(made)
        for file in files:
            (directory / file.name).symlink_to(file.resolve())
        (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield directory

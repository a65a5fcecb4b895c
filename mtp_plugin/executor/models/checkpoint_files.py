"""Reading a Hugging Face checkpoint directory: JSON files, safetensors headers, single tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mtp_plugin.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says about one tensor."""

    file: Path
    dtype: str
    """The header's own name, for example `BF16`."""
    shape: tuple[int, ...]


def checkpoint_directory(path: str | Path) -> Path:
    """The directory of a checkpoint.

    Raises:
        CheckpointError: the path does not exist or is no directory.
    """
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError(f"checkpoint {directory}: expected a directory, it does not exist")
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {directory}: expected a directory, got a file")
    return directory


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, is no JSON, or holds something else than an object.
    """
    if not file.is_file():
        raise CheckpointError(f"checkpoint {file.parent}: expected a file {file.name}, found none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Name, dtype and shape of every stored tensor, without reading any weight.

    Raises:
        CheckpointError: no safetensors, a bad index, a missing or broken shard.
    """
    single = directory / SINGLE_FILE
    if single.is_file():
        return dict(_file_headers(single))
    if not (directory / INDEX_FILE).is_file():
        raise CheckpointError(
            f"checkpoint {directory}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither"
        )
    return _sharded_headers(directory)


def read_tensors(
    stored: Mapping[str, StoredTensor], names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors, on the CPU, file by file."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, in_file in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in in_file:
                yield name, opened.get_tensor(name)


def _sharded_headers(directory: Path) -> dict[str, StoredTensor]:
    index = read_json(directory / INDEX_FILE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{directory / INDEX_FILE}: expected a table 'weight_map', "
            f"got {type(weight_map).__name__}"
        )
    missing_files = sorted(
        {name for name in weight_map.values() if not (directory / name).is_file()}
    )
    if missing_files:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX_FILE} names {len(missing_files)} file(s) that are "
            f"missing: {listed(missing_files)}"
        )
    in_files = {
        name: dict(_file_headers(directory / name)) for name in sorted(set(weight_map.values()))
    }
    absent = [key for key, name in weight_map.items() if key not in in_files[name]]
    if absent:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX_FILE} names {len(absent)} tensor(s) that its files "
            f"do not hold: {listed(absent)}"
        )
    return {key: in_files[name][key] for key, name in weight_map.items()}


def _file_headers(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  the handle is no mapping
                tensor = opened.get_slice(name)
                yield name, StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got {error}") from error


def listed(names: Iterable[str], at_most: int = 4) -> str:
    """The first few names, and how many more there are."""
    everything = list(names)
    shown = ", ".join(everything[:at_most])
    more = len(everything) - at_most
    return f"{shown} and {more} more" if more > 0 else shown

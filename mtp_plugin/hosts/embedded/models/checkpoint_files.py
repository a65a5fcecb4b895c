"""Read a Hugging Face checkpoint directory: JSON files, safetensors headers, single tensors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mtp_plugin.config.bounded import open_regular, read_bounded
from mtp_plugin.config.messages import got, spelled
from mtp_plugin.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one tensor in a safetensors header."""

    file: Path
    dtype: str
    """The header's own name, for example `BF16`."""
    shape: tuple[int, ...]


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def checkpoint_directory(path: str | Path) -> Path:
    """The directory of a checkpoint.

    Raises:
        CheckpointError: the path does not exist or is no directory.
    """
    directory = Path(path)
    try:
        exists, is_directory = directory.exists(), directory.is_dir()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(path)!r}: cannot be read: {error}") from None
    if not exists:
        command = download_command(path)
        advice = "" if command is None else "; download the model"
        raise CheckpointError(
            f"checkpoint {directory}: expected a directory, it does not exist{advice}", command
        )
    if not is_directory:
        raise CheckpointError(
            f"checkpoint {directory}: expected a directory, got a file; give {directory.parent}"
        )
    return directory


def download_command(path: str | Path) -> str | None:
    """Return the command that downloads a model from the Hugging Face hub; None: no hub id."""
    if _HUB_ID.fullmatch(str(path)) is None:
        return None
    return f"hf download {path} --local-dir {path}"


def check_downloaded(file: Path) -> None:
    """Refuse a git-lfs pointer in the place of a file.

    Raises:
        CheckpointError: with the command that downloads the file.
        OSError: the file cannot be read.
    """
    with open_regular(file) as opened:
        start = opened.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise CheckpointError(
            f"{file}: got a git-lfs pointer instead of the file; download it",
            f"git -C {shlex.quote(str(file.parent))} lfs pull",
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        CheckpointError: the file is missing, cannot be read, is too large or no JSON, nests too
            deeply, or holds something else than an object.
    """
    try:
        if file.exists() and not file.is_file():
            # a pipe or a device may never end
            raise CheckpointError(f"{file}: expected a regular file, got another kind of file")
        check_downloaded(file)
        content = json.loads(read_bounded(file).decode("utf-8"))
    except CheckpointError:  # a ValueError too
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {file.parent}: expected a file {file.name}, found none"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{file}: expected JSON, it nests too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}") from None
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


def _sharded_headers(directory: Path) -> dict[str, StoredTensor]:
    index = read_json(directory / INDEX_FILE)
    for table in ("weight_map", "metadata"):  # transformers reads both
        if not isinstance(index.get(table), dict):
            raise CheckpointError(
                f"{directory / INDEX_FILE}: expected a table {table!r}, got {got(index.get(table))}"
            )
    weight_map = index["weight_map"]
    odd = [file for file in weight_map.values() if not _is_plain(file)]
    if odd:
        raise CheckpointError(
            f"{directory / INDEX_FILE}: expected plain names of .safetensors files next to it, "
            f"got {got(odd[0])}"
        )
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in _file_headers(directory / file):
            if name in stored:
                raise CheckpointError(
                    f"checkpoint {directory}: a tensor is in several files: {listed([name])}"
                )
            stored[name] = tensor
    absent = sorted(weight_map.keys() - stored.keys())
    if absent:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX_FILE} names {len(absent)} tensor(s) that its files do "
            f"not hold: {listed(absent)}"
        )
    return stored


def _is_plain(file: object) -> bool:
    return (
        isinstance(file, str)
        and file.isprintable()
        and file.endswith(".safetensors")
        and len(file) <= 255
        and not any(sign in file for sign in "/\\:")
    )


def _file_headers(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        check_downloaded(file)
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118  the handle is no mapping
                tensor = opened.get_slice(name)
                yield name, StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got {error}") from error


def listed(names: Iterable[str], at_most: int = 4) -> str:
    """The first few names, and how many more there are."""
    everything = list(names)
    clipped = (name if len(name) <= 200 else f"{name[:197]}..." for name in everything[:at_most])
    shown = ", ".join(map(spelled, clipped))
    more = len(everything) - at_most
    return f"{shown} and {more} more" if more > 0 else shown

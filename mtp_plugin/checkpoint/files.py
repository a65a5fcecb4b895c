"""Files of a checkpoint directory: JSON, safetensors headers, and which kinds are refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_plugin.config.bounded import open_regular, read_bounded
from mtp_plugin.config.messages import got, spelled
from mtp_plugin.errors import CheckpointError, shell_quote

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_FILE, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
ADAPTER_FILE = "adapter_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""Bytes of a safetensors header at most, as in safetensors."""
_BLOCK = 4096
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one tensor in a safetensors header."""

    file: Path
    dtype: str
    """The header's own name, for example `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""
    size: int
    """Bytes."""

    def differs(self, other: StoredTensor) -> bool:
        """Whether another tensor has another dtype, shape or content: of large ones, about a
        thousand blocks at even distances are compared.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if (self.dtype, self.shape, self.size) != (other.dtype, other.shape, other.size):
            return True
        try:
            with open_regular(self.file) as one, open_regular(other.file) as two:
                for start in range(0, self.size, max(_BLOCK, self.size // 1024)):
                    one.seek(self.begin + start)
                    two.seek(other.begin + start)
                    count = min(_BLOCK, self.size - start)
                    if one.read(count) != two.read(count):
                        return True
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error.strerror}") from error
        return False


def check_kind(directory: Path) -> None:
    """Refuse a directory that is no whole checkpoint.

    Raises:
        CheckpointError: an adapter, or GGUF files.
    """
    if (directory / ADAPTER_FILE).exists():
        raise CheckpointError(
            f"checkpoint {directory}: expected a whole checkpoint, {ADAPTER_FILE} makes it an "
            f"adapter of another one"
        )
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    if gguf and not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"checkpoint {directory}: expected weights in safetensors files, got {listed(gguf)}; "
            "MTP layers in GGUF files are not read, neither here nor by vLLM: take the original "
            "checkpoint"
        )


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


def _check_downloaded(file: Path, content: bytes) -> None:
    """Refuse a git-lfs pointer in the place of a file.

    Raises:
        CheckpointError: with the command that downloads the file.
    """
    if content.startswith(_LFS_POINTER):
        raise CheckpointError(
            f"{file}: got a git-lfs pointer instead of the file; download it",
            f"git -C {shell_quote(file.parent)} lfs pull",
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        CheckpointError: the file is missing, cannot be read, is too large or no JSON, nests too
            deeply, or holds something else than an object.
    """
    try:
        read = read_bounded(file)
        _check_downloaded(file, read)
        content = json.loads(read.decode("utf-8"))
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


def read_index(file: Path, names: Iterable[str]) -> list[str]:
    """Read the names of the files in an index, each of which is one of ``names``.

    Raises:
        CheckpointError: it cannot be read, or names something else.
    """
    index = read_json(file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{file}: expected a table 'weight_map', got {got(weight_map)}")
    odd = [name for name in weight_map.values() if not _is_plain(name)]
    if odd:
        raise CheckpointError(
            f"{file}: expected plain names of .safetensors files next to it, got {got(odd[0])}"
        )
    named = sorted(set(weight_map.values()))
    absent = [name for name in named if name not in names]
    if absent:
        whole = f"; if {SINGLE_FILE} is whole, remove the index" if SINGLE_FILE in names else ""
        raise CheckpointError(
            f"{file}: names {len(absent)} file(s) that are not there: {listed(absent)}; download "
            f"them{whole}"
        )
    return named


def _is_plain(file: object) -> bool:
    return (
        isinstance(file, str)
        and file.isprintable()
        and file.endswith(".safetensors")
        and len(file) <= 255
        and not any(sign in file for sign in "/\\:")
    )


def file_headers(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield name and header of every tensor of a file.

    Raises:
        CheckpointError: it cannot be read, or is no whole safetensors file.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(len(_LFS_POINTER))
            _check_downloaded(file, start)
            opened.seek(8)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(f"an invalid entry of {spelled(name)}")
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"one that ends before the data of {spelled(name)}")
            yield name, StoredTensor(file, dtype, tuple(shape), 8 + length + begin, end - begin)
    except CheckpointError:  # a ValueError too
        raise
    except KeyError as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got no {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected a safetensors file, got {error}") from error


def listed(names: Iterable[str], at_most: int = 4) -> str:
    """The first few names, and how many more there are."""
    everything = list(names)
    clipped = (name if len(name) <= 200 else f"{name[:197]}..." for name in everything[:at_most])
    shown = ", ".join(map(spelled, clipped))
    more = len(everything) - at_most
    return f"{shown} and {more} more" if more > 0 else shown

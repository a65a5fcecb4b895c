"""The training corpus: the Python files of a standard library, split by file."""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path


class CorpusMismatchError(ValueError):
    """A corpus folder does not hold the files that its manifest names."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus."""

    path: str
    size: int
    sha256: str
    held_out: bool

    @property
    def split(self) -> str:
        """`held_out` or `train`."""
        return "held_out" if self.held_out else "train"


@dataclass(frozen=True)
class Manifest:
    """What the corpus consists of; the split is a function of each path."""

    python_version: str
    files: tuple[SourceFile, ...]

    def of_split(self, split: str) -> tuple[SourceFile, ...]:
        """The files of one split, in path order."""
        return tuple(file for file in self.files if file.split == split)


def default_corpus() -> Path:
    """The standard library of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json`."""
    content = json.loads(path.read_text())
    files = tuple(
        SourceFile(name, size, digest, split == "held_out")
        for name, size, digest, split in content["files"]
    )
    return Manifest(content["python_version"], files)


def read_texts(corpus: Path, files: tuple[SourceFile, ...]) -> list[str]:
    """The text of each file, checked against its recorded hash.

    Raises:
        CorpusMismatchError: a file is missing or differs from the manifest.
    """
    texts = []
    for file in files:
        source = corpus / file.path
        content = source.read_bytes() if source.is_file() else b""
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise CorpusMismatchError(
                f"{file.path}: expected sha256 {file.sha256}, got {digest}; "
                "point --corpus at the library that the manifest names"
            )
        texts.append(content.decode("utf-8"))
    return texts

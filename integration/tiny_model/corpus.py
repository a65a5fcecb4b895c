"""The training corpus: the Python files of a standard library, split by file."""

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_MODULUS = 20

_SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "pydoc_data", "encodings"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


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


def is_held_out(path: str) -> bool:
    """Whether the file at this relative path belongs to the held-out split."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def scan(corpus: Path, python_version: str | None = None) -> Manifest:
    """Read every Python file under `corpus` that is UTF-8 text, new and no generated table."""
    files = []
    seen = set()
    for file in sorted(corpus.rglob("*.py")):
        relative = file.relative_to(corpus)
        if _is_skipped(relative):
            continue
        content = file.read_bytes()
        if not content.strip() or not _is_text(content):
            continue
        path = relative.as_posix()
        digest = hashlib.sha256(content).hexdigest()
        # a copy of a training file must not count as held out
        if digest in seen:
            continue
        seen.add(digest)
        files.append(SourceFile(path, len(content), digest, is_held_out(path)))
    return Manifest(python_version or platform.python_version(), tuple(files))


def _is_skipped(relative: Path) -> bool:
    if any(part in _SKIPPED_FOLDERS for part in relative.parts):
        return True
    return any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write one file per line, so that a change of the corpus is a readable diff."""
    header = {
        "corpus": "CPython standard library, *.py",
        "python_version": manifest.python_version,
        "licence": "PSF-2.0, see LICENSE",
        "split": f"held_out where int(sha256(path), 16) % {HELD_OUT_MODULUS} == 0, else train",
        "skipped": "non-UTF-8, empty and repeated files; "
        + ", ".join(sorted(_SKIPPED_FOLDERS) + [f"{prefix}*" for prefix in _SKIPPED_PREFIXES]),
        "totals": {
            split: {
                "files": len(manifest.of_split(split)),
                "bytes": sum(file.size for file in manifest.of_split(split)),
            }
            for split in ("train", "held_out")
        },
        "columns": ["path", "bytes", "sha256", "split"],
    }
    rows = ",\n".join(
        json.dumps([file.path, file.size, file.sha256, file.split]) for file in manifest.files
    )
    head = json.dumps(header, indent=1)[:-2]
    path.write_text(f'{head},\n "files": [\n{rows}\n]}}\n')


def read_manifest(path: Path) -> Manifest:
    """Read what `write_manifest` wrote."""
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
                "point --corpus at the library the manifest names or run prepare.py on this one"
            )
        texts.append(content.decode("utf-8"))
    return texts

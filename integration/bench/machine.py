"""The machine of a benchmark, and its memory bandwidth."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mtp_plugin
from integration.bench.timing import time_on_device

_CEILING_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Ceilings:
    """Bandwidth of large buffers, GB/s."""

    read: float  # the fastest of several reductions
    copy: float  # bytes read and written

    @property
    def best(self) -> float:
        """The bandwidth of byte floors."""
        return max(self.read, self.copy)

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"best": self.best}


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure by reading and copying 4 GiB."""
    source = torch.randn(_CEILING_BYTES // 4, device=device)
    sink = torch.empty_like(source)
    rows = source.view(-1, 2**16)
    reads: list[Callable[[], object]] = [
        source.sum,
        source.amax,
        lambda: rows.sum(dim=1),
        lambda: rows.amax(dim=1),
    ]
    read = max(_rate(call, _CEILING_BYTES) for call in reads)
    copy = _rate(lambda: sink.copy_(source), 2 * _CEILING_BYTES)
    return Ceilings(read, copy)


def _rate(call: Callable[[], object], num_bytes: int) -> float:
    time_on_device(call, 2)
    return num_bytes / 1000 / statistics.median(time_on_device(call, 7))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Names and versions; ``commit`` is ``unknown`` outside of a checkout.

    ``package_tree`` names the package's files whatever the checkout says of itself: it is
    ``git rev-parse COMMIT:mtp_plugin`` of every commit that has exactly these.
    """
    described: dict[str, Any] = {
        "gpu": None,
        "cpu": cpu_name(),
        "cpu_cores": available_cores(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "package": _version("mtp-plugin"),
        "commit": _commit(),
        "package_tree": git_tree(Path(mtp_plugin.__file__).parent),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "gpu": properties.name,
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return described


def cpu_name(listed: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model, or the platform's name for it if it is not listed."""
    try:
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown"


def available_cores() -> int:
    """Return the number of logical cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_tree(folder: Path) -> str:
    """Return the git tree id of a folder's current files, without caches and hidden files."""
    found = _tree(folder)
    return "" if found is None else found.hex()


def _tree(folder: Path) -> bytes | None:
    entries: list[tuple[str, bytes]] = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_symlink():
            target = _object("blob", os.readlink(path).encode())
            entries.append((path.name, b"120000 " + name + b"\0" + target))
        elif path.is_file():
            mode = b"100755" if path.stat().st_mode & stat.S_IXUSR else b"100644"
            blob = _object("blob", path.read_bytes())
            entries.append((path.name, mode + b" " + name + b"\0" + blob))
        elif path.is_dir():
            inner = _tree(path)
            if inner is not None:
                # folders are sorted as if their names ended with a slash
                entries.append((f"{path.name}/", b"40000 " + name + b"\0" + inner))
    if not entries:
        return None
    entries.sort(key=lambda entry: entry[0].encode())
    return _object("tree", b"".join(entry for _, entry in entries))


def _object(kind: str, data: bytes) -> bytes:
    header = f"{kind} {len(data)}\0".encode()
    return hashlib.sha1(header + data, usedforsecurity=False).digest()


def _commit() -> str:
    """Return the commit of this checkout, marked if tracked files are modified."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()

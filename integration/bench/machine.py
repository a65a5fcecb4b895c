"""The machine and the code that a result names, and result files."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mtp_plugin


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Names and versions; ``commit`` is ``unknown`` outside of a checkout.

    ``package_tree`` names the package's files whatever the checkout says of itself: it is
    ``git rev-parse COMMIT:mtp_plugin`` of every commit that has exactly these.
    """
    described: dict[str, Any] = {
        "gpu": None,
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
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


def load_of_others() -> float:
    """Return the share of CPU time that other processes take, 0 to 1, also inside a container: a
    thread on each core that this process may use hashes for some milliseconds, which takes as much
    CPU time as time if the core is its own."""
    data = bytes(64 << 20)

    def own_share(core: int) -> float:
        os.sched_setaffinity(0, {core})  # of this thread
        begun, used = time.perf_counter(), time.thread_time()
        hashlib.sha256(data)  # without the interpreter's lock
        return (time.thread_time() - used) / (time.perf_counter() - begun)

    cores = os.sched_getaffinity(0)
    with ThreadPoolExecutor(len(cores)) as pool:
        return max(0.0, 1 - sum(pool.map(own_share, cores)) / len(cores))


def store(path: Path | None, document: dict[str, Any]) -> None:
    """Write a document; the former one is kept until it is whole. Without a path do nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".part-{path.name}")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git_tree(folder: Path) -> str:
    """Return the git tree id of a folder's current files, without caches and hidden files."""
    return (_tree(folder) or b"").hex()


def _tree(folder: Path) -> bytes | None:
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_file():
            mode = b"100755 " if path.stat().st_mode & 0o100 else b"100644 "
            entries.append((name, mode + name + b"\0" + _object("blob", path.read_bytes())))
        elif (inner := _tree(path)) is not None:
            # folders are sorted as if their names ended with a slash
            entries.append((name + b"/", b"40000 " + name + b"\0" + inner))
    return _object("tree", b"".join(entry for _, entry in sorted(entries))) if entries else None


def _object(kind: str, data: bytes) -> bytes:
    header = f"{kind} {len(data)}\0".encode()
    return hashlib.sha1(header + data, usedforsecurity=False).digest()


def _commit() -> str:
    """Return the commit of this checkout, marked if tracked files are modified."""
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

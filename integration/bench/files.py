"""Files that a run leaves: each is whole, or as it was before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from integration.bench.case import BenchmarkError
from mtp_plugin.errors import expect

OUTPUT = "--output"
TRACE = "--trace"
PLOT_SUFFIX = ".png"
_TAIL = 16


def results_file(output: Path | None, default: Path, *, is_full: bool) -> Path | None:
    """Where the results go; None: nowhere, since a lesser run replaces no published file.

    Args:
        is_full: on a GPU, and neither quick nor a choice of cases.

    Raises:
        BenchmarkError: a file that cannot be written, or that the plot beside it would replace.
    """
    path = default if output is None and is_full else output
    check_output(path)
    return path


def check_output(path: Path | None) -> None:
    """Refuse a file for the results, or for the plot beside it, before anything is loaded for it.

    Raises:
        BenchmarkError: a file that cannot be written, or that the plot would replace.
    """
    if path is None:
        return
    expect(
        path.suffix != PLOT_SUFFIX,
        BenchmarkError,
        f"{OUTPUT}: expected a file for JSON, got {path}, where the plot goes",
    )
    check_writable(path)
    check_writable(plot_file(path))


def plot_file(path: Path) -> Path:
    """Where the plot of results goes."""
    return path.with_suffix(PLOT_SUFFIX)


def stored_line(path: Path | None) -> str:
    """What a run says of its results at the end."""
    if path is None:
        return "results are not written: without a GPU or with --quick they need an --output"
    return f"results: {path}"


def check_writable(path: Path, option: str = OUTPUT) -> None:
    """Make the folders that lead to a file, before anything is measured for it.

    Raises:
        BenchmarkError: they cannot be made or written to, or there is something else than a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        expect(not path.is_dir(), BenchmarkError, f"{option}: {path} is a folder, expected a file")
        expect(
            path.is_file() or not path.exists(),
            BenchmarkError,
            f"{option}: {path} is a device or a pipe, expected a file",
        )
        expect(
            not path.exists() or os.access(path, os.W_OK),
            BenchmarkError,
            f"{option}: {path} cannot be written: it is read-only",
        )
        beside = _beside(path)
        beside.touch()
        beside.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error, option) from error


@contextmanager
def written_whole(path: Path, option: str = OUTPUT) -> Iterator[Path]:
    """A file beside ``path`` to write; it takes its place at the end, or goes without a trace.

    Raises:
        BenchmarkError: it cannot be written, as on a full disk.
    """
    beside = _beside(path)
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(os.path.realpath(path))
    except OSError as error:
        raise _unwritable(path, error, option) from error
    finally:
        beside.unlink(missing_ok=True)


def store(path: Path | None, content: dict[str, Any]) -> None:
    """Write the document whole; without a path nothing.

    Raises:
        BenchmarkError: it cannot be written; what was there before still is.
    """
    if path is None:
        return
    with written_whole(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_trace(path: Path) -> None:
    """Refuse a trace whose end is missing: the profiler does not tell of a full disk.

    Raises:
        OSError: it has no end, or is not there at all.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        is_whole = path.suffix == ".gz" or file.read().rstrip().endswith(b"}")
    if not is_whole:
        raise OSError("the profiler wrote only a part of it")


def _beside(path: Path) -> Path:
    """In the folder of the file itself, where ``path`` is a link; with the same suffix."""
    place = Path(os.path.realpath(path))
    return place.with_name(f".part-{os.getpid()}{place.suffix}")


def _unwritable(path: Path, error: Exception, option: str) -> BenchmarkError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return BenchmarkError(f"{option}: {path} cannot be written: {why}")


def why_no_plot() -> str | None:
    """Return why plots cannot be written; None if matplotlib is installed."""
    if find_spec("matplotlib") is not None:
        return None
    return "matplotlib is not installed: pip install matplotlib"

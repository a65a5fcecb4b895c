"""Output files, written atomically."""

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
    """Return the file for the results; None: a quick run replaces no published file.

    Args:
        is_full: on a GPU, and neither quick nor a choice of cases.

    Raises:
        BenchmarkError: the file cannot be written, or the plot would replace it.
    """
    path = default if output is None and is_full else output
    check_output(path)
    return path


def check_output(path: Path | None) -> None:
    """Check before any work that the result file and its plot can be written.

    Raises:
        BenchmarkError: a file that cannot be written, or that the plot would replace.
    """
    if path is None:
        return
    expect(
        path.suffix != PLOT_SUFFIX,
        BenchmarkError,
        f"{OUTPUT}: expected a file for JSON, got {path}, the name of the plot",
    )
    check_writable(path)
    check_writable(plot_file(path))


def plot_file(path: Path) -> Path:
    return path.with_suffix(PLOT_SUFFIX)


def stored_line(path: Path | None) -> str:
    """Return the last line of a run."""
    if path is None:
        return "results are not written: without a GPU or with --quick they need an --output"
    return f"results: {path}"


def check_writable(path: Path, option: str = OUTPUT) -> None:
    """Create the parent directories of a file and check that it can be written.

    Raises:
        BenchmarkError: they cannot be created or written, or the path is no file.
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
        temporary = _temporary_path(path)
        temporary.touch()
        temporary.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error, option) from error


@contextmanager
def written_whole(path: Path, option: str = OUTPUT) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; it replaces ``path`` if no error occurs.

    Raises:
        BenchmarkError: it cannot be written, as on a full disk.
    """
    temporary = _temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(os.path.realpath(path))
    except OSError as error:
        raise _unwritable(path, error, option) from error
    finally:
        temporary.unlink(missing_ok=True)


def store(path: Path | None, content: dict[str, Any]) -> None:
    """Write the document; without a path do nothing.

    Raises:
        BenchmarkError: it cannot be written; the former content is kept.
    """
    if path is None:
        return
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_trace(path: Path) -> None:
    """Refuse an incomplete trace: the profiler reports no error on a full disk.

    Raises:
        OSError: it is incomplete or missing.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        is_whole = path.suffix == ".gz" or file.read().rstrip().endswith(b"}")
    if not is_whole:
        raise OSError("the profiler wrote only a part of it")


def _temporary_path(path: Path) -> Path:
    """Return a name in the folder of the file, links resolved, with the same suffix."""
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

"""Files of a run: whole, or as they were."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.bench import files
from integration.bench.case import BenchmarkError

DEFAULT = Path("published.json")


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Files of this process end at so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_old_results(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    files.store(file, {"old": True})
    before = file.read_text()
    with full_disk(100), pytest.raises(BenchmarkError) as refused:
        files.store(file, {"new": "x" * 200})
    assert str(refused.value) == f"--output: {file} cannot be written: File too large"
    assert file.read_text() == before
    assert [*tmp_path.iterdir()] == [file]


def test_an_interrupt_leaves_the_old_results(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text("old")

    def write() -> None:
        with files.written_whole(file) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "deep" / "step.json", tmp_path / "latest.json"
    file.parent.mkdir()
    link.symlink_to(file)
    files.store(files.results_file(link, DEFAULT, is_full=False), {"a": 1})
    assert link.is_symlink()
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert [*file.parent.iterdir()] == [file]


def test_a_file_is_as_readable_as_others(tmp_path: Path) -> None:
    file, other = tmp_path / "step.json", tmp_path / "other"
    files.store(file, {})
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/dev/full", "/dev/full is a device or a pipe, expected a file"),
        ("/dev/null", "/dev/null is a device or a pipe, expected a file"),
        ("/proc/x.json", "/proc/x.json cannot be written: No such file or directory"),
        ("/proc/self/x.json", "/proc/self/x.json cannot be written: No such file or directory"),
        ("/proc/none/x.json", "/proc/none/x.json cannot be written: No such file or directory"),
        ("/tmp", "/tmp is a folder, expected a file"),
        ("/dev/null/x.json", "/dev/null/x.json cannot be written: File exists"),
        ("results.png", "expected a file for JSON, got results.png, the name of the plot"),
        ("x" * 300, f"{'x' * 300} cannot be written: File name too long"),
    ],
)
def test_what_is_no_file_is_refused_first(output: str, message: str) -> None:
    with pytest.raises(BenchmarkError) as refused:
        files.results_file(Path(output), DEFAULT, is_full=False)
    assert str(refused.value) == f"--output: {message}"


def test_output_path_with_a_nul_is_refused() -> None:
    """Python's own words follow; they differ between its versions."""
    with pytest.raises(BenchmarkError) as refused:
        files.results_file(Path("a\0b"), DEFAULT, is_full=False)
    assert str(refused.value).startswith("--output: a\0b cannot be written: ")


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "a" / "b.json")
    assert [*tmp_path.rglob("*")] == [tmp_path / "a"]


def test_a_read_only_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "step.json"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != file)
    with pytest.raises(BenchmarkError, match=r"step\.json cannot be written: it is read-only"):
        files.check_writable(file)


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    """As another user where this one may do everything."""
    tmp_path.chmod(0o755 if (is_root := os.geteuid() == 0) else 0o555)
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(BenchmarkError) as refused:
            files.check_writable(tmp_path / "step.json")
    finally:
        if is_root:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    assert str(refused.value).endswith("step.json cannot be written: Permission denied")


def test_a_plot_that_cannot_be_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "step.png").mkdir()
    with pytest.raises(BenchmarkError, match=r"step\.png is a folder, expected a file"):
        files.results_file(tmp_path / "step.json", DEFAULT, is_full=False)


@pytest.mark.parametrize("written", ['{"traceEvents": [', "", None])
def test_a_part_of_a_trace_replaces_none(tmp_path: Path, written: str | None) -> None:
    file = tmp_path / "trace.json"
    file.write_text("old")

    def write() -> None:
        with files.written_whole(file, files.TRACE) as temporary:
            if written is not None:
                temporary.write_text(written)
            files.check_trace(temporary)

    with pytest.raises(BenchmarkError, match=r"--trace: .*trace\.json cannot be written: "):
        write()
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]

"""Kernels compiled by other processes are found in the cache by the launches that follow."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin.ops import early_compile
from mtp_plugin.ops.early_compile import (
    CompileJob,
    CompileRequest,
    _in_order,
    num_processes,
    request_launches,
)
from mtp_plugin.requests.columns import REQUEST_COLUMNS
from tests.no_interpreter import run_module

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Triton cache, for jobs of any size."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(early_compile, "LEAST_KERNELS", 1)
    return tmp_path


class Sleep:
    """Sleeps when it is unpickled, that is in the process of a job."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


class Exit:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def request(*content: Any) -> CompileRequest:
    return CompileRequest(f"kernel {content}", 1, pickle.dumps(content))


@pytest.fixture
def slow_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompileRequest]:
    """Requests that take a minute each."""
    text = "import time\n\ndef __getattr__(name):\n    name == 'kernel' and time.sleep(60)\n"
    (tmp_path / "module_of_slow_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return [request("module_of_slow_kernels", "kernel", *[n] * 6) for n in range(6)]


def job_of(*requests: CompileRequest, **options: Any) -> CompileJob:
    return CompileJob(requests, **options)


def popen_of(job: CompileJob) -> subprocess.Popen[bytes]:
    assert job._process is not None
    return job._process


def num_running(leader: int) -> int:
    """Return how many processes of a group run."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            state, _, group, *_ = path.read_text().rsplit(")", 1)[1].split()
            count += group == str(leader) and state != "Z"
    return count


def test_launches_find_what_a_job_compiled(tmp_path: Path) -> None:
    """In a process without the interpreter, for a Hopper GPU that is absent."""
    found = run_module("tests.ops.compile_and_launch", TRITON_CACHE_DIR=str(tmp_path))
    assert found["errors"] == {}
    assert found["recorded"] > 8
    assert found["of_other_thread"] == ["one_kernel"]
    assert found["empty"] == [0.0] * 3
    assert found["compiled"] == found["recorded"]
    assert found["at_launch"] == []
    assert found["repeated"] == "nothing to do"


@pytest.mark.usefixtures("cache")
def test_without_requests_there_is_nothing_to_wait_for() -> None:
    job = job_of()
    assert job.is_done
    job.wait()
    job.close()


@pytest.mark.usefixtures("cache")
def test_few_kernels_are_left_to_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_compile, "LEAST_KERNELS", 3)
    assert job_of(request("module"), request("module", "kernel"))._process is None


def test_no_process_starts_when_everything_is_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process started"))
    known = request(Sleep())
    launches = request_launches(job_of, "vocabulary", capability=90)
    (cache / "mtp_plugin-compiled").mkdir()
    for each in (known, launches):
        (cache / "mtp_plugin-compiled" / each.mark).touch()
    assert job_of(known, launches).is_done


def test_only_what_is_missing_is_compiled(cache: Path) -> None:
    known, new = request(Sleep()), request(Exit(), "kernel")
    (cache / "mtp_plugin-compiled").mkdir()
    (cache / "mtp_plugin-compiled" / known.mark).touch()
    job = job_of(known, new)
    assert popen_of(job).wait(60) == 3


def test_marks_depend_on_ops_columns_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(*arguments: Any, capability: int = 90) -> str:
        return request_launches(job_of, *arguments, capability=capability).mark

    read: set[Path] = set()

    def read_bytes(path: Path) -> bytes:
        read.add(path)
        return b"another version"

    marks = {mark("bfloat16", 4), mark("bfloat16", 8), mark("bfloat16", 4, capability=100)}
    monkeypatch.setattr("triton.__version__", "3.0.0")
    marks.add(mark("bfloat16", 4))
    monkeypatch.setattr(early_compile, "REQUEST_COLUMNS", REQUEST_COLUMNS[1:])
    marks.add(mark("bfloat16", 4))
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    marks.add(mark("bfloat16", 4))
    assert len(marks) == 6
    ops = ROOT / "mtp_plugin" / "ops"
    assert ops / "sampling" / "sample_triton.py" in read
    assert all(path.is_relative_to(ops) for path in read)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (200, 8)])
def test_number_of_processes_is_at_most_the_cores_and_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert num_processes() == expected


@pytest.mark.usefixtures("cache")
def test_job_runs_as_many_processes_as_it_may(
    slow_requests: list[CompileRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that compiles is one of them."""
    monkeypatch.setattr(early_compile, "num_processes", lambda: 3)
    job = job_of(*slow_requests)
    process = popen_of(job)
    while num_running(process.pid) < 3 and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.3)
    assert num_running(process.pid) == 3
    job.close()


def test_kernel_that_does_not_compile_is_left_to_its_launch(cache: Path, caplog: Any) -> None:
    job = job_of(request("no.such.module"), request("no.such.module", "kernel"))
    job.wait()
    assert job.is_done
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert caplog.records == []


@pytest.mark.parametrize("how", ["close", "timeout", "collected", "killed"])
@pytest.mark.usefixtures("cache")
def test_job_that_is_given_up_leaves_no_process(
    slow_requests: list[CompileRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    how: str,
) -> None:
    if how == "timeout":
        monkeypatch.setattr(early_compile, "LONGEST_WAIT", 0.5)
    monkeypatch.setattr(early_compile, "num_processes", lambda: 2)
    job = job_of(*slow_requests)
    process = popen_of(job)
    while num_running(process.pid) < 2 and process.poll() is None:
        time.sleep(0.05)
    assert not job.is_done
    if how == "close":
        job.close()
        assert job.is_done
    elif how == "timeout":
        job.wait()
        assert job.is_done
        assert "first launch: the compiling process took more than 0 s" in caplog.text
    elif how == "killed":
        os.kill(process.pid, signal.SIGKILL)
        job.wait()
        assert "first launch: the compiling process ended with status -9" in caplog.text
    else:
        del job
    assert process.returncode is not None
    while num_running(process.pid):
        time.sleep(0.05)


@pytest.mark.usefixtures("cache")
def test_process_that_cannot_start_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert job_of(request("module")).is_done
    assert "kernels are compiled at their first launch: " in caplog.text


@pytest.mark.parametrize("values", [{"executable": None}, {"executable": ""}, {"frozen": True}])
@pytest.mark.usefixtures("cache")
def test_program_without_an_interpreter_starts_no_process(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    for name, value in values.items():
        monkeypatch.setattr(sys, name, value, raising=False)
    assert job_of(request(Sleep())).is_done


@pytest.mark.usefixtures("cache")
def test_job_imports_the_modules_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the working directory, which may hold another version of the kernels."""
    for folder in ("installed", "directory"):
        (tmp_path / folder).mkdir()
        text = (
            f"from pathlib import Path\nPath({str(tmp_path / 'imported')!r}).write_text('{folder}')"
        )
        (tmp_path / folder / "module_of_a_kernel.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    monkeypatch.chdir(tmp_path / "directory")
    job_of(request("module_of_a_kernel")).wait()
    assert (tmp_path / "imported").read_text() == "installed"


@pytest.mark.usefixtures("cache")
def test_process_that_fails_is_logged(caplog: Any) -> None:
    job_of(CompileRequest("kernel", 1, b"no pickle")).wait()
    assert caplog.text == ""
    job_of(request(Exit())).wait()
    assert "first launch: the compiling process ended with status 3" in caplog.text


def test_no_process_starts_without_access_to_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache / "file"))
    assert job_of(request(Sleep())).is_done
    assert "kernels are compiled at their first launch: " in caplog.text


def test_kernels_that_are_waited_for_end_the_wait_before_the_job_ends(cache: Path) -> None:
    one, other = request(Sleep()), request(Sleep(), "kernel")
    job = job_of(one, other)
    mark = cache / "mtp_plugin-compiled" / one.mark
    begin = time.monotonic()
    threading.Timer(0.3, mark.touch).start()
    job.wait_for([one])
    assert time.monotonic() - begin >= 0.3
    assert mark.exists()
    assert not job.is_done
    job.close()
    job.wait_for([other])  # does not wait for what is not compiled any more


def test_job_of_another_process_is_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process started"))
    one = request(Sleep())
    job = job_of(one, starts=False)
    assert not job.is_done
    (cache / "mtp_plugin-compiled").mkdir()
    threading.Timer(0.3, (cache / "mtp_plugin-compiled" / one.mark).touch).start()
    assert 0.2 < job.wait() < 60


def test_urgent_kernels_come_after_the_longest() -> None:
    requests = [CompileRequest(f"kernel {n}", n, b"") for n in range(6)]
    ordered = _in_order(requests, {"kernel 1", "kernel 2"}, 4)
    assert [each.num_parameters for each in ordered] == [5, 4, 2, 1, 3, 0]

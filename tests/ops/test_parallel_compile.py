"""Kernels compiled by other processes are found in the cache by the launches that follow."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin.ops import parallel_compile
from mtp_plugin.ops.parallel_compile import CompileJob, CompileProcess, CompileRequest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Triton cache, for jobs of any size."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "LEAST_REQUESTS", 1)
    return tmp_path


class Sleep:
    """Sleeps when it is unpickled, that is in the process of a job."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


class SleepInWorker:
    """Sleeps when it is unpickled in a process that the process of a job has started."""

    def __reduce__(self) -> Any:
        code = "import multiprocessing as m, time; m.parent_process() and time.sleep(60)"
        return exec, (code,)


class Exit:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def request(*content: Any) -> CompileRequest:
    return CompileRequest(f"kernel {len(content)}", 1, pickle.dumps(content))


def popen_of(process: CompileProcess | None) -> subprocess.Popen[bytes]:
    assert process is not None
    return process._process


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_launches_find_what_a_job_compiled(tmp_path: Path) -> None:
    """In a process without the interpreter, for a Hopper GPU that is absent."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_and_launch"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout)
    assert found["errors"] == {}
    assert found["recorded"] > 8
    assert found["of_other_thread"] == ["one_kernel"]
    assert found["empty"] == [0.0] * 3
    assert found["compiled"] == found["recorded"]
    assert found["at_launch"] == []
    assert found["repeated"] == "nothing to do"


@pytest.mark.usefixtures("cache")
def test_without_requests_there_is_nothing_to_wait_for() -> None:
    job = CompileJob([])
    assert job.is_done
    job.wait()
    job.close()


@pytest.mark.usefixtures("cache")
def test_few_kernels_are_left_to_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_compile, "LEAST_REQUESTS", 3)
    assert CompileJob([request("module"), request("module", "kernel")]).is_done


def test_only_what_is_missing_is_compiled(cache: Path) -> None:
    known, new = request(Sleep()), request(Sleep(), "kernel")
    (cache / "mtp_plugin-compiled").mkdir()
    (cache / "mtp_plugin-compiled" / known.mark).touch()
    assert CompileJob([known]).is_done
    job = CompileJob([known, new])
    assert not job.is_done
    job.close()


def test_kernel_that_does_not_compile_is_left_to_its_launch(cache: Path, caplog: Any) -> None:
    job = CompileJob([request("no.such.module"), request("no.such.module", "kernel")])
    job.wait()
    assert job.is_done
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert caplog.records == []


@pytest.mark.parametrize("how", ["close", "timeout", "collected", "killed"])
@pytest.mark.usefixtures("cache")
def test_job_that_is_given_up_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, how: str
) -> None:
    content = SleepInWorker() if how == "killed" else Sleep()
    job = CompileJob([request(content)], background=True)
    process = popen_of(job._process)
    assert not job.is_done
    if how == "close":
        job.close()
        assert job.is_done
    elif how == "timeout":
        monkeypatch.setattr(parallel_compile, "LONGEST_WAIT", 0.01)
        time.sleep(0.01)
        assert job.is_done  # requests that wait for it go on
        job.wait()
        assert job.is_done
        assert "kernels are compiled in one process: the process that" in caplog.text
        assert "took more than 0 s" in caplog.text
    elif how == "killed":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (workers := children.read_text().split()):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        job.wait()
        assert "ended with status -9" in caplog.text
        while any(is_running(pid) for pid in workers):
            time.sleep(0.05)
        return
    else:
        del job
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.usefixtures("cache")
def test_process_that_cannot_start_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    job = CompileJob([request("module")])
    assert job.is_done
    assert "kernels are compiled in one process: " in caplog.text


@pytest.mark.parametrize("values", [{"executable": None}, {"executable": ""}, {"frozen": True}])
@pytest.mark.usefixtures("cache")
def test_program_without_an_interpreter_starts_no_process(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    for name, value in values.items():
        monkeypatch.setattr(sys, name, value, raising=False)
    assert CompileJob([request(Sleep())]).is_done


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
    CompileJob([request("module_of_a_kernel")]).wait()
    assert (tmp_path / "imported").read_text() == "installed"


@pytest.mark.usefixtures("cache")
def test_process_that_fails_is_logged(caplog: Any) -> None:
    job = CompileJob([CompileRequest("kernel", 1, b"no pickle")])
    job.wait()
    assert caplog.text == ""
    broken = CompileJob([request(Exit())])
    broken.wait()
    assert "the process that compiles them in parallel ended with status 3" in caplog.text


@pytest.mark.usefixtures("cache")
def test_job_compiles_in_the_process_that_was_started_ahead() -> None:
    ahead = CompileProcess.start_ahead()
    job = CompileJob([request(Exit())], process=ahead)
    assert job._process is ahead
    job.wait()
    assert popen_of(ahead).returncode == 3


@pytest.mark.usefixtures("cache")
def test_process_started_ahead_ends_if_nothing_is_missing() -> None:
    ahead = CompileProcess.start_ahead()
    assert CompileJob([], process=ahead).is_done
    assert popen_of(ahead).returncode is not None


def test_no_process_starts_ahead_where_an_earlier_job_compiled(cache: Path) -> None:
    (cache / "mtp_plugin-compiled").mkdir()
    assert CompileProcess.start_ahead() is None


def test_no_process_starts_ahead_without_access_to_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_access() -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(parallel_compile, "_marks_folder", no_access)
    assert CompileProcess.start_ahead() is None


def test_kernels_that_are_waited_for_end_the_wait_before_the_job_ends(cache: Path) -> None:
    one, other = request(Sleep()), request(Sleep(), "kernel")
    job = CompileJob([one, other])
    mark = cache / "mtp_plugin-compiled" / one.mark
    begin = time.monotonic()
    threading.Timer(0.3, mark.touch).start()
    job.wait_for([one])
    assert time.monotonic() - begin >= 0.3
    assert mark.exists()
    assert not job.is_done
    job.close()
    job.wait_for([other])  # does not wait for what is not compiled any more


@pytest.mark.usefixtures("cache")
def test_urgent_kernels_come_after_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(parallel_compile, "num_processes", lambda: 4)
    monkeypatch.setattr(
        CompileProcess, "send", lambda _, jobs, **__: sent.extend(content for content, _ in jobs)
    )
    requests = [CompileRequest(f"kernel {n}", n, str(n).encode()) for n in range(6)]
    CompileJob(requests, urgent={"kernel 1", "kernel 2"}).close()
    assert sent == [b"5", b"4", b"2", b"1", b"3", b"0"]


def test_process_imports_kernels_without_models() -> None:
    program = (
        "import sys; from mtp_plugin.ops.parallel_compile import _import_ahead; "
        "_import_ahead(); print(*sys.modules)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    imported = child.stdout.split()
    assert "mtp_plugin.ops.sampling.sample_triton" in imported
    assert "mtp_plugin.hosts.embedded.layers.experts_triton" in imported
    assert not {"transformers", "tokenizers", "mtp_plugin.hosts.embedded.llm"} & set(imported)

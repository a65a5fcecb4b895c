"""Kernels that are compiled in another process, for a GPU that is not there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from triton.runtime import driver

from mtp_plugin.hosts.vllm import early_kernels
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.ops.early_compile import CompileJob
from mtp_plugin.speculative.rows.options import EngineSettings
from tests.hosts.vllm.fake_vllm import make_config

KERNELS = {"accept_kernel", "sample_finish_kernel", "sample_scan_kernel"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Triton cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    return tmp_path / "first"


def start(monkeypatch: pytest.MonkeyPatch, *, is_first_rank: bool = True) -> CompileJob:
    """Start compiling as a worker of an engine with few requests does."""
    monkeypatch.setattr(early_kernels, "_of_worker", None)
    config = make_config(
        model_config__dtype=torch.bfloat16,
        speculative_config__num_speculative_tokens=1,
        scheduler_config=type("Scheduler", (), {"max_num_seqs": 1}),
    )
    settings = EngineSettings(VllmOptions(), 1, draft_ids=[*range(7), 899])
    early_kernels.start(config, settings, 90, is_first_rank=is_first_rank)
    job = early_kernels.of_worker()
    assert job is not None
    return job


@pytest.mark.full  # compiles for about a minute
def test_cache_holds_the_kernels_wherever_vllm_moves_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [start(monkeypatch), start(monkeypatch, is_first_rank=False)]
    moved = cache.with_name("second")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    for job in jobs:
        job.wait()
        found = {path.name for path in moved.glob("*/__grp__*.json")}
        assert found == {f"__grp__{kernel}.json" for kernel in KERNELS}
        shutil.rmtree(moved)
    assert caplog.records == []


def test_process_that_was_killed_is_not_waited_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(monkeypatch)
    assert job._process is not None
    os.kill(job._process.pid, signal.SIGKILL)
    assert job.wait() < 60
    assert list((cache / "mtp_plugin-compiled").iterdir()) == []


def test_launches_that_fail_are_marked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other ranks wait for the mark."""
    monkeypatch.setattr(early_kernels, "WARM_UP_ROWS", (0,))  # no rows: an error
    assert start(monkeypatch).wait() < 60
    assert "ended with status 1" in caplog.text
    assert start(monkeypatch, is_first_rank=False).is_done
    (mark,) = (cache / "mtp_plugin-compiled").iterdir()
    assert mark.read_text() == ""


@pytest.mark.usefixtures("cache")
def test_start_initialises_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a worker sets its device, that would leave a context on the first GPU."""

    for name in ("_active", "_default"):  # made when they are read
        monkeypatch.setattr(driver, name, None)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    job = start(monkeypatch)
    job.close()
    job.wait()
    assert (driver._active, driver._default) == (None, None)


def test_no_process_starts_when_the_kernels_are_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of requests of the same tilings needs no other kernels."""
    job = start(monkeypatch)
    (request,) = job._dry_runs
    job.close()
    (cache / "mtp_plugin-compiled" / request.mark).touch()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process started"))
    assert start(monkeypatch).wait() < 1

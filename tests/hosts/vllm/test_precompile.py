"""Kernels compiled in other processes, for a GPU that is not there."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from mtp_plugin.hosts.vllm import precompile
from mtp_plugin.hosts.vllm.precompile import KERNELS, Launch, Precompilation

LAUNCH = Launch(capability=90, dtype="bfloat16", vocab=1000, rows=1, num_drafts=1)


@pytest.mark.full  # compiles for about a minute
def test_the_cache_holds_the_kernels_wherever_vllm_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    compiling = Precompilation([LAUNCH], starts=True)
    other_rank = Precompilation([LAUNCH], starts=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    for each in (compiling, other_rank):
        each.finish()
        found = {path.name for path in (tmp_path / "second").glob("*/__grp__*.json")}
        assert found == {f"__grp__{kernel}.json" for kernel in KERNELS}
        shutil.rmtree(tmp_path / "second")


def test_a_process_that_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiling = Precompilation([LAUNCH], starts=True)
    (process,) = compiling._processes.values()
    process.kill()
    assert compiling.finish() < 60
    assert not list(tmp_path.glob("*.done"))


def test_a_process_that_fails_leaves_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(precompile, "compile_launch", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        precompile.main(json.dumps(asdict(LAUNCH)))
    assert len(list(tmp_path.glob("*.done"))) == 1

"""The benchmark of ops: a case has times only if its results match."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from integration.bench.case import TINY, BenchmarkError, Case, Trial
from integration.bench.machine import git_tree
from integration.bench.ops import OpsOptions, cases_of, measure, run
from mtp_plugin.ops.backend import Backend

CPU = torch.device("cpu")


def adding(amount: dict[Backend, int]) -> Case:
    """Adds to a state, by implementation."""

    def prepare(seed: int) -> Trial:
        state = torch.full((3,), seed)

        def add(backend: Backend) -> dict[str, torch.Tensor]:
            state.add_(amount[backend])
            return {"sum": state.sum()}

        return Trial(add, {"state": state})

    return Case("add", TINY, 24, prepare)


def test_states_are_compared_and_restored() -> None:
    same = {Backend.TORCH: 1, Backend.TRITON: 1}
    assert measure(adding(same), Backend.TRITON, CPU)["matched"] is True
    found = measure(adding(same | {Backend.TRITON: 2}), Backend.TRITON, CPU)
    assert (found["matched"], found["mismatches"]) == (False, ["state", "sum"])


def test_an_error_is_a_result() -> None:
    found = measure(adding({}), Backend.TRITON, CPU)
    assert found["matched"] is False
    assert found["error"].startswith("KeyError")


def test_cases_are_named_once() -> None:
    labels = [case.label for case in cases_of(OpsOptions(), CPU)]
    assert len(labels) == len(set(labels))
    for shown in ("step/vanilla-target-shift/b8", "accept/relaxed/b256", "draw/top-k-bias/b64"):
        assert shown in labels
    assert "step/eagle/b1-k7" in labels


def test_a_filter_without_a_case_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="--filter: no case has 'nothing' in its name"):
        cases_of(OpsOptions(only="nothing"), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    output = tmp_path / "new" / "ops.json"
    options = OpsOptions((2,), "first-pass", cpu=True, output=output)
    assert run(options) == 0
    document = json.loads(output.read_text())
    assert document["matched"] is document["complete"] is True
    assert [each["name"] for each in document["cases"]] == [
        "first-pass/mixed",
        "first-pass/vanilla",
    ]
    assert document["machine"]["package_tree"]
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.gpu
def test_times_on_a_gpu() -> None:
    (case,) = cases_of(OpsOptions((8,), "accept/strict"), torch.device("cuda"))
    found = measure(case, Backend.TRITON, torch.device("cuda"))
    assert found["matched"] is True, found
    times = found["graph_us"]
    assert 0 < times["p20"] <= times["median"] <= times["p80"] < 1000
    assert found["launches"]["kernels"] == 2


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_folder_has_the_name_that_git_gives_it(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "package"
    for name in ("a/inner.py", "a/__pycache__/inner.pyc", "a.py", "a-b.py", "e/__pycache__/z.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "a.py").chmod(0o755)
    (folder.parent / ".gitignore").write_text("__pycache__\n")
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=folder.parent, env=quiet, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    git("add", ".")
    assert git_tree(folder) == git("rev-parse", f"{git('write-tree')}:package")

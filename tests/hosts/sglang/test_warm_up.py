"""No request waits until a kernel is compiled: the warm-up launches all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def test_the_warm_up_launches_the_kernels_of_all_batches() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.hosts.sglang.launches"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    engines = json.loads(child.stdout)
    for name, launches in engines.items():
        assert launches["later"], name
        assert set(launches["later"]) <= set(launches["warm_up"]), name
    with_drafts = {kernel.split()[0].rpartition(".")[2] for kernel in engines["drafts"]["later"]}
    assert {"sample_finish_kernel", "accept_kernel"} <= with_drafts

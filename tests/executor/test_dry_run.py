"""A dry run finds the kernels of an executor's steps without launching one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_dry_run_finds_the_kernels_of_steps_and_prompts() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.executor.dry_run"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    needed, later, is_written = json.loads(child.stdout)
    of_steps = {name.rpartition(".")[2] for name in needed}
    of_processing = {name.rpartition(".")[2] for name in later}
    assert of_steps >= {
        "generation_inputs_kernel",
        "paged_uniform_kernel",  # of generations
        "paged_ragged_kernel",  # of prompts
        "router_logits_kernel",
        "accept_kernel",
        "sample_finish_kernel",
        "logprob_finish_kernel",
        "write_drafts_kernel",
    }
    assert "mask_logits_kernel" not in of_steps
    assert of_processing >= {"mask_logits_kernel", "restore_logits_kernel", "token_history_kernel"}
    assert not is_written

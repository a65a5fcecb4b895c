"""A dry run finds the kernels of an executor's steps without launching one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.config import parse_config
from mtp_plugin.errors import CheckpointError
from mtp_plugin.hosts.embedded import build
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.ops.parallel_compile import warn_of_failed_recording

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]


def test_dry_run_finds_the_kernels_of_steps_and_prompts() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.hosts.embedded.dry_run"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    needed, later, first, is_written = json.loads(child.stdout)
    of_steps = {name.rpartition(".")[2] for name in needed}
    of_greedy = {name.rpartition(".")[2] for name in first}
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
    assert set(first) < set(needed)
    assert of_greedy >= {"generation_inputs_kernel", "paged_uniform_kernel", "top1_kernel"}
    assert not of_greedy & {"sample_finish_kernel", "paged_ragged_kernel"}
    assert of_processing >= {"mask_logits_kernel", "restore_logits_kernel", "token_history_kernel"}
    assert not is_written


def test_kv_probe_runs_without_a_dry_run_where_triton_has_other_hooks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "knobs", SimpleNamespace())
    warn_of_failed_recording.cache_clear()

    def write(pools: PagedKVPools) -> None:
        rows = torch.ones(1, 2, 1, 4)
        pools.layer(0, rows, rows)

    for _ in range(2):
        assert build._probe(write, is_dry=True).num_bytes() == 2 * (2 * 2 * 4 * 4)
    (record,) = caplog.records
    assert record.getMessage().startswith("kernels are compiled in one process: AttributeError: ")


def test_an_executor_that_cannot_be_built_ends_the_compile_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []
    process = SimpleNamespace(close=lambda: ended.append(True))
    resolved = SimpleNamespace(
        device=torch.device("cuda"), config=SimpleNamespace(cuda_graph_config="graphs")
    )

    def fail(*_: object) -> None:
        raise CheckpointError("a tensor is missing")

    for name, value in {
        "resolve_config": lambda *_: resolved,
        "check_requests": lambda *_, **__: None,
        "launches_kernels": lambda _: True,
        "CompileProcess": SimpleNamespace(start_ahead=lambda: process),
        "_load": fail,
    }.items():
        monkeypatch.setattr(build, name, value)
    config = parse_config({"model": "integration/tiny_model/checkpoint", "cuda_graph_config": {}})
    with pytest.raises(CheckpointError):
        build.build_executor(config)
    assert ended == [True]

"""Engines of vLLM, each in a process of its own, shared by all tests of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.vllm import draft_models
from integration.vllm.engine_process import COMMON_ENVIRONMENT, CPU_ENVIRONMENT, SHIM
from tests.vllm.engines import JOBS, RANDOM_MODELS, ROOT, counted_ids

LIMIT_SECONDS = 1200
ENVIRONMENT = {
    **COMMON_ENVIRONMENT,
    **CPU_ENVIRONMENT,
    "PYTHONPATH": f"{SHIM}{os.pathsep}{ROOT}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Of every engine: vLLM on CPU, with the code of its GPU runner."""

Result = dict[str, Any]


@pytest.fixture(scope="session")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Result]]]:
    """Start every engine that a collected test reads, two at a time."""
    wanted = {
        name
        for item in request.session.items
        for marker in item.iter_markers("engines")
        for name in marker.args
    }
    folder = tmp_path_factory.mktemp("engines")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name, folder) for name in JOBS if name in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def results(
    request: pytest.FixtureRequest, jobs: dict[str, Future[Result]]
) -> Callable[[str], Result]:
    """Return the results of an engine that the test's marker ``engines`` lists."""
    names = [name for marker in request.node.iter_markers("engines") for name in marker.args]

    def get(name: str) -> Result:
        assert name in names, f"{name} is missing in the marker 'engines'"
        return jobs[name].result()

    return get


def run(name: str, folder: Path) -> Result:
    """Run an engine in a process of its own; its log is in the folder."""
    job = JOBS[name]
    if size := job.get("counted_ids"):
        listed = folder / f"{name}.ids.json"
        listed.write_text(json.dumps(counted_ids(size)))
        plugin = job["engine"]["additional_config"]["mtp_plugin"] | {"draft_vocab": str(listed)}
        engine = job["engine"] | {"additional_config": {"mtp_plugin": plugin}}
        job = job | {"engine": engine}
    for model in job.get("random_models", ()):
        draft_models.write(folder / f"{name}.models", model)
    given, result, log = (folder / f"{name}.{suffix}" for suffix in ("json", "out.json", "log"))
    given.write_text(json.dumps(job).replace(RANDOM_MODELS, str(folder / f"{name}.models")))
    module = job.get("module", "tests.vllm.run_engine")
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", module, str(given), str(result)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **job["env"]},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    text = log.read_text()
    if done.returncode:
        raise RuntimeError(f"engine {name} failed ({log}):\n{text[-6000:]}")
    return {**json.loads(result.read_text()), "log": text}


LINES: list[str] = []


@pytest.fixture
def report() -> Callable[[str], None]:
    """Print a line at the end of the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the tests measured."""
    if LINES:
        terminalreporter.section("measured")
        for line in LINES:
            terminalreporter.write_line(line)

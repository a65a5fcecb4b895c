"""Settings of every test."""

from __future__ import annotations

import fcntl
import gc
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.interpreter import speed_up
from tests.near_ties import pytest_runtest_teardown as pytest_runtest_teardown
from tests.near_ties import pytest_terminal_summary as pytest_terminal_summary

# without a GPU the kernels run under Triton's interpreter; triton reads this when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        import triton

        # also for kernels that a test imports which takes the variable away
        triton.knobs.runtime.interpret = True
        speed_up()

# passes over all that torch and transformers hold took a seventh of the interpreter's time
if not torch.cuda.is_available():
    gc.set_threshold(50_000, 20, 50)

# the tensors of a test are small: a second thread costs more than it gives
torch.set_num_threads(1)

# derandomized: a run in CI repeats on any desk
settings.register_profile("repository", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repository")

MakeText = Callable[[Path], str]
"""What makes a text; it may leave files in the folder."""


MATRIX = frozenset({"no_overlap", "vanilla", "k", "keep_warm"})
"""Parameters whose combinations multiply engines: loop, worker, draft length, idle drafter."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a CUDA device; leave ``full`` ones to ``-m full``.

    Every scenario of the executor runs with one combination of :data:`MATRIX`, another one from
    scenario to scenario; the other combinations get the marker ``full``. Those of losslessness
    keep all.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    scenarios: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        is_scenario = "executor" in item.path.parts and "losslessness" not in item.path.name
        if is_scenario and isinstance(item, pytest.Function):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if MATRIX & params.keys():
                others = [repr(value) for name, value in params.items() if name not in MATRIX]
                scenarios.setdefault((item.path, item.originalname, *others), []).append(item)
    numbers: Counter[str] = Counter()
    for (path, name, *_), cases in scenarios.items():
        scenario = f"{path.name}::{name}"
        chosen = (zlib.crc32(scenario.encode()) + numbers[scenario]) % len(cases)
        numbers[scenario] += 1
        for case in {*cases} - {cases[chosen]}:
            case.add_marker("full")
    if "full" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="module", autouse=True)
def collector_leaves_the_rest_alone() -> None:
    """Python's collector does not look again at what is there before a module's tests.

    Where they or a tool ask for a collection, a pass over all that the process imported and all
    tests that it holds takes longer than most tests. With a GPU executors freeze objects, and leave
    that to a host that did: there nothing is.
    """
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def once_per_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, MakeText], str]:
    """Gives the text of a name: the first of a run's workers makes it, the others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the other workers' too

    def give(name: str, make: MakeText) -> str:
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = folder / f"{name}.txt"
            if not kept.exists():
                kept.write_text(make(folder))
            return kept.read_text()

    return give


@pytest.fixture
def device_memory() -> Iterator[Callable[[int], None]]:
    """Asks for that many GiB of the device; what torch would keep of them goes to other workers."""

    def ask(gibibytes: int) -> None:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
            pytest.skip(f"needs {gibibytes} GB of device memory")

    yield ask
    torch.cuda.empty_cache()

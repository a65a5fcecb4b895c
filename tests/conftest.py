"""Settings and fixtures of all tests."""

from __future__ import annotations

import fcntl
import gc
import itertools
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.interpreter import speed_up
from tests.near_ties import pytest_runtest_teardown as pytest_runtest_teardown
from tests.near_ties import pytest_terminal_summary as pytest_terminal_summary

# without a GPU kernels run under Triton's interpreter, which triton decides when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        import triton

        # also for kernels imported by a test that removes the variable
        triton.knobs.runtime.interpret = True
        speed_up()

# collecting what torch and transformers hold took a seventh of the interpreter's time
if not torch.cuda.is_available():
    gc.set_threshold(50_000, 20, 50)

# tensors are small, so a second thread costs more time than it saves
torch.set_num_threads(1)

# derandomized, so that a failure in CI repeats elsewhere
settings.register_profile("repository", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repository")

MakeText = Callable[[Path], str]
"""Returns a text; may write files into the folder."""


EMBEDDED = "tests/hosts/embedded"
PROTECTED = {
    "lossless": (
        "integration/examples",
        "tests/contract_host/test_loop.py",
        f"{EMBEDDED}/on_gpu",
        f"{EMBEDDED}/test_draft_exactness.py",
        f"{EMBEDDED}/test_draft_length.py",
        f"{EMBEDDED}/test_draft_vocab.py",
        f"{EMBEDDED}/test_fused_layers.py",
        f"{EMBEDDED}/test_graphs.py",
        f"{EMBEDDED}/test_logprobs.py",
        f"{EMBEDDED}/test_losslessness.py",
        f"{EMBEDDED}/test_prompt_graphs.py",
        f"{EMBEDDED}/test_random_requests.py",
        f"{EMBEDDED}/test_sampling_scenarios.py",
        f"{EMBEDDED}/test_scenarios.py",
        f"{EMBEDDED}/test_thinking_budget.py",
        "tests/hosts/test_one_verification.py",
        "tests/infer",
        "tests/serving/test_equality.py",
        "tests/speculative/drafting/test_batch_independence.py",
    ),
    "distribution": (
        f"{EMBEDDED}/test_residual.py",
        "tests/distribution",
        "tests/ops/sampling/test_distribution.py",
    ),
    "contract": (
        "integration/vllm",
        "tests/contract_host",
        "tests/hosts",
        "tests/megatron",
        "tests/speculative",
        "tests/vllm",
    ),
    "ops": (
        f"{EMBEDDED}/attention",
        f"{EMBEDDED}/layers",
        "tests/compiled",
        "tests/hosts/vllm/test_row_ops.py",
        "tests/integration_bench/test_ops.py",
        "tests/interpreter",
        "tests/ops",
    ),
    "messages": (
        f"{EMBEDDED}/models/test_config_fuzz.py",
        f"{EMBEDDED}/models/test_config_reader.py",
        f"{EMBEDDED}/models/test_model_preflight.py",
        f"{EMBEDDED}/test_admission.py",
        f"{EMBEDDED}/test_set_up.py",
        "tests/cli/test_errors.py",
        "tests/cli/test_refusals.py",
        "tests/config",
        "tests/hosts/tensorrt_llm/test_side_file.py",
        "tests/hosts/vllm/test_engine_checks.py",
        "tests/infer/test_refusals.py",
        "tests/ops/draft_inputs/test_arguments.py",
        "tests/ops/logprobs/test_arguments.py",
        "tests/ops/sampling/test_arguments.py",
        "tests/requests/test_admission.py",
        "tests/requests/test_refusals.py",
        "tests/serving/test_hostile_bodies.py",
        "tests/serving/test_refusals.py",
        "tests/speculative/test_refusals.py",
        "tests/test_errors.py",
    ),
    "api": (EMBEDDED, "integration", "tests"),
}
"""What tests protect, the marker that they get, by folder or file; the longest path decides."""
MARKER_OF = {path: marker for marker, paths in PROTECTED.items() for path in paths}
ROOT = Path(__file__).parent.parent


def pytest_configure() -> None:
    """Refuse a table with paths that no longer exist: their tests would get another marker."""
    missing = [path for path in MARKER_OF if not (ROOT / path).exists()]
    if missing:
        raise pytest.UsageError(f"PROTECTED in tests/conftest.py: no such path: {missing}")


def protection_of(path: Path) -> str:
    """Return the marker of the tests in a file."""
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path("tests")
    return next(
        MARKER_OF[str(part)] for part in (inside, *inside.parents) if str(part) in MARKER_OF
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m lossless``, or several of these markers with ``or``, import only their files."""
    wanted = {*config.option.markexpr.split()}
    if wanted and wanted <= {*PROTECTED, "or"} and collection_path.name.startswith("test_"):
        return protection_of(collection_path) not in wanted or None
    return None


MATRIX = frozenset({"no_overlap", "vanilla", "k", "keep_warm"})
"""Parameters whose combinations multiply engines: loop, worker, draft length, idle drafter."""


def group_of_combinations(item: pytest.Function) -> tuple[int, tuple[object, ...]] | None:
    """How many combinations of a test's parameters run by default, and what these combine."""
    params, marker = item.callspec.params, item.get_closest_marker("thinned")
    combined: Set[str]
    others: tuple[object, ...]
    if marker is not None:
        combined, count = frozenset(marker.args) or params.keys(), marker.kwargs.get("cases", 1)
        if not combined <= params.keys():
            raise pytest.UsageError(f"{item.nodeid}: thinned by {marker.args}, has {[*params]}")
        # a value is one object in all combinations, and may have no repr
        others = tuple(id(value) for name, value in params.items() if name not in combined)
    elif (
        MATRIX & params.keys()
        and "embedded" in item.path.parts
        and "losslessness" not in item.path.name
    ):
        combined, count = MATRIX, 1
        others = tuple(repr(value) for name, value in params.items() if name not in combined)
    else:
        return None
    return count, (item.path, item.cls, item.originalname, *others)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marker of :data:`PROTECTED`; skip tests marked ``gpu`` without a CUDA device; mark
    combinations ``full``.

    A test with the marker ``thinned`` runs few combinations of the parameters that it names, and
    every scenario of the executor, except losslessness, one of :data:`MATRIX`. Which ones differs
    from test to test; the others get the marker ``full`` and run with ``-m "full or not full"``.
    """
    for item in items:
        item.add_marker(protection_of(item.path))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    groups: dict[tuple[int, tuple[Any, ...]], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            group = group_of_combinations(item)
            if group is not None:
                groups.setdefault(group, []).append(item)
    numbers: Counter[str] = Counter()
    for (count, (path, _, name, *_)), cases in groups.items():
        test = f"{path.name}::{name}"
        first = zlib.crc32(test.encode()) + numbers[test]
        numbers[test] += 1
        stride = next(
            n for n in itertools.count(len(cases) // count + 1) if math.gcd(n, len(cases)) == 1
        )
        chosen = {(first + n * stride) % len(cases) for n in range(count)}
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker("full")
    if "full" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="module", autouse=True)
def collector_leaves_the_rest_alone() -> None:
    """Freeze the objects that exist before a module's tests.

    A collection over all imported modules and collected tests takes longer than most tests. Not
    with a GPU, where executors freeze objects unless their host did.
    """
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def once_per_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, MakeText], str]:
    """Make a text once per test run: one worker makes it, the others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers

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
    """Skip a test unless so many GiB of the device are free; return cached memory to the device."""

    def require(gibibytes: int) -> None:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
            pytest.skip(f"needs {gibibytes} GB of device memory")

    yield require
    torch.cuda.empty_cache()

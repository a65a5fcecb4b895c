"""Every kernel compiles for a Hopper GPU and for an Ada one, not only under the interpreter.

By default in few variants; with ``-m "full or not full"`` in all. A child process per GPU does it:
whether a kernel is interpreted is decided when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import triton

from mtp_plugin.hosts.embedded.attention.triton import WIDE_HEAD_BYTES

ROOT = Path(__file__).parents[2]
SECONDS = 1800
pytestmark = pytest.mark.timeout(400)  # all kernels are compiled by the first test
BAD = "tests.compiled.refused."
MODULES = {
    90: ("tests.compiled.launches", "tests.compiled.refused"),
    89: ("tests.compiled.launches",),
}
"""What is compiled, by compute capability."""
SAMPLING = "tests.compiled.sampling"
"""And with every variant for the Hopper GPU."""


@dataclass(frozen=True)
class Report:
    """What became of the launches, by kernel."""

    triton: str
    binaries: dict[str, int]
    errors: dict[str, list[str]]
    hooked: list[str]
    contracted: list[str]
    kernels: list[str]
    requested: int
    missed: list[str]
    seconds: dict[str, float]

    def describe_errors(self, names: list[str]) -> str:
        """The first error of each."""
        return "\n\n".join(
            f"{name} (launches that failed: {len(errors)}; the first:)\n{errors[0]}"
            for name, errors in self.errors.items()
            if name in names
        )


class Ended(NamedTuple):
    """A child process that has ended."""

    status: int
    out: str
    err: str

    def report(self) -> Report:
        if self.status:
            pytest.fail(f"exit status {self.status}:\n{self.err[-4000:]}", pytrace=False)
        found = Report(**json.loads(self.out))
        sys.stdout.write(f"triton {found.triton}\n")
        sys.stdout.writelines(f"{count:3} {name}\n" for name, count in found.binaries.items())
        return found


def compiled(capability: int, cache: Path, *, every: bool) -> Ended:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment["COMPILE_EVERY_VARIANT"] = str(int(every))
    modules = [*MODULES[capability], *([SAMPLING] if every and capability == 90 else [])]
    child = subprocess.run(
        [sys.executable, "-m", "tests.compiled", str(capability), *modules],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Ended(child.returncode, child.stdout, child.stderr)


@pytest.fixture(scope="module")
def compile_for(request: pytest.FixtureRequest, once_per_run) -> Callable[[int], Ended]:
    """Compile for a capability, once per run; every variant if tests marked ``full`` run.

    Triton's cache is kept between runs: only kernels that have changed are compiled again.
    """
    every = any(item.get_closest_marker("full") for item in request.session.items)
    kept = getattr(request.config, "cache", None)

    def ended(capability: int) -> Ended:
        def compile_all(folder: Path) -> str:
            cache = (kept.mkdir("triton") if kept else folder) / f"compiled-{capability}"
            return json.dumps(compiled(capability, cache, every=every))

        return Ended(*json.loads(once_per_run(f"compiled-{capability}", compile_all)))

    return ended


@pytest.fixture
def report(compile_for: Callable[[int], Ended]) -> Report:
    """Of the Hopper GPU."""
    return compile_for(90).report()


def test_every_launch_compiles(report: Report) -> None:
    failed = [name for name in report.errors if not name.startswith(BAD)]
    if failed:
        pytest.fail(
            f"{len(failed)} kernels failed\n\n{report.describe_errors(failed)}", pytrace=False
        )


@pytest.mark.full
def test_smaller_gpus_can_hold_every_program(compile_for: Callable[[int], Ended]) -> None:
    """But for prompts with wide heads, for which the attention backend refuses such a device."""
    report = compile_for(89).report()
    wide = "hosts.embedded.attention.kernels_triton.paged_ragged_kernel"
    failed = [name for name in report.errors if name != wide]
    if failed:
        pytest.fail(
            f"{len(failed)} kernels failed\n\n{report.describe_errors(failed)}", pytrace=False
        )
    (error,) = report.errors[wide]
    assert int(error.split(" bytes")[0]) <= WIDE_HEAD_BYTES


def test_prompt_attention_of_hopper_compiles(report: Report) -> None:
    """See `test_every_launch_compiles` for its errors."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("its Gluon needs Triton 3.6")
    assert report.binaries["hosts.embedded.attention.kernels_gluon.paged_prompt_kernel"] >= 1


def test_the_triton_is_that_of_this_process(report: Report) -> None:
    """So that a run over another version is one."""
    assert report.triton == triton.__version__


def test_kernels_compile_with_a_jit_hook_set(report: Report) -> None:
    """Triton writes all constants of a kernel as JSON for the hook; one that cannot be written
    fails the first compile, see `test_every_launch_compiles`."""
    assert {name for name in report.binaries if not name.startswith(BAD)} <= set(report.hooked)


def test_no_rounding_of_half_precision_is_left_out(report: Report) -> None:
    """A product that is rounded before it is added stays so: as one instruction it is not, and the
    interpreter cannot show it."""
    assert report.contracted == []


def test_launches_find_what_a_job_compiles(report: Report) -> None:
    """A job of `early_compile` writes the cache entries of all launches."""
    binaries = {name: n for name, n in report.binaries.items() if not name.startswith(BAD)}
    assert report.requested == sum(binaries.values())
    assert report.missed == []


def test_every_kernel_is_launched(report: Report) -> None:
    """A new kernel gets a launch in `tests/compiled/launches.py`."""
    assert len(report.kernels) > 30
    tried = {*report.binaries, *report.errors}
    assert [name for name in report.kernels if name not in tried] == []


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("leaves_a_loop", "unsupported AST node type: Break"),
        ("counts_in_python", "arange's arguments must be of type tl.constexpr"),
        ("holds_too_much", "bytes of shared memory, there are 232448"),
    ],
)
def test_what_only_the_interpreter_takes_is_refused(
    report: Report, kernel: str, reason: str
) -> None:
    assert reason in report.describe_errors([BAD + kernel])


def test_launches_are_specialized_as_triton_does(report: Report) -> None:
    """Sizes of 1, of multiples of 16 and of neither, and another type: a binary each."""
    assert report.binaries[BAD + "clears"] == 4
    assert BAD + "clears" not in report.errors

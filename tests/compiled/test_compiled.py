"""Every kernel compiles for a Hopper GPU and for an Ada one, not only under the interpreter.

A child process does it: whether a kernel is interpreted is decided when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtp_plugin.executor.attention.triton import WIDE_HEAD_BYTES

ROOT = Path(__file__).parents[2]
SECONDS = 600
BAD = "tests.compiled.refused."


@dataclass(frozen=True)
class Report:
    """What became of the launches, by kernel."""

    binaries: dict[str, int]
    errors: dict[str, list[str]]
    contracted: list[str]
    kernels: list[str]
    seconds: dict[str, float]

    def told(self, names: list[str]) -> str:
        """The first error of each."""
        return "\n\n".join(
            f"{name} (launches that failed: {len(errors)}; the first:)\n{errors[0]}"
            for name, errors in self.errors.items()
            if name in names
        )


def compiled(capability: int, cache: Path, *modules: str) -> Report:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.compiled", str(capability), *modules],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if child.returncode:
        pytest.fail(f"exit status {child.returncode}:\n{child.stderr[-4000:]}", pytrace=False)
    found = Report(**json.loads(child.stdout))
    sys.stdout.writelines(f"{count:3} {name}\n" for name, count in found.binaries.items())
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    modules = "tests.compiled.launches", "tests.compiled.refused"
    return compiled(90, tmp_path_factory.mktemp("compiled"), *modules)


def test_every_launch_compiles(report: Report) -> None:
    failed = [name for name in report.errors if not name.startswith(BAD)]
    if failed:
        pytest.fail(f"{len(failed)} kernels failed\n\n{report.told(failed)}", pytrace=False)


def test_smaller_gpus_can_hold_every_program(tmp_path: Path) -> None:
    """But for prompts with wide heads, for which the attention backend refuses such a device."""
    report = compiled(89, tmp_path, "tests.compiled.launches")
    wide = "executor.attention.kernel.ragged_kernel"
    failed = [name for name in report.errors if name != wide]
    if failed:
        pytest.fail(f"{len(failed)} kernels failed\n\n{report.told(failed)}", pytrace=False)
    (told,) = report.errors[wide]
    assert int(told.split(" bytes")[0]) <= WIDE_HEAD_BYTES


def test_no_rounding_of_half_precision_is_left_out(report: Report) -> None:
    """A product that is rounded before it is added stays so: as one instruction it is not, and the
    interpreter cannot show it."""
    assert report.contracted == []


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
    assert reason in report.told([BAD + kernel])


def test_launches_are_specialized_as_triton_does(report: Report) -> None:
    """Sizes of 1, of multiples of 16 and of neither, and another type: a binary each."""
    assert report.binaries[BAD + "clears"] == 4
    assert BAD + "clears" not in report.errors

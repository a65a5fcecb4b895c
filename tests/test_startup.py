"""What commands import before they have something to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh import run_command

CONFIG = str(Path(__file__).parents[1] / "configs" / "tiny_eagle.yaml")
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "triton", "pydantic", "numpy")
ENGINE = ("torch", "transformers", "triton")
HELP_SECONDS = 0.2
"""CPU seconds that a command's help may take on a machine with nothing else to do."""

HELP = """
import sys, time
sys.argv[1:] = ["--help"]
from mtp_plugin.__main__ import main
try:
    main()
finally:
    loaded = {name.split(".")[0] for name in sys.modules}
    sys.stderr.write(f"{time.process_time()} {' '.join(loaded)}")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in ("generate", "config", "doctor", "bench")),
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    ended = run_command(*arguments, refused=HEAVY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_help_is_there_at_once() -> None:
    """Five times what it may take, so that a busy machine passes; torch alone takes longer."""
    spent = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", HELP],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        )
        seconds, *loaded = done.stderr.split()
        assert "Usage" in done.stdout
        assert not set(loaded) & set(HEAVY)
        spent.append(float(seconds))
    assert min(spent) < 5 * HELP_SECONDS


def test_a_config_is_read_without_torch() -> None:
    ended = run_command("config", "--schema", refused=ENGINE)
    assert (ended.returncode, ended.stdout[0]) == (0, "{")


def test_what_is_waited_for_is_said() -> None:
    arguments = ["generate", "--config", CONFIG, "-p", "x", "-n", "4", "--no-compare", "--json"]
    lines = run_command(*arguments).stderr.splitlines()
    assert lines[:2] == ["importing torch and transformers", "reading the checkpoint's config"]


def test_the_collector_leaves_imports_alone() -> None:
    code = """
import gc
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
from mtp_plugin.cli.opening import import_engine
from mtp_plugin.tools.terminal.console import messages
del runs[:]
import_engine(messages())
print(len(runs), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 True True\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["generate"], "expected --config FILE or --model DIR"),
        (["generate", "--config", CONFIG, "--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_are_reported_before_torch_is_imported(arguments: list[str], message: str) -> None:
    ended = run_command(*arguments, refused=ENGINE)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_an_interrupt_during_imports_is_one_line() -> None:
    interrupted = """
import signal, sys
# a background job ignores the signal, and so would every child
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["generate", "--help"]
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from mtp_plugin.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_pytest_starts_next_to_pytest_benchmark(tmp_path: Path) -> None:
    """Here, a plugin of that name which warns when pytest starts, as it does with ``-n``."""
    (tmp_path / "warns.py").write_text("import warnings\nwarnings.warn('Benchmarks')\n")
    installed = tmp_path / "pytest_benchmark-5.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nbenchmark = warns\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "--noconftest", "--collect-only", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, __file__],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Configs from files that are open already: standard input and a shell's `<(command)`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_plugin.config import load_config
from mtp_plugin.errors import ConfigError


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("folder", ["/proc/self/fd", "/dev/fd"])
def test_a_pipe_that_is_open(folder: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"model: folder\n")
    os.close(writer)
    try:
        # a relative path is seen from the working directory
        assert load_config(f"{folder}/{reader}").model == str(Path("folder").resolve())
    finally:
        os.close(reader)


def test_standard_input() -> None:
    code = "from mtp_plugin.config import load_config; print(load_config('/dev/stdin').model)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, input="model: /x\n", capture_output=True, text=True, check=True)
    assert run.stdout == "/x\n"


def test_a_pipe_without_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="expected a regular file, got a pipe or a device"):
        load_config(tmp_path / "config.yaml")

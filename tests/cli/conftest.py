"""A model to name, a config of it, and the command itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_plugin import cli
from tests.checkpoints import write_echo_checkpoint
from tests.cli.calls import VOCAB, Result, Run, byte_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, in a folder of its own."""
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_echo_checkpoint(path, vocab_size=VOCAB, eos_token_id=256)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes a YAML file; returns its path."""

    def write(speculative: dict[str, Any] | None = None, **options: Any) -> str:
        content = {
            "model": str(checkpoint),
            "max_num_tokens": 128,
            "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 2048},
            "speculative_config": speculative,
            **options,
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(content))
        return str(file)

    return write


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the console script in this process, without colours."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["mtp-plugin", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else int(code is not None), out, err)

    return call


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Puts a file descriptor in the place of standard input."""
    opened = []

    def put(descriptor: int) -> None:
        opened.append(os.fdopen(descriptor, "r"))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield put
    for file in opened:
        file.close()

"""The recorder, on a small made-up source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract_host.record import main, record_line, record_module
from tests.contract_host.signatures import Line, from_json, signature

PATH = "tensorrt_llm/_torch/pieces.py"
SOURCE = '''
"""Words of the package."""
from dataclasses import dataclass
from .base import Base


@dataclass(kw_only=True)
class Store:
    tokens: "Tensor"
    width: int = 3


class Worker(Base):
    def __init__(self, config: "Config", /, size, *rest: int, depth=2, name: str, **others):
        """Words."""
        self.config, self.size = config, size

    @classmethod
    async def wait(cls):
        secret = self.manager.sample_async(1)
        get_spec_worker(1, 2, mapping=3, **kw)
'''


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    source = tmp_path / "1.2" / PATH
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    (tmp_path / "1.2" / "sources.json").write_text(
        json.dumps({PATH: {"commit": "c" * 40, "id": "12"}})
    )
    (tmp_path / "1.2" / "line.json").write_text('{"transcribed": true, "pins": {"torch": "==2.9"}}')
    return tmp_path


def test_signatures_calls_and_sources_are_recorded_and_no_bodies(texts: Path):
    main(["--texts", str(texts), "--line", "1.2", "--output", str(texts / "1.2.json")])
    text = (texts / "1.2.json").read_text()
    line = from_json(Line, json.loads(text))
    module = line.modules["tensorrt_llm._torch.pieces"]
    assert module == record_module(SOURCE, PATH, "c" * 40, "12")
    assert (line.transcribed, line.pins) == (True, {"torch": "==2.9"})
    worker = module.classes["Worker"]
    assert str(signature(worker.methods["__init__"])) == (
        "(self, config: \"'Config'\", /, size, *rest: 'int', depth=2, name: 'str', **others)"
    )
    assert worker.instance == ["config", "size"]
    assert line.function("tensorrt_llm._torch.pieces:Worker.wait").is_async
    assert line.importers("Base") == ["tensorrt_llm._torch.pieces"]
    assert [call.within for _, call in line.calls("get_spec_worker")] == ["Worker.wait"]
    assert "Words" not in text
    assert "secret" not in text


def test_a_text_without_source_is_refused(texts: Path):
    (texts / "1.2" / "sources.json").write_text("{}")
    with pytest.raises(ValueError, match=r"says nothing of tensorrt_llm/_torch/pieces\.py"):
        record_line(texts, "1.2")

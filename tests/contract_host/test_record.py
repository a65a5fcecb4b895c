"""The recorder, on small made-up sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract_host.record import dump, main, module_name, record_line, record_module
from tests.contract_host.signatures import Call, Field, Import, Line, from_json, signature

SOURCE = '''
"""Words of the package."""
import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Optional

import tensorrt_llm.bindings
from tensorrt_llm.bindings import executor as native

from ..mapping import Mapping as Map
from .base import Base

if TYPE_CHECKING:
    from ..llmapi.llm_args import Config

try:
    from . import extra
except ImportError:
    extra = None

LIMIT = (1 << 64) - 1
NAMES = ("a", "b")
State = tensorrt_llm.bindings.State
Reason = native.FinishReason
_cache = {}
computed = len(NAMES)


class Mode(enum.IntEnum):
    ONE = enum.auto()
    TWO = 7

    def is_one(self):
        """Words."""
        return self == Mode.ONE


@dataclass(kw_only=True, frozen=True)
class Store:
    tokens: "Tensor"
    kind: ClassVar[str] = "store"
    width: int = 3
    mode: Mode = Mode.ONE
    rows: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "width", 4)


class Config(Model):
    model_config = ConfigDict(extra="forbid")
    depth: Optional[int] = Field(default=None, description="Words.", status="beta")
    must: str = Field(..., description="Words.")
    _hidden: bool = PrivateAttr(True)

    @field_validator("depth")
    @classmethod
    def check(cls, v):
        return v


@register_auto_model("Tiny")
class Worker(Base, ABC, metaclass=Meta):
    Inner = Store

    class Args:
        size: int

    def __init__(self, config: "Config", /, size, *rest: int, depth=2, name: str, **others):
        self.config = config
        self.size, self.depth = size, depth
        config.size = 3

    @property
    @abstractmethod
    def width(self) -> int:
        """Words."""

    @width.setter
    def width(self, value: int):
        self._width = value

    @staticmethod
    def plain(a=Mode.ONE, b=lambda: 3):
        from .late import Late
        return self.sampler.sample_async(a, *b, key=3)

    @classmethod
    async def wait(cls):
        secret = self.manager.sample_async(1)
        get_spec_worker(1, 2, mapping=3, **kw)
        get_spec_worker(4, 5, mapping=6, **kw)
'''

MODULE = record_module(SOURCE, "tensorrt_llm/_torch/pieces.py", "c" * 40, "12")
WORKER = MODULE.classes["Worker"]


def test_where_a_text_comes_from_is_kept():
    assert (MODULE.path, MODULE.commit, MODULE.id) == (
        "tensorrt_llm/_torch/pieces.py",
        "c" * 40,
        "12",
    )


def test_module_names():
    assert module_name("tensorrt_llm/_torch/a/__init__.py") == "tensorrt_llm._torch.a"
    assert module_name("tensorrt_llm/_torch/a/b.py") == "tensorrt_llm._torch.a.b"


def test_every_kind_of_parameter():
    init = WORKER.methods["__init__"]
    assert str(signature(init)) == (
        "(self, config: \"'Config'\", /, size, *rest: 'int', depth=2, name: 'str', **others)"
    )
    assert [p.kind for p in init.parameters] == [
        "positional",
        "positional",
        "any",
        "*",
        "keyword",
        "keyword",
        "**",
    ]


def test_defaults_are_texts_and_computed_ones_are_not_kept():
    assert [p.default for p in WORKER.methods["plain"].parameters] == ["Mode.ONE", "<computed>"]


def test_roles_and_flags():
    assert WORKER.methods["plain"].role == "static"
    wait, width = WORKER.methods["wait"], WORKER.methods["width"]
    assert (wait.role, wait.is_async, wait.abstract) == ("class", True, False)
    assert (width.role, width.setter, width.abstract) == ("property", True, True)
    assert width.returns == "int"


def test_bases_keywords_and_decorators():
    assert WORKER.bases == ["Base", "ABC"]
    assert WORKER.keywords == {"metaclass": "Meta"}
    assert WORKER.decorators == ["register_auto_model('Tiny')"]
    assert WORKER.attributes == {"Inner": "Store"}
    assert WORKER.classes["Args"].fields == [Field("size", "int")]


def test_names_assigned_to_self():
    assert WORKER.instance == ["_width", "config", "depth", "size"]


def test_enum_members():
    assert MODULE.classes["Mode"].members == {"ONE": "auto()", "TWO": "7"}
    assert MODULE.classes["Mode"].attributes == {}


def test_dataclass_fields():
    store = MODULE.classes["Store"]
    assert store.dataclass == {"kw_only": True, "frozen": True}
    assert store.attributes == {"kind": "'store'"}
    assert store.fields == [
        Field("tokens", "'Tensor'"),
        Field("width", "int", "3"),
        Field("mode", "Mode", "Mode.ONE"),
        Field("rows", "list[int]", None, "list", "field", {"repr": "False"}),
    ]


def test_model_fields_without_their_descriptions():
    config = MODULE.classes["Config"]
    assert config.config == {"extra": "'forbid'"}
    assert config.fields == [
        Field("depth", "Optional[int]", "None", None, "Field", {"status": "'beta'"}),
        Field("must", "str", None, None, "Field"),
        Field("_hidden", "bool", "True", None, "PrivateAttr"),
    ]
    assert config.methods["check"].decorators == ["field_validator('depth')"]
    assert config.methods["check"].role == "class"


def test_imports_by_value_are_absolute():
    assert MODULE.imports == [
        Import("tensorrt_llm.bindings", "executor", "native"),
        Import("tensorrt_llm.mapping", "Mapping", "Map"),
        Import("tensorrt_llm._torch.base", "Base", "Base"),
        Import("tensorrt_llm.llmapi.llm_args", "Config", "Config", type_checking=True),
        Import("tensorrt_llm._torch", "extra", "extra"),
        Import("tensorrt_llm._torch.late", "Late", "Late", within="Worker.plain"),
    ]


def test_relative_imports_of_a_package():
    module = record_module("from .utils import one", "tensorrt_llm/_torch/spec/__init__.py")
    assert module.imports == [Import("tensorrt_llm._torch.spec.utils", "one", "one")]


def test_constants_and_other_names_of_things():
    assert MODULE.constants == {
        "LIMIT": "18446744073709551615",
        "NAMES": "('a', 'b')",
        "_cache": "{}",
    }
    assert MODULE.aliases == {
        "State": "tensorrt_llm.bindings.State",
        "Reason": "tensorrt_llm.bindings.executor.FinishReason",
    }


def test_calls_of_our_pieces_and_no_others():
    assert MODULE.calls == [
        Call("self.sampler.sample_async", 1, ["key"], star=True, within="Worker.plain"),
        Call("get_spec_worker", 2, ["mapping"], double_star=True, within="Worker.wait"),
    ]


def test_a_recorded_call_binds():
    call = Call("get_spec_worker", 2, ["mapping"])
    function = record_module(
        "def get_spec_worker(spec_config, model_config, mapping): ...", "tensorrt_llm/a.py"
    ).functions["get_spec_worker"]
    assert list(call.bind(signature(function)).arguments) == [
        "spec_config",
        "model_config",
        "mapping",
    ]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nextn'"):
        Call("get_spec_worker", 3, ["nextn"]).bind(signature(function))


def test_a_skeleton_has_what_its_source_has():
    header = "class A(B):\n    def f(self, x: int = 3) -> int:"
    source = f"{header}\n        'Words.'\n        return x + 1\n"
    path = "tensorrt_llm/a.py"
    assert record_module(source, path) == record_module(f"{header} ...\n", path)


def test_no_body_and_no_sentence_is_recorded():
    text = dump(Line("1.2", modules={"tensorrt_llm._torch.pieces": MODULE}))
    for word in ("Words", "secret", "__setattr__", "return ", "lambda"):
        assert word in SOURCE
        assert word not in text


def test_json_comes_back_as_it_was():
    line = Line("1.2", True, {"torch": "<=2.9.0"}, "Ours.", {"tensorrt_llm._torch.pieces": MODULE})
    assert from_json(Line, json.loads(dump(line))) == line


def test_json_with_an_unknown_key_is_refused():
    with pytest.raises(TypeError, match=r"Line has no \['lines'\]"):
        from_json(Line, {"line": "1.2", "lines": 3})


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "1.2" / "tensorrt_llm" / "_torch"
    folder.mkdir(parents=True)
    (folder / "pieces.py").write_text(SOURCE)
    return tmp_path


def test_a_folder_of_texts(texts: Path):
    path, keys = "tensorrt_llm/_torch/pieces.py", "tests/references/llm.yaml"
    (texts / "1.2" / keys).parent.mkdir(parents=True)
    (texts / "1.2" / keys).write_text(
        "methods: {__init__: {parameters: {dtype: {annotation: str, default: auto}}}}"
    )
    sources = {path: {"commit": "c" * 40, "id": "12"}, keys: {"commit": None, "id": "13"}}
    (texts / "1.2" / "sources.json").write_text(json.dumps(sources))
    (texts / "1.2" / "line.json").write_text('{"transcribed": true, "pins": {"torch": "==2.9.0"}}')
    main(["--texts", str(texts), "--line", "1.2", "--output", str(texts / "1.2.json")])
    line = from_json(Line, json.loads((texts / "1.2.json").read_text()))
    assert line.modules == {"tensorrt_llm._torch.pieces": MODULE}
    assert (line.transcribed, line.pins) == (True, {"torch": "==2.9.0"})
    assert line.key_lists[keys].keys == {"dtype": "str"}
    assert line.function("tensorrt_llm._torch.pieces:Worker.wait").is_async
    assert line.importers("Base") == ["tensorrt_llm._torch.pieces"]
    assert line.importers("Late") == line.importers("Config") == []
    assert [call.within for _, call in line.calls("get_spec_worker")] == ["Worker.wait"]


def test_a_checkout_is_recorded_by_its_commit(texts: Path):
    line = record_line(texts, "1.2", "d" * 40)
    assert line.modules["tensorrt_llm._torch.pieces"].commit == "d" * 40
    assert not line.transcribed


def test_a_text_without_source_is_refused(texts: Path):
    (texts / "1.2" / "sources.json").write_text("{}")
    with pytest.raises(ValueError, match=r"says nothing of tensorrt_llm/_torch/pieces\.py"):
        record_line(texts, "1.2")


def test_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no source files under"):
        record_line(tmp_path, "1.2")

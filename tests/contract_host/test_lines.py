"""The recorded lines: complete as to where they are from, and holding facts alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement

from mtp_plugin.hosts.tensorrt_llm.seams import DISPATCHERS, UTILS
from tests.contract_host.generated import fake_tree
from tests.contract_host.recorded import FOLDER, LINES, load_line

lines = pytest.mark.parametrize("line", LINES)


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string of the JSON with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield "", name
            yield from texts(item, name)


@lines
def test_every_file_says_where_it_is_from(line: str):
    facts = load_line(line)
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(LINES)
    assert facts.line == line
    assert facts.transcribed
    assert "pins: " in facts.note
    for distribution, specifier in facts.pins.items():
        assert Requirement(f"{distribution}{specifier}").specifier
    sources = [*map(vars, facts.modules.values()), *facts.key_lists.values()]
    for source in sources:
        assert source["path"].startswith(("tensorrt_llm/", "tests/"))
        assert re.fullmatch(r"\d+", source["id"] or ""), source["path"]
        known = source["commit"]
        assert source["note"] if known is None else re.fullmatch(r"[0-9a-f]{40}", known)


@lines
def test_no_code_is_recorded(line: str):
    """Every text is a name, a path or one plain expression; none is a statement or a sentence."""
    for key, text in texts(json.loads((FOLDER / f"{line}.json").read_text())):
        if key in ("note", "path", "commit", "id", "line") or text == "<computed>":
            continue
        assert "\n" not in text, text
        if key in ("kind", "keys", "pins") or text.startswith(("tensorrt_llm/", "tests/")):
            continue
        if re.fullmatch(r"[\w.]*", text) or text.startswith(("<=", ">=", "==")):
            continue
        tree = ast.parse(text, mode="eval")
        forbidden = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Await, ast.JoinedStr)
        assert not any(isinstance(node, forbidden) for node in ast.walk(tree)), text
        words = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        assert not any(isinstance(w, str) and len(w.split()) > 4 for w in words), text


@lines
def test_recorded_calls_fit_the_recorded_signatures(line: str):
    """The host's calls of dispatchers, and the dispatchers' calls of the classes they make."""
    facts = load_line(line)
    for name in ("sample_async", "update_requests", "spec_worker", "add_dummy_requests"):
        assert facts.calls(name), name
    bound = 0
    with fake_tree(line):
        utils = importlib.import_module(UTILS)
        for name in DISPATCHERS:
            assert facts.calls(name), name
            for _, call in facts.calls(name):
                call.bind(inspect.signature(getattr(utils, name)))
                bound += 1
        for call in facts.modules[UTILS].calls:
            made = getattr(utils, call.function, None)
            if isinstance(made, type):
                call.bind(inspect.signature(made))
                bound += 1
    assert bound > 8


@lines
def test_a_generated_package_has_the_recorded_names_and_refuses_other_arguments(line: str):
    """Names imported by value are one object; bodies name themselves; nothing is left."""
    facts = load_line(line)
    with fake_tree(line) as package:
        utils = importlib.import_module(UTILS)
        for name in DISPATCHERS:
            dispatcher = getattr(utils, name)
            expected = [each.name for each in facts.modules[UTILS].functions[name].parameters]
            assert list(inspect.signature(dispatcher).parameters) == expected
            importers = [
                module
                for module, each in facts.modules.items()
                if any(
                    i.name == name and not i.within and not i.type_checking for i in each.imports
                )
            ]
            assert importers
            for module in importers:
                assert getattr(importlib.import_module(module), name) is dispatcher
        with pytest.raises(NotImplementedError, match=rf"^{UTILS}\.get_spec_worker$"):
            utils.get_spec_worker(1, 2, 3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nextn'"):
            utils.get_spec_worker(1, 2, nextn=3)
        with pytest.raises(TypeError, match="abstract"):
            package._torch.pyexecutor.resource_manager.BaseResourceManager()
    assert not [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]

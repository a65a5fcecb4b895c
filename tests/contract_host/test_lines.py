"""The recorded lines: complete as to where they are from, and holding facts alone."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.contract_host.fake_tree import fake_tree
from tests.contract_host.record import dump
from tests.contract_host.signatures import FOLDER, LINES, load_line

DISPATCHERS = ("metadata", "resource_manager", "decoder", "worker")
UTILS = "tensorrt_llm._torch.speculative.utils"
SAMPLER = {
    "1.2": "tensorrt_llm._torch.speculative.mtp:MTPSampler.__init__",
    "1.3a": "tensorrt_llm._torch.speculative.mtp:MTPSampler.__init__",
    "1.3b": "tensorrt_llm._torch.speculative.spec_sampler_base:SpecSampler.__init__",
}


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


def test_the_folder_holds_these_lines():
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(LINES)


@pytest.mark.parametrize("line", LINES)
def test_every_file_says_where_it_is_from(line: str):
    facts = load_line(line)
    assert facts.line == line
    assert facts.transcribed
    assert "pins: " in facts.note
    for distribution, specifier in facts.pins.items():
        assert Requirement(f"{distribution}{specifier}").specifier
    for source in [*facts.modules.values(), *facts.key_lists.values()]:
        assert source.path.startswith(("tensorrt_llm/", "tests/"))
        assert re.fullmatch(r"\d+", source.id or ""), source.path
        if source.commit is None:
            assert source.note, f"{source.path}: no commit, and no word why"
        else:
            assert re.fullmatch(r"[0-9a-f]{40}", source.commit), source.path


@pytest.mark.parametrize("line", LINES)
def test_the_json_is_as_the_recorder_writes_it(line: str):
    assert dump(load_line(line)) == (FOLDER / f"{line}.json").read_text()


@pytest.mark.parametrize("line", LINES)
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


@pytest.mark.parametrize("line", LINES)
def test_the_seams_are_recorded(line: str):
    facts = load_line(line)
    for name in DISPATCHERS:
        assert facts.function(f"{UTILS}:get_spec_{name}").parameters
        assert facts.importers(f"get_spec_{name}")
        assert facts.calls(f"get_spec_{name}"), name
    for name in ("sample_async", "update_requests", "spec_worker", "add_dummy_requests"):
        assert facts.calls(name), name
    sampler = [p.name for p in facts.function(SAMPLER[line]).parameters]
    assert ("nextn" in sampler) == (line != "1.3b")
    assert ("accepted_path_len" in sampler) == (line == "1.3b")


def test_lines_differ_where_they_are_detected():
    worker = "tensorrt_llm._torch.speculative.interface"
    found = {line: load_line(line).modules[worker].classes["SpecWorkerBase"] for line in LINES}
    assert {line for line in LINES if "_forward_impl" in found[line].methods} == {"1.3a", "1.3b"}


@pytest.mark.parametrize("line", LINES)
def test_recorded_calls_fit_the_recorded_signatures(line: str):
    """The host's calls of dispatchers, and the dispatchers' calls of the classes they make."""
    facts = load_line(line)
    bound = 0
    with fake_tree(line):
        utils = importlib.import_module(UTILS)
        for name in DISPATCHERS:
            for _, call in facts.calls(f"get_spec_{name}"):
                call.bind(inspect.signature(getattr(utils, f"get_spec_{name}")))
                bound += 1
        for call in facts.modules[UTILS].calls:
            made = getattr(utils, call.function, None)
            if isinstance(made, type):
                call.bind(inspect.signature(made))
                bound += 1
    assert bound > 8


@pytest.mark.parametrize("line", LINES)
def test_keys_of_the_configuration_are_recorded(line: str):
    args = load_line(line).modules["tensorrt_llm.llmapi.llm_args"]
    keys = {
        field.name
        for name in ("BaseLlmArgs", "TorchLlmArgs")
        if name in args.classes
        for field in args.classes[name].fields
    }
    assert {"model", "speculative_config", "kv_cache_config", "cuda_graph_config"} <= keys
    assert {"max_batch_size", "max_num_tokens", "disable_overlap_scheduler"} <= keys
    assert {"backend", "tensor_parallel_size", "print_iter_log", "moe_config"} <= keys
    drafts = {f.name for f in args.classes["MTPDecodingConfig"].fields}
    assert {"decoding_type", "num_nextn_predict_layers", "use_mtp_vanilla"} <= drafts

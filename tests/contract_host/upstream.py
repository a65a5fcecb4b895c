"""Runs TensorRT-LLM's own unit tests of its MTP pieces over ours, without TensorRT-LLM.

``python -m tests.contract_host.upstream --tests PATH --line 1.2 [--file-name test_mtp.py]``

``PATH`` is a test file, or a folder that holds some, as ``tests/unittest/_torch/speculative`` of a
checkout; no such text is kept here. The generated package of the API version replaces
``tensorrt_llm``, with our classes under the names of its own. Without a GPU the string ``"cuda"``
reads ``"cpu"`` in the copies that run. What needs a whole engine is not applicable.

The exit code is 1 where a test fails, and where none passes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import os
import sys
import tempfile
import tokenize
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.tensorrt_llm.config import decoding_config_class
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.metadata import MTPSpecMetadata
from mtp_plugin.speculative.sampler import MTPSampler
from mtp_plugin.speculative.state import MTPHiddenStatesManager
from tests.contract_host.fake_tree import fake_tree
from tests.contract_host.line_rules import LINES, Line

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGE = "tensorrt_llm"
TORCH = f"{PACKAGE}._torch"
ARGS = f"{PACKAGE}.llmapi.llm_args"
MODE = f"{TORCH}.speculative.interface:SpeculativeDecodingMode"
HELPERS = "utils"
"""A package next to the host's tests, of which a checkout of the tests alone has nothing."""
WHOLE_ENGINE = "high_cuda_memory"
"""What the host's tests mark that load a checkpoint into an engine."""


# ---- what replaces the host -------------------------------------------------------------------


class TrtllmAttentionMetadata:
    """Lengths and contexts of a batch; who gives lengths on the host has them on the device too."""

    def __init__(
        self, max_num_requests: int, max_num_tokens: int, kv_cache_manager: Any = None
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.kv_cache_manager = kv_cache_manager
        self.kv_cache_params: Any = None
        self.num_contexts = 0
        self.is_cuda_graph = False
        self._seq_lens = torch.empty(0, dtype=torch.int32)
        self._seq_lens_cuda = self._seq_lens.to(DEVICE)

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value: torch.Tensor) -> None:
        self._seq_lens = value
        self._seq_lens_cuda = value.to(DEVICE)

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        return self._seq_lens_cuda

    @property
    def num_seqs(self) -> int:
        return len(self._seq_lens)

    @property
    def num_generations(self) -> int:
        return self.num_seqs - self.num_contexts

    @property
    def num_ctx_tokens(self) -> int:
        return int(self._seq_lens[: self.num_contexts].sum())

    def on_update(self) -> None:
        """Everything is derived when it is read."""


@dataclass
class KVCacheParams:
    use_cache: bool
    num_cached_tokens_per_seq: list[int] | None = None


class _Logger:
    def set_level(self, level: str) -> None:
        """Nothing is logged."""


@contextmanager
def upstream_tree(line: Line, imports: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
    """``tensorrt_llm`` of a line with our classes under its names; gone afterwards.

    ``imports``: (module, name) that tests import. Of what is missing, and of helpers next to the
    tests, they get classes that refuse to be made.
    """
    with fake_tree(line.name, behaviours=_config_bodies(line)), _helpers(imports):
        workers = "mtp" if line.name == "1.2" else "eagle3"
        config = importlib.import_module(ARGS).MTPDecodingConfig
        _put(f"{PACKAGE}.llmapi", MTPDecodingConfig=config)
        _put(f"{PACKAGE}.llmapi", MTPDecodingConfig=decoding_config_class())
        _put(
            f"{TORCH}.speculative.mtp",
            MTPHiddenStatesManager=MTPHiddenStatesManager,
            MTPSpecMetadata=MTPSpecMetadata,
            MTPWorker=MTPWorker,
            MTPSampler=MTPSampler,
        )
        _put(f"{TORCH}.speculative.{workers}", MTPEagleWorker=MTPEagleWorker)
        for home in ("attention_backend", "attention.backends"):
            _put(f"{TORCH}.{home}", TrtllmAttentionMetadata=TrtllmAttentionMetadata)
        _put(f"{TORCH}.metadata", KVCacheParams=KVCacheParams)
        _put(PACKAGE, logger=_Logger())
        for module, name in imports:
            if not hasattr(_module(module), name) and f"{module}.{name}" not in sys.modules:
                _put(module, **{name: _refusing(module, name)})
        yield


def _module(name: str) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(_module(parent), last, module)
    return module


def _put(module: str, **names: Any) -> None:
    for name, value in names.items():
        setattr(_module(module), name, value)


def _refusing(module: str, name: str) -> type[Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} is not part of the MTP pieces")

    return type(name, (), {"__module__": module, "__new__": refuse})


@contextmanager
def _helpers(imports: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Removes modules that were put next to the package."""
    names = {module for module, _ in imports if _is_inside(module, HELPERS)}
    if names:
        names.add(HELPERS)
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _config_bodies(line: Line) -> dict[str, Callable[..., Any]]:
    """How a line's own config settles K and its mode."""

    def mode(config: Any) -> Any:
        modes = importlib.import_module(f"{TORCH}.speculative.interface").SpeculativeDecodingMode
        is_vanilla = config.use_mtp_vanilla or (getattr(config, line.writes_layers_to) or 1) > 1
        return modes.MTP if is_vanilla else modes.MTP_EAGLE_ONE_MODEL

    def settle_draft_len(config: Any) -> Any:
        if not line.is_newer:
            config.max_draft_len = config.num_nextn_predict_layers
        config.max_total_draft_tokens = config.max_draft_len
        return config

    def rename(_: type[Any], data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        older = data.pop("num_nextn_predict_layers", None)
        if older is not None and data.get("max_draft_len") is None:
            data["max_draft_len"] = older
        return data

    config = f"{ARGS}:MTPDecodingConfig"
    bodies = {
        f"{config}.spec_dec_mode": mode,
        f"{config}.set_max_total_draft_tokens": settle_draft_len,
        f"{MODE}.is_mtp_vanilla": lambda mode: mode.name == "MTP",
        f"{MODE}.is_mtp_eagle_one_model": lambda mode: mode.name == "MTP_EAGLE_ONE_MODEL",
    }
    if line.is_newer:
        bodies[f"{config}._remap_deprecated_num_nextn_predict_layers"] = rename
    return bodies


# ---- the tests ----------------------------------------------------------------------------------


def on_device(text: str, device: str = DEVICE) -> str:
    """The text with every string ``"cuda"`` reading ``device``; lines stay where they are."""
    if device == "cuda":
        return text
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    for token in reversed(tokens):
        if token.type == tokenize.STRING and token.string in ('"cuda"', "'cuda'"):
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = f"{line[:begin]}{device!r}{line[end:]}"
    return "".join(lines)


def imported_names(text: str) -> list[tuple[str, str]]:
    """What a text imports from ``tensorrt_llm``, and from helpers next to it."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if _is_inside(node.module, PACKAGE) or _is_inside(node.module, HELPERS)
    ]


@dataclass
class Outcome:
    """What became of a file's tests."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Test -> the first line of its error."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Test -> why it is not applicable."""

    def __str__(self) -> str:
        counts = (
            f"{len(self.passed)} passed, {len(self.failed)} failed, "
            f"{len(self.skipped)} not applicable"
        )
        failed = [f"  failed {name}: {why}" for name, why in self.failed.items()]
        skipped = [f"  not applicable {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([counts, *failed, *skipped])


class _Watch:
    """A pytest plugin: sorts tests by outcome, and skips what needs a whole engine."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", f"{WHOLE_ENGINE}: loads a checkpoint into an engine")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker(WHOLE_ENGINE):
                reason = "needs a checkpoint, a GPU and the host's whole engine"
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcome.failed[report.nodeid] = _error_line(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.outcome.failed[name] = _error_line(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.outcome.skipped[name] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.passed and report.when == "call":
            self.outcome.passed.append(name)


def _error_line(text: str) -> str:
    errors = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next(filter(None, errors), text.strip().rpartition("\n")[2])


def run_file(path: Path, line: Line) -> Outcome:
    """Run one file's tests over our pieces, in this process."""
    text = path.read_text()
    try:
        imports = imported_names(text)
    except SyntaxError as error:
        return Outcome(failed={path.name: f"SyntaxError: {error}"})
    watch = _Watch()
    search_path = list(sys.path)
    with tempfile.TemporaryDirectory() as folder, upstream_tree(line, imports):
        copy = Path(folder) / path.name
        copy.write_text(on_device(text))
        settings = ["-c", os.devnull, "--rootdir", folder]
        quiet = ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:asyncio"]
        try:
            code = pytest.main([str(copy), *settings, *quiet], plugins=[watch])
        finally:
            sys.path[:] = search_path
            sys.modules.pop(path.stem, None)
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        watch.outcome.failed[path.name] = f"pytest did not run it: {code!r}"
    return watch.outcome


def find_tests(path: Path, file_name: str) -> list[Path]:
    """The file, or the files of that name below a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.rglob(file_name))
    if not found:
        raise FileNotFoundError(f"--tests: expected {path} to be or to hold a {file_name}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract_host.upstream")
    parser.add_argument("--tests", type=Path, required=True, help="a test file or a folder of them")
    parser.add_argument("--line", choices=sorted(LINES), required=True)
    parser.add_argument("--file-name", default="test_mtp.py", help="which files of a folder run")
    given = parser.parse_args(arguments)
    num_passed = num_failed = 0
    for path in find_tests(given.tests, given.file_name):
        outcome = run_file(path, LINES[given.line])
        num_passed += len(outcome.passed)
        num_failed += len(outcome.failed)
        sys.stdout.write(f"{path}: {outcome}\n")
    return int(num_failed > 0 or num_passed == 0)


if __name__ == "__main__":
    sys.exit(main())

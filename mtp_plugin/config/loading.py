"""A YAML file or a mapping -> `LLMConfig`; relative paths are seen from the file's folder."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from mtp_plugin.config.bounded import read_text
from mtp_plugin.config.llm import LLMConfig
from mtp_plugin.config.messages import got
from mtp_plugin.config.mtp import MTPPluginOptions
from mtp_plugin.config.speculative import is_mtp
from mtp_plugin.config.values import resolve_path
from mtp_plugin.errors import ConfigError, describe_error

CHECKPOINT_FILES = ("config.json", "generation_config.json", "tokenizer.json")
MAX_NODES = 100_000
"""Values of a file at most, those of an alias counted each time."""
MAX_TEXT = 2**20
"""Characters of a file at most: PyYAML takes a minute for these."""
LONGEST_PATH = 400
"""Characters of a path that messages show."""


def load_config(
    path: str | Path,
    *,
    model: str | Path | None = None,
    plugin_options: str | Path | None = None,
) -> LLMConfig:
    """Read a YAML file; relative paths in it are taken from the file's folder.

    Args:
        model: checkpoint directory, before the file's; files for ``trtllm-serve`` name none.
        plugin_options: a YAML file with the keys of ``speculative_config.mtp``, as
            TensorRT-LLM's files cannot hold it.

    Raises:
        ConfigError: one line per mistake: file, key path, what came, what is allowed.
    """
    source = _source_of(path)
    if Path(path).suffix == ".safetensors" or Path(path).name in CHECKPOINT_FILES:
        raise ConfigError(
            f"{source}: expected a YAML file, got a file of a checkpoint; give its folder "
            f"{Path(path).parent}"
        )
    data = dict(read_yaml(Path(path), source, "a mapping with the key 'model'"))
    if model is not None:
        data["model"] = str(path_of(str(model), f"{source}: model"))
    if plugin_options is not None:
        data["speculative_config"] = _with_options(data, source, plugin_options)
    return _validated(data, source, _folder_of(path))


def path_of(text: str, source: str) -> Path:
    """A path that a user wrote, seen from the working directory, with ``~`` read.

    Raises:
        ConfigError: the path is invalid; the message begins with ``source``.
    """
    try:
        return Path(resolve_path(text, Path()))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _source_of(path: str | Path) -> str:
    """A file's name for messages."""
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"config: expected a file's path, got {got(path)}")
    return str(path) if len(str(path)) <= LONGEST_PATH else f"{str(path)[:LONGEST_PATH]}..."


def _folder_of(path: str | Path) -> Path:
    """The folder that relative paths in a file are seen from; of a pipe, the working directory."""
    is_open = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))
    return Path() if is_open else Path(path).parent


def load_plugin_options(path: str | Path, source: str) -> MTPPluginOptions:
    """Read a YAML file of the plugin's own options; relative paths are from the file's folder.

    Args:
        source: prefix of every message.

    Raises:
        ConfigError: one line per mistake, as `load_config` has them.
    """
    _source_of(path)
    data = read_yaml(Path(path), source, "a mapping of the plugin's options")
    context = {"source": source, "folder": _folder_of(path)}
    return MTPPluginOptions.model_validate(data, context=context)


def _with_options(data: Mapping[str, Any], source: str, path: str | Path) -> Any:
    """The file's ``speculative_config`` with options from another file."""
    spec = data.get("speculative_config")
    if not isinstance(spec, Mapping) or not is_mtp(spec):
        raise ConfigError(
            f"{source}: speculative_config: expected one of decoding_type 'MTP' with {path}, got "
            f"{got(spec)}"
        )
    if "mtp" in spec:
        raise ConfigError(f"{source}: speculative_config.mtp: expected either it or {path}")
    return {**spec, "mtp": load_plugin_options(path, str(path))}


def parse_config(mapping: Mapping[str, Any], source: str = "<mapping>") -> LLMConfig:
    """The same checks and messages for a mapping; relative paths stay as they are."""
    return _validated(mapping, source, None)


def _validated(mapping: Mapping[str, Any], source: str, folder: Path | None) -> LLMConfig:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {got(mapping)}")
    try:
        return LLMConfig.model_validate(mapping, context={"source": source, "folder": folder})
    except RecursionError:
        raise ConfigError(f"{source}: nests too deeply") from None


def json_schema() -> dict[str, Any]:
    """The JSON schema of the YAML file."""
    return LLMConfig.model_json_schema()


def _num_nodes(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node, with those of its aliases each time."""
    if node not in counted:
        counted[node] = MAX_NODES + 1  # an alias within the value of its anchor
        items = node.value if isinstance(node.value, list) else ()
        inner = chain.from_iterable(item if isinstance(item, tuple) else (item,) for item in items)
        counted[node] = min(1 + sum(_num_nodes(each, counted) for each in inner), MAX_NODES + 1)
    return counted[node]


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and more than `MAX_NODES` values, and reads 1e-3 as
    a number."""

    @override
    def construct_document(self, node: yaml.Node) -> Any:
        if _num_nodes(node, {}) > MAX_NODES:
            raise yaml.constructor.ConstructorError(
                problem=f"expected at most {MAX_NODES} values, each alias counted",
                problem_mark=node.start_mark,
            )
        return super().construct_document(node)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} was already given on line {lines[key.value]}",
                    problem_mark=key.start_mark,
                )
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"),
    list("-+0123456789"),
)


def read_yaml(path: Path, source: str, wanted: str) -> Mapping[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: there is none; the message begins with ``source``.
    """
    data = parse_yaml(read_text(path, source, "a YAML file"), source)
    if data is None:
        raise ConfigError(f"{source}: the file is empty; expected {wanted}")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {got(data)}")
    return data


def parse_yaml(text: str, source: str) -> Any:
    """Return the content of a YAML text; None: it is empty.

    Raises:
        ConfigError: it is too long or not valid YAML; the message begins with ``source``.
    """
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{source}: expected at most {MAX_TEXT} characters of YAML, got more")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        message = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}: {line}{message}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nests too deeply") from None
    except Exception as error:  # PyYAML fails in many ways on values that are not of their tag
        raise ConfigError(f"{source}: not valid YAML: {describe_error(error)}") from None

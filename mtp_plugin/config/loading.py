"""A YAML file or a mapping -> `LLMConfig`; relative paths are seen from the file's folder."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from mtp_plugin.config.llm import LLMConfig
from mtp_plugin.config.messages import got
from mtp_plugin.config.speculative import MTPDecodingConfig
from mtp_plugin.errors import ConfigError


def load_config(path: str | Path) -> LLMConfig:
    """Read a YAML file; relative paths in it are taken from the file's folder.

    Raises:
        ConfigError: one line per mistake: file, key path, what came, what is allowed.
    """
    source = str(path)
    data = _read_yaml(Path(path), source)
    config = parse_config(data, source)
    folder = Path(path).parent
    found: dict[str, Any] = {"model": _found_from(folder, config.model)}
    spec = config.speculative_config
    if isinstance(spec, MTPDecodingConfig) and isinstance(spec.mtp.draft_vocab, str):
        listed = {"draft_vocab": _found_from(folder, spec.mtp.draft_vocab)}
        options = spec.mtp.model_copy(update=listed)
        found["speculative_config"] = spec.model_copy(update={"mtp": options})
    return config.model_copy(update=found)


def _found_from(folder: Path, path: str) -> str:
    """The path as seen from a folder, where it is relative."""
    given = Path(path).expanduser()
    return str(given if given.is_absolute() else (folder / given).resolve())


def parse_config(mapping: Mapping[str, Any], source: str = "<mapping>") -> LLMConfig:
    """The same checks and messages for a mapping; relative paths stay as they are."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {got(mapping)}")
    return LLMConfig.model_validate(mapping, context={"source": source})


def json_schema() -> dict[str, Any]:
    """The JSON schema of the YAML file."""
    return LLMConfig.model_json_schema()


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-3 as a number."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            identity = (key.tag, key.value)
            if identity in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} was already given on line {lines[identity]}",
                    problem_mark=key.start_mark,
                )
            lines[identity] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+\Z"),
    list("-+0123456789"),
)


def _read_yaml(path: Path, source: str) -> Mapping[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file; expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8 text, got other bytes: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        told = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}: {line}{told}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {told}") from None
    if data is None:
        raise ConfigError(f"{source}: the file is empty; expected a mapping with the key 'model'")
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of keys to values, got {got(data)}")
    return data

"""The ways to say what an executor runs: a checkpoint with options, a YAML file, a config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mtp_plugin.config import LLMConfig, MTPDecodingConfig, load_config, parse_config
from mtp_plugin.errors import ConfigError, format_value
from mtp_plugin.executor.models import LoadedModel, read_facts
from mtp_plugin.executor.models.config_reader import TOKENIZER_FILE
from mtp_plugin.executor.models.tokenizer_files import read_tokenizer_of

MAX_DEFAULT_DRAFT_LEN = 3
"""K at most where nobody names one."""

_WAYS = "a checkpoint's folder, a YAML file, a mapping or an LLMConfig"


@dataclass(frozen=True)
class AskedConfig:
    """What a caller asked for, read and checked."""

    config: LLMConfig
    model: LoadedModel | None
    """An already loaded one to share; None: load that of the config."""
    file: str | None
    """The YAML file that the config comes from, for messages."""


def asked_config(
    config: LLMConfig | Mapping[str, Any] | str | Path | None,
    model: LoadedModel | str | Path | None,
    options: Mapping[str, Any],
    report: Callable[[str], None] | None,
) -> AskedConfig:
    """Read what `LLM` was called with.

    Args:
        config, model: as `LLM` has them.
        options: keys of `LLMConfig`, beside a checkpoint's folder alone.
        report: told in one line what was chosen where nobody said how to speculate; default:
            standard error.

    Raises:
        ConfigError: nothing or too much was given, or what was given cannot be.
        CheckpointError: the checkpoint cannot be asked for its MTP layers.
    """
    if report is not None and not callable(report):
        raise ConfigError(
            f"on_progress: expected a function of a line of text, got {format_value(report)}"
        )
    loaded = model if isinstance(model, LoadedModel) else None
    folder = model if isinstance(model, (str, Path)) else None
    if model is not None and loaded is None and folder is None:
        raise ConfigError(
            f"model: expected a checkpoint's folder or a LoadedModel, got {_kind(model)}"
        )
    if config is None and folder is None:
        beside = "" if loaded is None else " beside the loaded model, for what it does not hold"
        raise ConfigError(f"config: expected {_WAYS}{beside}, got nothing")
    if config is None or (isinstance(config, (str, Path)) and is_folder(config)):
        if config is not None and folder is not None:
            raise ConfigError(f"model: expected one checkpoint's folder, got {config} and {folder}")
        path = folder if config is None else config
        read = config_of_checkpoint(str(path), options, report or _to_standard_error)
        return AskedConfig(read, loaded, None)
    if options:
        raise ConfigError(
            f"{', '.join(options)}: expected in {_name_of(config)}; options stand beside a "
            f"checkpoint's folder alone"
        )
    if isinstance(config, (str, Path)):
        _check_file(config)
        return AskedConfig(load_config(config, model=folder), loaded, str(config))
    return AskedConfig(_parsed(config, folder), loaded, None)


def config_of_checkpoint(
    path: str, options: Mapping[str, Any], report: Callable[[str], None]
) -> LLMConfig:
    """The config of a checkpoint's folder, with options by the names of `LLMConfig`.

    Where they have no ``speculative_config``, drafts come of the first MTP layer (eagle), as many
    as the checkpoint has MTP layers, but no more than `MAX_DEFAULT_DRAFT_LEN` and than
    ``max_num_tokens`` holds for ``max_batch_size`` requests; ``report`` is told so.

    Raises:
        ConfigError: an option that cannot be.
        CheckpointError: the checkpoint cannot be asked for its MTP layers.
    """
    config = parse_config({"model": _expanded(path), **options}, "LLM")
    if "speculative_config" in options:
        return config
    layers = read_facts(config.model).num_mtp_layers
    room = config.max_num_tokens // config.max_batch_size - 1
    draft_len = min(layers, MAX_DEFAULT_DRAFT_LEN, room)
    of_layers = f"{layers} MTP {'layer' if layers == 1 else 'layers'}"
    if layers == 0:
        report("speculative_config: none given, no MTP layers: decoding without drafts")
    elif draft_len == 0:
        report(
            f"speculative_config: none given, max_num_tokens {config.max_num_tokens} has no room "
            f"for drafts of {config.max_batch_size} requests: decoding without drafts"
        )
    else:
        report(
            f"speculative_config: none given, {of_layers}: drafting with max_draft_len "
            f"{draft_len} (eagle)"
        )
    if draft_len == 0:
        return config
    drafting = MTPDecodingConfig(max_draft_len=draft_len)
    return config.model_validate({**dict(config), "speculative_config": drafting})


def is_folder(path: str | Path) -> bool:
    """Whether a path leads to a folder, and so names a checkpoint and no YAML file.

    Raises:
        ConfigError: no path can be so.
    """
    given = Path(_expanded(path))
    try:
        return given.is_dir()
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None


def _expanded(path: str | Path) -> str:
    try:
        return str(Path(path).expanduser()) if str(path) else ""
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None


def _check_file(path: str | Path) -> None:
    """Refuse what is neither there nor called like a YAML file."""
    try:
        if Path(path).suffix.lower() in (".yaml", ".yml") or Path(path).exists():
            return
    except OSError as error:
        raise ConfigError(f"{format_value(str(path))}: {error.strerror}") from None
    raise ConfigError(
        f"{path}: expected a checkpoint's folder or a YAML file, there is neither (nothing is "
        f"fetched from a hub)"
    )


def _parsed(config: LLMConfig | Mapping[str, Any], folder: str | Path | None) -> LLMConfig:
    update = {} if folder is None else {"model": _expanded(folder)}
    if isinstance(config, LLMConfig):
        return _validated({**vars(config), **update})
    if isinstance(config, Mapping):
        return parse_config({**config, **update})
    raise ConfigError(f"config: expected {_WAYS}, got {_kind(config)}")


def _validated(values: Mapping[str, Any]) -> LLMConfig:
    """A config from the attributes of one, which `model_construct` makes without validation."""
    checked = {
        # a section may be of a class that a host derives from ours
        name: type(value).model_validate(
            value.model_dump(warnings=False), context={"source": f"LLMConfig: {name}"}
        )
        if isinstance(value, BaseModel)
        else value
        for name, value in values.items()
    }
    return parse_config(checked, "LLMConfig")


def _name_of(config: object) -> str:
    return str(config) if isinstance(config, (str, Path)) else f"the {_kind(config)}"


def _kind(value: object) -> str:
    return type(value).__name__


def asked_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer in a folder, of its path; what is no path is one itself.

    Raises:
        ConfigError: there is none.
        CheckpointError: it cannot be used.
    """
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    folder = Path(_expanded(tokenizer))
    try:
        is_there = bool(str(tokenizer)) and (folder / TOKENIZER_FILE).is_file()
    except OSError:
        is_there = False
    if not is_there:
        raise ConfigError(
            f"tokenizer: expected a folder with {TOKENIZER_FILE}, "
            f"got {format_value(str(tokenizer))}"
        )
    return read_tokenizer_of(folder)


def _to_standard_error(line: str) -> None:
    if sys.stderr is not None:
        # a terminal that has gone must not end what it was told of
        with suppress(OSError):
            sys.stderr.write(f"{line}\n")
